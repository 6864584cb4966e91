"""Who names the cause: `phalanx doctor` beside cuda-doctor, env-doctor, ai-infradr, collect_env and ds_report.

    python -m venv --system-site-packages tools && tools/bin/pip install cuda-doctor env-doctor ai-infradr
    python benchmarks/doctor_tools.py --tools tools/bin
    python benchmarks/doctor_tools.py --tools tools/bin --only shm --show     what each of them printed

Each fault is made for real, or where it needs a GPU played by the tests' stand-in NVML and a stand-in nvidia-smi, which
give the same answers. A tool names the cause when a line that it does not print on the same machine without
the fault says so, by the pattern that stands with the fault. For phalanx the finding's id must be there; "first"
when it leads. Needs root (mount namespaces) and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.nvml.machine import GIB, GPU_IS_LOST, Machine, StandInGpu, build_libraries, uuid_of  # noqa: E402
from tests.tools.doctor.live import quick_torch  # noqa: E402

LIMIT_S = 60.0
HEALTHY = {
    "pcie_gen": 5,
    "pcie_gen_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "throttle": 0,
    "ecc_mode": 1,
}

SMI = """#!{python}
import csv, json, os, re, sys
machine = json.loads(os.environ["STAND_IN_SMI"])
query = next((word.partition("=")[2] for word in sys.argv if word.startswith("--query-gpu=")), None)
if query:
    for gpu in machine["gpus"]:
        print(", ".join(str(gpu.get(name, machine.get(name, "[N/A]"))) for name in query.split(",")))
elif "-L" in sys.argv:
    for gpu in machine["gpus"]:
        print("GPU %(index)s: %(name)s (UUID: %(uuid)s)" % gpu)
else:
    print("| NVIDIA-SMI %(driver_version)s   Driver Version: %(driver_version)s   CUDA Version: %(cuda)s |" % machine)
    for gpu in machine["gpus"]:
        print("|   %(index)s  %(name)s  | %(compute_mode)s | %(memory.used)s / %(memory.total)s |" % gpu)
"""


@dataclass(frozen=True)
class Fault:
    """What is broken, and how a tool would say so.

    Args:
        id: The id of phalanx's finding.
        says: A pattern for the lines of the other tools, generous: naming the thing is enough.
        make: Breaks it: variables, shell lines that run first, and more of phalanx's options.
    """

    id: str
    says: str
    make: Callable[[Path], Setting]


@dataclass
class Setting:
    """A machine with a fault."""

    environ: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)


def plain(*before: str, options: Sequence[str] = (), **environ: str) -> Callable[[Path], Setting]:
    return lambda _: Setting(dict(environ), list(before), list(options))


def torch_that(code: str, **options: Any) -> Callable[[Path], Setting]:
    return lambda folder: Setting(quick_torch(folder, code=code, **options))


def broken_cudnn(folder: Path) -> Setting:
    (folder / "cudnn").mkdir()
    (folder / "cudnn" / "libcudnn.so.9").write_bytes(b"not a library")
    code = "import ctypes; ctypes.CDLL('libcudnn.so.9')"
    return Setting({**quick_torch(folder, cuda="13.0", code=code), "LD_LIBRARY_PATH": str(folder / "cudnn")})


def full_disk(folder: Path) -> Setting:
    full = folder / "full"
    full.mkdir()
    before = [
        f"mount -t tmpfs -o size=32M tmpfs {full}",
        f"head -c 64M /dev/zero > {full}/x 2>/dev/null || true",
    ]
    return Setting({"TMPDIR": str(full)}, before, ["--output-dir", str(full)])


def loopback_name(folder: Path) -> Setting:
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    return Setting({}, [f"mount --bind {hosts} /etc/hosts"], ["--nnodes", "2"])


def torchvision_of_another(folder: Path) -> Setting:
    """The installed torchvision under another release's name, without a compiled part that loads."""
    import importlib.util
    import shutil

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("needs torchvision")
    other = folder / "other" / "torchvision"
    shutil.copytree(Path(spec.origin).parent, other, ignore=shutil.ignore_patterns("_C*"))
    (other / "_C.so").write_bytes(b"\x7fELF of another torch")
    (other / "version.py").write_text("__version__ = '0.19.0+cu130'\ncuda = '13.0'\n")
    info = folder / "other" / "torchvision-0.19.0+cu130.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.19.0+cu130\n")
    return Setting({"PYTHONPATH": str(folder / "other")})


