"""The wheel is whole and works from elsewhere; installing never replaces a torch that is there."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

# No configuration file and no index: these tests must neither see nor reach anything outside.
OFFLINE = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))},
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}


def _run(*words: str | Path, cwd: Path | None = None, **environ: str) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**OFFLINE, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that the tree stays clean."""
    source = tmp_path_factory.mktemp("source folder")  # with a space in its name
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for area in ("launch", "dist", "recipes", "tools"):
        _run("cp", "-r", ROOT / area, source / area)
    target = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    _run(*pip, "--wheel-dir", target, source)
    (built,) = target.glob("phalanx-*.whl")
    return built


def test_the_wheel_holds_every_source_file_once(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    expected = set()
    for area in ("launch", "dist", "recipes", "tools"):
        for path in (ROOT / area).rglob("*"):
            relative = path.relative_to(ROOT)
            if path.is_dir() or "__pycache__" in relative.parts:
                continue
            if relative.parts[:2] == ("launch", "phalanx"):
                expected.add("/".join(relative.parts[1:]))
            else:
                expected.add("phalanx/" + "/".join(relative.parts))
    assert len(names) == len(set(names))
    assert set(names) == expected


def test_the_installed_wheel_runs_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel)
    code = "import phalanx, phalanx.dist, phalanx.recipes; print(phalanx.__file__); print(phalanx.dist.ShardSampler)"
    shown = _run(
        sys.executable,
        "-P" if sys.version_info >= (3, 11) else "-B",
        "-c",
        code,
        cwd=tmp_path,
        PYTHONPATH=str(site),
    )
    assert shown.splitlines()[0].startswith(str(site))
    version = _run(sys.executable, "-m", "phalanx", "--version", cwd=tmp_path, PYTHONPATH=str(site))
    assert "0.1.0" in version
    assert (site / "bin" / "phalanx").exists()


def _fake_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """An empty distribution that has only a name, a version and what it requires."""
    module = name.replace("-", "_").lower()
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")


def test_an_existing_torch_is_not_replaced(wheel: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for torch, torchvision in (("2.6.0", "0.21.0"), ("2.8.0", "0.23.0"), ("2.14.1", "0.29.1")):
        _fake_wheel(shelf, "torch", torch)
        _fake_wheel(shelf, "torchvision", torchvision, f"torch=={torch}")
    others = "numpy nvidia-ml-py psutil click rich safetensors tensorboard matplotlib tyro PyYAML"
    for name in others.split():
        _fake_wheel(shelf, name, "999.0")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", shelf)

    def version(name: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        return _run(python, "-c", code, cwd=tmp_path).strip()

    _run(*install, "torch==2.8.0")
    _run(*install, wheel)
    assert version("torch") == "2.8.0"
    # `all` brings every engine; its two have no wheel on this shelf but need no particular torch either.
    for name in ("accelerate", "deepspeed"):
        _fake_wheel(shelf, name, "999.0", "torch>=2.0")
    _run(*install, f"phalanx[all] @ {wheel.as_uri()}")
    assert version("torch") == "2.8.0"
    # With the torch named, torchvision follows it; this is the line that the manual gives.
    _run(*install, f"phalanx[recipes,torchvision] @ {wheel.as_uri()}", "torch==2.8.0")
    assert (version("torch"), version("torchvision")) == ("2.8.0", "0.23.0")
