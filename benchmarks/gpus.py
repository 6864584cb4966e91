"""Wall time of `phalanx gpus` beside gpustat and `nvitop -1`, on one stand-in machine with 8 GPUs.

    python benchmarks/gpus.py                21 rounds, after one of each to warm the file cache
    python benchmarks/gpus.py --runs 5 --json
    python benchmarks/gpus.py --venv DIR     keep the environment there for the next time

All three are installed from wheels into one fresh environment of this interpreter, with nothing that phalanx does not need for this
(no torch). NVML is the stand-in library of the tests; four processes are on the GPUs. The three take turns; ratios are medians over rounds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from conditions import arguments, conditions, in_words, told_as_json

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.nvml.machine import GIB, Machine, StandInGpu, build_libraries, uuid_of  # noqa: E402

PACKAGES = ["gpustat", "nvitop", "click", "psutil", "nvidia-ml-py", "rich"]


def environment(folder: Path) -> Path:
    """The environment's bin folder, with the three tools in it."""
    if not (folder / "bin" / "nvitop").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *PACKAGES], check=True)
    # Built elsewhere: setuptools leaves a build folder beside the sources.
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "source"
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        for path in listed.splitlines():
            if (ROOT / path).is_file() and not path.startswith(("tests/", "docs/")):
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                (copy / path).write_bytes((ROOT / path).read_bytes())
        install = ["install", "-q", "--no-deps", "--force-reinstall", str(copy)]
        subprocess.run([folder / "bin" / "pip", *install], check=True)
    return folder / "bin"


def wall_s(words: list[str], environ: dict[str, str]) -> float:
    begun = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True, env=environ)
    return time.perf_counter() - begun


def measure(runs: int, binaries: Path) -> dict[str, Any]:
    """Medians and the paired ratios of ours to theirs."""
    commands = {
        "phalanx gpus": [str(binaries / "phalanx"), "gpus"],
        "gpustat": [str(binaries / "gpustat")],
        "nvitop -1": [str(binaries / "nvitop"), "-1"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    sleepers = [subprocess.Popen(["sleep", "3600"]) for _ in range(4)]
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            gpus = [
                StandInGpu(
                    uuid=uuid_of("0123456789"[index]),
                    used_bytes=40 * GIB,
                    utilization=(90, 40),
                    compute={sleepers[index // 2].pid: 40 * GIB},
                )
                for index in range(8)
            ]
            environ = Machine(build_libraries(folder), folder, gpus).environ()
            environ.pop("PYTHONPATH", None)
            for words in commands.values():
                wall_s(words, environ)
            for _ in range(runs):
                for command, words in commands.items():
                    times[command].append(wall_s(words, environ))
    finally:
        for process in sleepers:
            process.kill()
            process.wait()
    ours = times["phalanx gpus"]
    ratios = {
        name: [a / b for a, b in zip(ours, theirs, strict=True)]
        for name, theirs in times.items()
        if name != "phalanx gpus"
    }
    return {
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "ratio_range": {name: [min(values), max(values)] for name, values in ratios.items()},
    }


def versions(binaries: Path) -> dict[str, str]:
    listed = subprocess.run(
        [str(binaries / "pip"), "list", "--format", "json"], check=True, capture_output=True, text=True
    ).stdout
    return {
        one["name"]: one["version"] for one in json.loads(listed) if one["name"] in {*PACKAGES, "phalanx"}
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--venv", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        binaries = environment((options.venv or Path(name) / "venv").absolute())
        result = {
            **conditions("python", "cores", "load"),
            "runs": options.runs,
            "versions": versions(binaries),
            **measure(options.runs, binaries),
        }
    if told_as_json(result, options):
        return
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    print(f"{in_words(result)}, load {result['load']:.1f}, {options.runs} runs; {packages}")
    for name, median in result["median_s"].items():
        print(f"{name:14} {median * 1e3:7.1f} ms")
    for name, ratio in result["ratio"].items():
        low, high = result["ratio_range"][name]
        print(f"phalanx gpus is x {ratio:.2f} of {name}  ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