def gpus(
    *changes: Mapping[str, Any],
    driver: str = "580.95.05",
    cuda: int = 13000,
    options: Sequence[str] = (),
    **environ: str,
) -> Callable[[Path], Setting]:
    """A machine with two GPUs; ``changes`` to the first and the second."""

    def make(folder: Path) -> Setting:
        described = []
        for index in range(2):
            change = dict(changes[index]) if index < len(changes) else {}
            numbers = HEALTHY | change.pop("numbers", {})
            described.append(
                StandInGpu(
                    **{"name": "NVIDIA H100 PCIe", "uuid": uuid_of("ab"[index]), "numbers": numbers, **change}
                )
            )
        (folder / "nvml").mkdir()
        machine = Machine(build_libraries(folder / "nvml"), folder, described, driver=driver, cuda=cuda)
        (folder / "nvml" / "libcuda.so.1").unlink()  # torch would ask more of it than it can answer
        seen = machine.environ()
        seen = {name: seen[name] for name in ("LD_LIBRARY_PATH", "STAND_IN_NVML")}
        (folder / "bin").mkdir()
        (folder / "bin" / "nvidia-smi").write_text(SMI.format(python=sys.executable))
        (folder / "bin" / "nvidia-smi").chmod(0o755)
        seen["STAND_IN_SMI"] = json.dumps(smi_answers(described, driver, cuda))
        path = f"{folder}/bin:{os.environ['PATH']}"
        return Setting({**seen, "PATH": path, **environ}, options=list(options))

    return make


def smi_answers(described: Sequence[StandInGpu], driver: str, cuda: int) -> dict[str, Any]:
    modes = {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}
    rows = [
        {
            "index": index,
            "name": gpu.name,
            "uuid": gpu.uuid,
            "memory.total": f"{gpu.total_bytes >> 20} MiB",
            "memory.used": f"{gpu.used_bytes >> 20} MiB",
            "compute_cap": "{}.{}".format(*gpu.capability),
            "compute_mode": modes[gpu.mode],
            "temperature.gpu": gpu.temperature,
        }
        for index, gpu in enumerate(described)
        if "all" not in gpu.fails
    ]
    return {"driver_version": driver, "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}", "gpus": rows}


