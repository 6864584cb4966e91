"""What TARGET means, and one message for each way of getting it wrong."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from phalanx.launch import targets
from phalanx.launch.spec import Target
from phalanx.launch.targets import Recipe, recipes, resolve
from phalanx.tools.usage import UsageMistake


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str = "", mode: int = 0o644) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    Path(path).chmod(mode)


def refused(text: str, **how: bool) -> str:
    with pytest.raises(UsageMistake) as caught:
        resolve(text, **how)
    return str(caught.value)


def test_a_script() -> None:
    write("sub dir/train.py")
    assert resolve("sub dir/train.py") == Target(kind="script", name="sub dir/train.py", display="train")


def test_a_script_without_an_ending() -> None:
    write("by-shebang", "#!/usr/bin/env python3\nx = (")
    write("by-content", "import sys\n")
    assert resolve("by-shebang").kind == resolve("by-content").kind == "script"


def test_a_recipe_is_a_module() -> None:
    assert resolve("mnist") == Target(kind="module", name="phalanx.recipes.mnist", display="mnist")


def test_a_file_beats_a_recipe_and_a_folder_does_not() -> None:
    Path("mnist").mkdir()
    assert resolve("mnist").kind == "module"
    Path("mnist").rmdir()
    write("mnist", "print('mine')\n")
    assert resolve("mnist") == Target(kind="script", name="mnist", display="mnist")


def test_a_file_that_beats_a_recipe_but_is_no_script_names_both_ways_out() -> None:
    Path("mnist").write_bytes(b"\x00\x01 data")
    message = refused("mnist")
    assert "'mnist' is not a Python script" in message
    assert "phalanx run -m phalanx.recipes.mnist for the recipe" in message


def test_recipes_are_the_programs_of_the_folder_with_their_first_line() -> None:
    found = recipes()
    assert "mnist" in found
    assert not {"__init__", "training", "datasets", "settings"} & set(found)
    assert all(recipe.summary.endswith(".") for recipe in found.values())


@pytest.mark.parametrize("text", ["", "  "])
def test_empty(text: str) -> None:
    assert "TARGET is empty" in refused(text)


def test_nothing_of_that_name_lists_scripts_and_recipes() -> None:
    write("train.py")
    write("test.py")
    assert refused("zzz").splitlines() == [
        "There is no script and no recipe 'zzz'.",
        f"Python files in {Path.cwd()}: test.py, train.py.",
        f"Recipes: {', '.join(sorted(recipes()))}.",
        "Fix: phalanx run SCRIPT.py",
    ]


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("mnits", "phalanx run mnist"),
        ("train", "phalanx run train.py"),
        ("trian.py", "phalanx run train.py"),
        ("sub/trian.py", "phalanx run sub/train.py"),
        ("./trian.py", "phalanx run train.py"),
    ],
)
def test_the_nearest_is_named(text: str, fix: str) -> None:
    write("train.py")
    write("sub/train.py")
    message = refused(text)
    assert message.endswith(f"Fix: {fix}"), message


def test_a_folder_that_does_not_exist() -> None:
    assert refused("no/such/train.py").startswith(
        "There is no script 'no/such/train.py': its folder does not exist."
    )


def test_a_folder() -> None:
    write("sub/train.py")
    assert (
        refused("sub")
        == "'sub' is a folder, not a script. Python files in it: train.py.\nFix: phalanx run sub/train.py"
    )
    write("prog/__main__.py")
    assert refused("prog/").endswith("Fix: phalanx run -m prog")


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("job.sh", "#!/bin/sh\necho", "phalanx run --no-python ./job.sh"),
        ("data.json", "{}", "phalanx run --no-python ./data.json"),
        ("nb.ipynb", "{}", "jupyter nbconvert --to script nb.ipynb"),
        ("binary", "\x00\x01", "phalanx run --no-python ./binary"),
    ],
)
def test_a_file_that_is_not_python(name: str, text: str, fix: str) -> None:
    write(name, text)
    assert fix in refused(name)


def test_a_pipe_and_a_file_without_permission() -> None:
    os.mkfifo("pipe.py")
    assert "is not a regular file" in refused("pipe.py")
    if os.geteuid() != 0:  # root reads everything
        write("secret.py", mode=0o000)
        assert "cannot be read" in refused("secret.py")


def test_a_name_too_long_for_a_file_is_no_traceback() -> None:
    assert "There is no script" in refused("x" * 5000)
    assert "There is no script" in refused("\x00" if sys.version_info >= (3, 12) else "y" * 300)


def test_an_executable() -> None:
    assert resolve("sh", no_python=True).kind == "command"
    write("job.sh", "#!/bin/sh\n", mode=0o755)
    assert resolve("./job.sh", no_python=True) == Target(kind="command", name="./job.sh", display="job")
    assert refused("job.sh", no_python=True).endswith("Fix: phalanx run --no-python ./job.sh")
    write("plain.sh", "#!/bin/sh\n")
    assert refused("./plain.sh", no_python=True).endswith("Fix: chmod +x ./plain.sh")
    assert "no executable 'zzz'" in refused("zzz", no_python=True)


def test_a_module_is_found_without_importing_it() -> None:
    write("pkg/__init__.py", "raise SystemExit('imported')")
    write("pkg/sub/train.py")
    assert resolve("pkg.sub.train", module=True) == Target(
        kind="module", name="pkg.sub.train", display="train"
    )
    assert "pkg" not in sys.modules
    write("names/space/train.py")  # folders without __init__.py
    assert resolve("names.space.train", module=True).kind == "module"


def test_a_package_needs_a_main() -> None:
    write("pkg/__init__.py")
    write("pkg/train.py")
    assert refused("pkg", module=True).endswith("It holds pkg.train.\nFix: phalanx run -m pkg.train")
    write("pkg/__main__.py")
    assert resolve("pkg", module=True).kind == "module"


def test_a_module_of_the_installation_and_of_an_editable_one() -> None:
    assert resolve("json.tool", module=True).kind == "module"
    assert resolve("phalanx.recipes.mnist", module=True).kind == "module"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("pkg.trian", "did you mean pkg.train?"),
        ("zzz.model", "start in the folder that holds it, or install it"),
        ("train.py", "phalanx run train.py"),
        ("pkg/train.py", "phalanx run pkg/train.py"),
        ("pkg/train", "phalanx run -m package.train"),
        ("a..b", "start in the folder that holds it, or install it"),
        (".a", "start in the folder that holds it, or install it"),
    ],
)
def test_a_module_that_is_not_there(text: str, fix: str) -> None:
    write("pkg/__init__.py")
    write("pkg/train.py")
    write("train.py")
    message = refused(text, module=True)
    assert message.endswith(f"Fix: {fix}"), message


def test_m_and_no_python_contradict() -> None:
    assert "contradict" in refused("x", module=True, no_python=True)


def test_an_installed_module_without_m() -> None:
    assert refused("json.tool").endswith("Fix: phalanx run -m json.tool")


def test_a_recipe_that_lacks_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    place = folder / "recipes"
    write(
        "recipes/job.py",
        "import os, tyro_absent\nfrom phalanx.recipes.shared import x\ndef f():\n    import later_absent\n",
    )
    write("recipes/shared.py", "import torchvision_absent.transforms\nfrom phalanx.dist import y\n")
    monkeypatch.setattr(targets, "recipes", lambda: {"job": Recipe("job", place / "job.py", "A job.")})
    assert refused("job") == (
        "The recipe 'job' needs tyro_absent, torchvision_absent, which is not installed.\n"
        "Fix: pip install 'phalanx[recipes]'"
    )
