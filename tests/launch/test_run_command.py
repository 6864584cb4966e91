"""`phalanx run` from the words typed to the ranks' own output, with real ranks."""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.options import BY_KEY

SCRIPT = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME",
         "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
         "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"]
found = {name: os.environ.get(name) for name in names}
found |= {"argv": sys.argv, "path": sys.path[0], "name": __name__, "master": "MASTER_PORT" in os.environ}
with open(f"seen-{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
print("rank", os.environ["RANK"], "was here")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for option in BY_KEY.values():
        for variable in option.variables:
            monkeypatch.delenv(variable, raising=False)
    return tmp_path


def phalanx_run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", "run", *words],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def seen(folder: Path, rank: int) -> dict[str, object]:
    found = json.loads((folder / f"seen-{rank}.json").read_text())
    assert isinstance(found, dict)
    return found


def test_a_script_on_two_ranks(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "show.py").write_text(SCRIPT)
    done = phalanx_run(
        *("--nproc_per_node", "2", "--gpus", "none", "--max-restarts=1", "--role", "trainer", "-t", "3"),
        *("sub/show.py", "--lr", "0.1", "--", "-m", "a b"),
        OMP_NUM_THREADS="3",
        PHALANX_RUN_LOG_DIR="logs",
        PHALANX_RUN_RDZV_ID="job7",
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert seen(folder, rank) == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "trainer",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "job7",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "1",
            "OMP_NUM_THREADS": "3",
            "CUDA_VISIBLE_DEVICES": "",
            "argv": ["sub/show.py", "--lr", "0.1", "--", "-m", "a b"],
            "path": str(folder / "sub"),
            "name": "__main__",
            "master": True,
        }
        assert f"rank {rank} was here" in (folder / "logs" / f"rank-{rank}.log").read_text()
    assert "--tee has no effect" in done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] rank {rank} was here" for rank in (0, 1)]
    assert json.loads((folder / "logs" / "run.json").read_text())["exit_code"] == 0


def test_a_module_and_the_default_log_folder(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "show.py").write_text(SCRIPT)
    done = phalanx_run("-m", "pkg.show", "x")
    assert done.returncode == 0, done.stderr
    found = seen(folder, 0)
    assert found["argv"] == [str(folder / "pkg" / "show.py"), "x"]
    assert (found["path"], found["name"], found["WORLD_SIZE"]) == (str(folder), "__main__", "1")
    (logs,) = (folder / "phalanx-logs").iterdir()
    assert logs.name.endswith("-show")


def test_an_executable(folder: Path) -> None:
    script = folder / "job.sh"
    script.write_text('#!/bin/sh\necho "$RANK of $WORLD_SIZE: $*"\n')
    script.chmod(0o755)
    done = phalanx_run("--no-python", "--nproc-per-node=2", "./job.sh", "a", "--gpus")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {rank} of 2: a --gpus" for rank in (0, 1)]


def test_a_recipe_by_name(folder: Path) -> None:
    done = phalanx_run(
        *("--nproc-per-node", "2", "mnist"), *("--data", "fake", "--epochs", "1", "--output-dir", "out")
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "out" / "metrics.jsonl").read_text().splitlines()[-1])["split"] == "test"


def test_a_rank_that_fails_is_exit_code_1(folder: Path) -> None:
    (folder / "bad.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no such thing')\n"
    )
    done = phalanx_run("--nproc-per-node", "2", "bad.py")
    assert done.returncode == 1
    assert "First failure: rank 1 (local rank 1, node 0): ValueError: no such thing" in done.stderr


def test_a_port_that_was_asked_for_is_where_the_ranks_meet(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "meet.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint(dist.get_world_size())\n"
        "dist.destroy_process_group()\n"
    )
    done = phalanx_run("--nproc-per-node=2", f"--master-port={port}", "--master-addr=127.0.0.1", "meet.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2\n") == 2


def test_a_recipes_help_is_shown_once() -> None:
    done = phalanx_run("--nproc-per-node", "2", "mnist", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--epochs") >= 1
    assert "[rank" not in done.stdout


def test_two_nodes_on_one_machine_meet_at_an_endpoint(folder: Path) -> None:
    (folder / "meet.py").write_text(
        "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\ntotal = torch.ones(1)\n"
        "dist.all_reduce(total)\nprint('node', os.environ['GROUP_RANK'], 'total', total.item())\n"
        "dist.destroy_process_group()\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint, "meet.py"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda node: phalanx_run("--log-dir", f"logs-{node}", *words), range(2)))
    assert [item.returncode for item in done] == [0, 0], done[0].stderr + done[1].stderr
    lines = sorted(item.stdout.partition("] ")[2].strip() for item in done)
    assert lines == ["node 0 total 2.0", "node 1 total 2.0"]