FAULTS: Mapping[str, Fault] = {
    "torchvision of another torch": Fault(
        "torch-torchvision-mismatch", r"torchvision.*(mismatch|incompat|not match|belong|nms)|nms", torchvision_of_another
    ),
    "NumPy 2 with an old torch": Fault(
        "numpy2-abi",
        r"numpy.*(incompat|<\s?2|abi|not available|built)",
        torch_that(
            "zeros.numpy = lambda self: (_ for _ in ()).throw(RuntimeError('Numpy is not available'))",
            version="2.1.2+cu121",
            cuda="12.1",
        ),
    ),
    "torch hangs at import": Fault(
        "torch-import-hangs", r"hang|timed? ?out", torch_that("import signal\nwhile True: signal.pause()")
    ),
    "torch crashes at import": Fault(
        "torch-import-crashes",
        r"sigsegv|segmentation|crash|signal 11|-11\b",
        torch_that("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"),
    ),
    "broken cuDNN on LD_LIBRARY_PATH": Fault(
        "ld-library-path-shadows-cudnn", r"ld_library_path|libcudnn.*(too short|invalid|cannot)", broken_cudnn
    ),
    "no compiler": Fault(
        "compiler-missing", r"(gcc|g\+\+|compiler|c\+\+).*(not found|missing|no )|no .*compiler", plain(PATH="/nowhere")
    ),
    "shm of 64 MiB": Fault(
        "shm-too-small", r"shm|shared memory", plain("mount -t tmpfs -o size=64M tmpfs /dev/shm")
    ),
    "ulimit -n 256": Fault(
        "too-many-open-files", r"open files|nofile|descriptor|ulimit", plain("ulimit -n 256")
    ),
    "full disk": Fault("disk-full", r"disk|no space|space left", full_disk),
    "host name is loopback, 2 nodes": Fault(
        "hostname-resolves-to-loopback", r"loopback|127\.0\.1\.1|host ?name", loopback_name
    ),
    "GLOO_SOCKET_IFNAME=nothing0": Fault(
        "gloo-socket-ifname-wrong", r"gloo|nothing0|interface", plain(GLOO_SOCKET_IFNAME="nothing0")
    ),
    "NCCL_SOCKET_IFNAME=nothing0": Fault(
        "nccl-socket-ifname-wrong", r"nothing0.*(not|no such|missing)|interface.*(not|missing)", plain(NCCL_SOCKET_IFNAME="nothing0")
    ),
    "NCLL_DEBUG (misspelt)": Fault("variable-misspelt", r"ncll", plain(NCLL_DEBUG="INFO")),
    "driver too old": Fault(
        "driver-too-old", r"driver.*(too old|older|upgrade|update|newer|incompat|insufficient|support)", gpus(driver="450.80.02", cuda=11000)
    ),
    "CUDA_VISIBLE_DEVICES=0,9,1": Fault(
        "cuda-visible-devices-invalid", r"cuda_visible_devices.*(invalid|not|out of|hide|only)|'9'", gpus(CUDA_VISIBLE_DEVICES="0,9,1")
    ),
    "ECC errors": Fault("gpu-ecc-error", r"\becc\b|memory error", gpus({}, {"uncorrected_ecc": 3})),
    "throttling": Fault("gpu-throttled", r"throttl|slowdown", gpus({}, {"numbers": {"throttle": 0x48}})),
    "PCIe x8 of x16": Fault("pcie-link-degraded", r"pcie|x8", gpus({}, {"numbers": {"pcie_width": 8}})),
    "exclusive mode": Fault(
        "exclusive-compute-mode", r"exclusive.*(mode|process)|compute mode", gpus({}, {"mode": 3}, options=["--nproc-per-node", "2"])
    ),
    "MIG, 2 ranks": Fault(
        "mig-single-device",
        r"\bmig\b",
        gpus({"migs": [StandInGpu(uuid=uuid_of("c", "MIG"), total_bytes=10 * GIB)]}, options=["--nproc-per-node", "2"]),
    ),
    "a lost GPU": Fault("gpu-lost", r"lost|fallen off", gpus({}, {"fails": {"all": GPU_IS_LOST}})),
    "mixed models": Fault(
        "mixed-gpus", r"mixed|different (gpu|model)|heterogen", gpus({}, {"name": "NVIDIA A100-SXM4-80GB", "capability": (8, 0)})
    ),
}  # fmt: skip


def tools(folder: Path) -> dict[str, list[str]]:
    """The command of each tool; all run in the interpreter's own packages."""
    python = str(folder / "python")
    return {
        "cuda-doctor": [python, str(folder / "cuda-doctor"), "diagnose"],
        "env-doctor": [python, str(folder / "env-doctor"), "check"],
        "ai-infradr": [python, str(folder / "ai-infradr"), "--verbose"],
        "collect_env": [python, "-m", "torch.utils.collect_env"],
        "ds_report": [python, "-c", "from deepspeed.env_report import cli_main; cli_main()"],
    }


