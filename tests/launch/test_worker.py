"""A rank looks to its script like a fresh Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.worker import PLAN_VARIABLE, WorkerPlan
from tests.launch.launching import Launcher

#: Writes down what a script can see of its process.
PROBE = '''
"""Documentation."""
import os
descriptors = sorted(os.listdir("/proc/self/fd"))
import gc, json, logging, multiprocessing, random, resource, signal, sys, threading, warnings
if len(sys.argv) > 2:
    import numpy, torch
def stream(s):
    return [s.name, s.mode, s.encoding, s.errors, s.isatty(), type(s).__name__, s.newlines, s.fileno()]
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
facts = {
    "main": {
        "name": __name__, "file": __file__, "doc": __doc__, "package": __package__,
        "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__, "builtins": str(__builtins__),
        "names": sorted(name for name in vars(sys.modules["__main__"]) if name.startswith("__")),
        "is_this": vars(sys.modules["__main__"]) is globals(),
    },
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "descriptors": descriptors,
    "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
    "originals": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "handlers": {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "masks": [status[name].strip() for name in ("SigBlk", "SigIgn", "SigPnd", "ShdPnd")],
    "wakeup": signal.set_wakeup_fd(-1),
    "threads": [thread.name for thread in threading.enumerate()], "kernel_threads": status["Threads"],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
    "warnings": [str(entry) for entry in warnings.filters],
    "logging": [logging.root.level, len(logging.root.handlers),
                sorted(n for n, log in logging.root.manager.loggerDict.items() if getattr(log, "handlers", None))],
    "process": [multiprocessing.current_process().name, multiprocessing.get_start_method(allow_none=True)],
    "hook": sys.excepthook is sys.__excepthook__, "trace": sys.gettrace(), "recursion": sys.getrecursionlimit(),
    "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    "nice": os.nice(0), "program": os.readlink("/proc/self/exe"), "meta_path": len(sys.meta_path),
}
if len(sys.argv) > 2:
    facts["torch_threads"] = torch.get_num_threads()
open(sys.argv[1], "w").write(json.dumps(facts))
'''


def _plan(plan: WorkerPlan, folder: Path) -> subprocess.CompletedProcess[str]:
    """A rank's process without its launcher."""
    words = [sys.executable, "-u", "-m", "phalanx.launch.worker"]
    environ = {**os.environ, PLAN_VARIABLE: plan.to_json()}
    return subprocess.run(
        words, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


def _python(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _facts(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    assert isinstance(content, dict)
    return content


FORMS = {
    "relative": "job/probe.py",
    "dotted": "./job/../job/probe.py",
    "parent": "../{folder}/job/probe.py",
    "link": "link.py",
    "folder": "program",
    "module": "job.probe",
    "package": "job",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_target_sees_what_python_itself_would_show(tmp_path: Path, form: str) -> None:
    for name in ("job/probe.py", "job/__main__.py", "program/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PROBE)
    (tmp_path / "job/__init__.py").touch()
    (tmp_path / "link.py").symlink_to("job/probe.py")
    name = FORMS[form].format(folder=tmp_path.name)
    is_module = form in ("module", "package")
    plain = _python([*(["-m"] if is_module else []), name, "facts.json"], tmp_path)
    expected = _facts(tmp_path / "facts.json")
    plan = WorkerPlan(kind="module" if is_module else "script", name=name, args=("facts.json",))
    ours = _plan(plan, tmp_path)
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)
    assert _facts(tmp_path / "facts.json") == expected


@pytest.mark.parametrize("options", [[], ["--no-preload"]], ids=["forked", "no-preload"])
def test_a_rank_is_like_a_fresh_process(launcher: Launcher, options: list[str]) -> None:
    """Also what a fork would share: descriptors, handlers, threads, streams, settings."""
    script = launcher.script(PROBE)
    environ = {**launcher.environ, "OMP_NUM_THREADS": "2"}
    launcher.environ = environ
    plain = subprocess.run(
        [sys.executable, script, "plain.json", "torch"],
        cwd=launcher.folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert plain.returncode == 0
    done = launcher.run(*options, script, "rank.json", "torch", ranks=1)
    assert done.returncode == 0, done.stderr
    expected, found = _facts(launcher.folder / "plain.json"), _facts(launcher.folder / "rank.json")
    expected["argv"][1] = "rank.json"
    assert found == expected


ENDINGS = {
    "exception": "def f():\n    raise ValueError('boom')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "syntax": "x = (",
    "import": "import there_is_no_such_module",
    "exit-text": "import sys; sys.exit('no data here')",
    "exit-code": "import sys; sys.exit(3)",
    "exit-none": "import sys; sys.exit()",
    "exit-true": "import sys; sys.exit(True)",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, sys.last_value)\nraise OSError('x')",
    "bad-hook": "import sys\nsys.excepthook = None\nraise OSError('x')",
    "exiting-hook": "import sys\nsys.excepthook = lambda *a: sys.exit(7)\nraise OSError('x')",
    "thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start(); t.join(); print('on')",
    "atexit": "import atexit\natexit.register(print, 'end')\nraise SystemExit(4)",
    "late-thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "unclosed-file": "f = open('out.txt', 'w'); f.write('all of it')",
    "group": "raise BaseException('base')",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_python_ends_it(tmp_path: Path, ending: str) -> None:
    (tmp_path / "script.py").write_text(ENDINGS[ending])
    plain = _python(["-u", "script.py"], tmp_path)
    ours = _plan(WorkerPlan(kind="script", name="script.py", args=()), tmp_path)
    assert ours.stdout == plain.stdout
    if ending != "bad-hook":  # Python shows both exceptions with words of its own
        assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode
    if ending == "unclosed-file":
        assert (tmp_path / "out.txt").read_text() == "all of it"


@pytest.mark.parametrize("name", ["missing.py", "missing/missing.py"])
def test_a_missing_script_is_named_with_its_full_path(tmp_path: Path, name: str) -> None:
    ours = _plan(WorkerPlan(kind="script", name=name, args=()), tmp_path)
    plain = _python([name], tmp_path)
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    ours = _plan(WorkerPlan(kind="module", name="no.such.module", args=()), tmp_path)
    plain = _python(["-m", "no.such.module"], tmp_path)
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)


CHILDREN = """
import multiprocessing, os, pickle, sys
import torch
from concurrent.futures import ProcessPoolExecutor
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return i * i

def add_one(x):
    return x + 1

def in_spawned(index, folder):
    open(f"{folder}/spawned-{os.environ['RANK']}-{index}", "w").close()

if __name__ == "__main__":
    assert isinstance(pickle.loads(pickle.dumps(Squares())), Squares)
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(add_one, [1, 2]) == [2, 3], method
    with ProcessPoolExecutor(1) as pool:
        assert list(pool.map(add_one, [5])) == [6]
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
        assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25, 36, 49]], method
    torch.multiprocessing.spawn(in_spawned, args=(sys.argv[1],), nprocs=1)
    print("all fine")
"""


def test_children_of_a_rank_find_its_main_module(launcher: Launcher) -> None:
    """Pickles, pools, loader workers and `mp.spawn` with what the script itself defines."""
    done = launcher.run(launcher.script(CHILDREN), launcher.folder, ranks=1, timeout_s=120)
    assert (done.returncode, done.stdout) == (0, "all fine\n"), done.stderr
    assert (launcher.folder / "spawned-0-0").exists()


UNSEEDED = """
import os, random, json
import numpy, torch
numbers = [random.random(), float(numpy.random.rand()), float(torch.rand(1)), os.urandom(4).hex()]
print(f"numbers {json.dumps(numbers)}\\n", end="", flush=True)  # one write: torchrun's ranks share a pipe
import multiprocessing
print(f"numbers {json.dumps([multiprocessing.current_process().authkey.hex()])}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("how", ["forked", "no-preload", "torchrun"])
def test_an_unseeded_script_draws_different_numbers_on_each_rank(launcher: Launcher, how: str) -> None:
    script = launcher.script(UNSEEDED)
    if how == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        text = subprocess.run(words, capture_output=True, text=True, timeout=60, env=launcher.environ).stdout
    else:
        text = launcher.run(*(["--no-preload"] if how == "no-preload" else []), script).stdout
    numbers = [json.dumps(n) for line in re.findall(r"numbers (\[.*\])", text) for n in json.loads(line)]
    assert len(numbers) == 2 * 5
    assert len(set(numbers)) == 2 * 5, numbers


def test_a_plan_survives_its_way_through_the_environment() -> None:
    plan = WorkerPlan(kind="module", name="a.b", args=("--x", "é \n"), run_path=True, report_address="ab")
    assert WorkerPlan.from_json(plan.to_json()) == plan
