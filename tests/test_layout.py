"""The folder named dist/ is source: collected, linted, importable, and imports point one way."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

AREAS = ("dist", "launch", "recipes", "tools")
SOURCES = sorted(path for area in AREAS for path in (ROOT / area).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def _run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pytest_collects_every_test_file() -> None:
    listed = _run("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    seen = {line.split("::")[0] for line in listed.splitlines() if "::" in line}
    expected = {str(path.relative_to(ROOT)) for path in TESTS}
    assert any(name.startswith("tests/dist/") for name in expected)
    assert expected - seen == set()


def test_ruff_sees_every_source_file() -> None:
    listed = _run("-m", "ruff", "check", "--show-files", ".")
    seen = {Path(line) for line in listed.splitlines()}
    assert {path for path in SOURCES + TESTS if path not in seen} == set()


def test_the_tools_that_skip_dist_by_default_are_told_not_to() -> None:
    setup, pyproject = (ROOT / "setup.cfg").read_text(), (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^norecursedirs = (?!.*\bdist\b).+$", setup, re.MULTILINE)
    assert re.search(r"^exclude = \[(?!.*\"dist\").+\]$", pyproject, re.MULTILINE)
    assert re.search(r"^skip = \[(?!.*\"dist\").+\]$", pyproject, re.MULTILINE)
    assert not re.search(r"^/?dist/?$", (ROOT / ".gitignore").read_text(), re.MULTILINE)


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    setup = (ROOT / "setup.cfg").read_text()
    packages = re.search(r"^packages =\n((?:    .+\n)+)", setup, re.MULTILINE)
    assert packages is not None
    listed = set(packages.group(1).split())
    folders = {path.parent.relative_to(ROOT) for path in SOURCES}
    expected = {
        "phalanx" if str(folder) == "launch/phalanx" else "phalanx." + ".".join(folder.parts)
        for folder in folders
        if folder.name != "data"
    }
    assert listed == expected


FORBIDDEN = {
    "dist": {"launch", "recipes", "tools"},
    "tools": {"launch", "recipes"},
    "launch": {"recipes"},
    "recipes": {"launch", "tools"},
}


def _imported(path: Path) -> set[str]:
    """phalanx sub-packages that a file imports anywhere, even inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; say phalanx.{path.parent.name}..."
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("phalanx.")}
    return found


@pytest.mark.parametrize("area", AREAS)
def test_imports_point_one_way(area: str) -> None:
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] == area and path.parent.name != "phalanx":
            wrong = _imported(path) & FORBIDDEN[area]
            assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


LIGHT = [
    "phalanx",
    "phalanx.dist",
    "phalanx.dist.devices",
    "phalanx.dist.environments",
    "phalanx.dist.environments.hostfile",
    "phalanx.dist.environments.slurm",
    "phalanx.dist.keys",
    "phalanx.dist.plan",
    "phalanx.launch",
    "phalanx.launch.cli",
    "phalanx.launch.entry",
    "phalanx.recipes",
    "phalanx.tools",
    "phalanx.tools.bench",
    "phalanx.tools.bench.settings",
    "phalanx.tools.explain",
    "phalanx.tools.explain.explaining",
    "phalanx.tools.gpus",
    "phalanx.tools.gpus.node_reading",
    "phalanx.tools.gpus.screen",
]


@pytest.mark.parametrize("module", LIGHT)
def test_importing_does_nothing_and_needs_no_torch(module: str) -> None:
    code = (
        "import logging, os, sys\n"
        "before = dict(os.environ)\n"
        f"import {module}\n"
        "assert dict(os.environ) == before, 'the environment changed'\n"
        "assert not logging.getLogger().handlers, 'logging was configured'\n"
        "heavy = {'torch', 'torchvision', 'pynvml', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    _run("-c", code)


@pytest.mark.parametrize("area", ["phalanx", *(f"phalanx.{area}" for area in AREAS)])
def test_every_public_name_loads_and_the_list_is_sorted(area: str) -> None:
    package = importlib.import_module(area)
    names = list(package.__all__)
    assert names == sorted(names)
    for name in names:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError):
        _ = package.no_such_name


PUBLIC = {
    "phalanx.dist": """Accuracy CheckpointManager Cutout Engine Gpu HorizontalFlip LengthBucketSampler Match Mean
        Normalize NumericsWarning Plan Progress RandAugment RandomCrop Restored ShardBatchSampler ShardLoader
        ShardSampler Shift StepInfo TensorLoader TrivialAugment VisibleDevices
        WeightedShardSampler World all_reduce_sum audit_collectives augment_batch
        barrier bisect_divergence canonical_keys
        class_weights consolidate_weights convert_sync_batchnorm gather_objects init_world load_state_dict match_state_dict parallelize
        rank_zero_first revert_sync_batchnorm seed_everything select_devices set_epoch shard_iterable unwrap
        visible_devices visible_devices_per_rank""",
}


def test_the_public_names_are_the_promised_ones() -> None:
    for area, names in PUBLIC.items():
        assert sorted(names.split()) == importlib.import_module(area).__all__


def test_every_public_name_has_a_docstring() -> None:
    package = importlib.import_module("phalanx.dist")
    bare = [name for name in package.__all__ if not (getattr(package, name).__doc__ or "").strip()]
    assert bare == []


def test_nothing_speaks_of_how_the_project_was_made() -> None:
    words = re.compile(r"/work/|\.library|helper-\d|lib-\d{3}|farm-bench|/opt/wheels|/opt/pypi")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: no list of the project's files")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".npz", ".png"} or name == "tests/test_layout.py" or not path.is_file():
            continue
        hit = words.search(path.read_text(errors="replace"))
        assert hit is None, f"{name}: {hit and hit.group()}"