def run(words: Sequence[str], setting: Setting, folder: Path) -> tuple[str, bool]:
    """What a program prints, and whether it had to be ended."""
    packages = sysconfig.get_path("purelib")
    path = ":".join(filter(None, (setting.environ.get("PYTHONPATH"), packages)))
    environ = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environ |= {**setting.environ, "PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1"}
    command = list(words)
    if setting.before:
        command = [
            "unshare",
            "--mount",
            "sh",
            "-ec",
            "\n".join([*setting.before, "exec " + shlex.join(command)]),
        ]
    process = subprocess.Popen(
        command,
        env=environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        return output.decode(errors="replace"), False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return output.decode(errors="replace"), True


def ours(fault: Fault, setting: Setting, folder: Path) -> str:
    words = [sys.executable, "-m", "phalanx", "doctor", "--json", "--no-self-test", "--timeout-s", "10"]
    output, _ = run([*words, *setting.options], setting, folder)
    start = output.find("{")
    findings = json.loads(output[start:])["findings"] if start >= 0 else []
    bad = [finding["id"] for finding in findings if finding["status"] in ("fail", "warn")]
    return "first" if bad[:1] == [fault.id] else "yes" if fault.id in bad else "no"


def names_it(
    fault: Fault, words: Sequence[str], setting: Setting, folder: Path, known: str, show: bool
) -> str:
    output, ended = run(words, setting, folder)
    usual = {re.sub(r"\d+", "0", line.strip()) for line in known.splitlines()}
    new = [line for line in output.splitlines() if re.sub(r"\d+", "0", line.strip()) not in usual]
    hits = [line.strip() for line in new if re.search(fault.says, line, re.IGNORECASE)]
    if show:
        print(f"--- {' '.join(words[-2:])}\n{output}\n>>> {hits}")
    if ended:
        return "hangs"
    return "yes" if hits else "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tools", type=Path, required=True, help="bin folder that has the other tools")
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--show", action="store_true", help="print what the tools print")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    options = parser.parse_args()
    others = tools(options.tools.resolve())
    with tempfile.TemporaryDirectory() as name:
        healthy = {kind: make(_folder(name, kind)) for kind, make in (("cpu", plain()), ("gpu", gpus()))}
        usual = {
            (kind, tool): run(words, setting, _folder(name, f"{kind}-{tool}"))[0]
            for kind, setting in healthy.items()
            for tool, words in others.items()
        }
        table: dict[str, dict[str, str]] = {}
        for number, (title, fault) in enumerate(FAULTS.items()):
            if options.only not in title:
                continue
            folder = _folder(name, str(number))
            setting = fault.make(folder)
            kind = "gpu" if "STAND_IN_NVML" in setting.environ else "cpu"
            table[title] = {"phalanx doctor": ours(fault, setting, folder)}
            for tool, words in others.items():
                answer = names_it(fault, words, setting, folder, usual[kind, tool], options.show)
                table[title][tool] = answer
            if not options.json:
                print(title, table[title], flush=True)
    versions = {tool: _version(options.tools, tool) for tool in ("cuda-doctor", "env-doctor", "ai-infradr")}
    if options.json:
        print(json.dumps({"schema": 1, "faults": table, "versions": versions}))
        return
    columns = ["phalanx doctor", *others]
    print("\n| fault | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for title, row in table.items():
        print(f"| {title} | " + " | ".join(row[column] for column in columns) + " |")
    named = {column: sum(row[column] in ("yes", "first") for row in table.values()) for column in columns}
    print(f"| named, of {len(table)} | " + " | ".join(str(named[column]) for column in columns) + " |")
    print(f"versions: {versions}; one run each")


def _folder(parent: str, name: str) -> Path:
    made = Path(parent) / name
    made.mkdir()
    return made


def _version(folder: Path, tool: str) -> str:
    code = f"from importlib.metadata import version; print(version({tool!r}))"
    done = subprocess.run([str(folder / "python"), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
