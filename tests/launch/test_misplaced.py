"""A launcher's option after TARGET is an error, unless the script has that option itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launch.misplaced import CLEAR, check_misplaced
from phalanx.launch.options import BY_KEY
from phalanx.launch.spec import Target
from phalanx.tools.usage import UsageMistake

PLAIN = '''
"""Train. Start with: torchrun --nproc_per_node=2 train.py --log-dir logs"""
# torchrun --nproc-per-node 2 --gpus 1
import matplotlib.pyplot as plt

def main():
    """--nnodes 2"""
    plt.show("show me")

main()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*args: str, text: str = PLAIN, before: tuple[str, ...] = ()) -> None:
    Path("train.py").write_text(text)
    check_misplaced(Target(kind="script", name="train.py", display="train"), "train.py", args, before)


def test_the_set_holds_real_options() -> None:
    assert {name.replace("-", "_") for name in CLEAR} <= set(BY_KEY)


@pytest.mark.parametrize("name", sorted(CLEAR))
def test_each_clear_option_is_refused_in_both_spellings(folder: Path, name: str) -> None:
    for word in (f"--{name}", f"--{name.replace('-', '_')}", f"--{name}=1"):
        with pytest.raises(UsageMistake, match=rf"^--{name} after train.py would go to train.py"):
            check("--lr", "0.1", word)


def test_the_fix_has_the_right_order(folder: Path) -> None:
    with pytest.raises(UsageMistake) as caught:
        check("--lr", "0.1", "--nproc_per_node", "2", "a b", "--standalone", before=("--show", "all"))
    assert str(caught.value).splitlines()[1:] == [
        "Fix: phalanx run --show all --nproc-per-node 2 --standalone train.py --lr 0.1 'a b'",
        "     or, to pass it on all the same: "
        "phalanx run --show all -- train.py --lr 0.1 --nproc_per_node 2 'a b' --standalone",
    ]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("parser.add_argument('--gpus')", "--gpus"),
        ("parser.add_argument('--log_dir', '-l')", "--log-dir"),
        ("parser.add_argument('-l', '--log-dir')", "--log_dir=x"),
        ("getopt.getopt(argv, '', ['gpus='])", "--gpus"),
        ("@dataclass\nclass C:\n    max_restarts: int = 0", "--max-restarts"),
        ("def main(show: bool = False): ...\nfire.Fire(main)", "--show"),
        ("print(args.gpus)", "--gpus"),
        ('"""Usage: train.py [--nnodes N]"""\ndocopt(__doc__)', "--nnodes"),
    ],
)
def test_a_script_that_has_the_option_gets_it(folder: Path, text: str, word: str) -> None:
    check(word, "1", text=text)


def test_a_module_of_the_project_may_have_the_option(folder: Path) -> None:
    (folder / "lib").mkdir()
    (folder / "lib" / "__init__.py").write_text("from .options import parser")
    (folder / "lib" / "options.py").write_text("parser.add_argument('--gpus')")
    check("--gpus", "2", text="from lib import parser")
    with pytest.raises(UsageMistake, match="--gpus"):
        check("--gpus", "2", text="import numpy")


def test_options_of_the_script_alone_and_words_are_left_alone(folder: Path) -> None:
    check("--lr", "1", "nproc-per-node", "-m", "--module", "--role", "x")


def test_a_file_that_is_not_python_is_not_judged(folder: Path) -> None:
    check("--gpus", "2", text="def (")
    check_misplaced(Target(kind="command", name="/bin/echo", display="echo"), "echo", ["--gpus", "2"])


def test_a_module_is_read_without_being_imported(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / "pkg" / "options.py").write_text("add('--gpus')")
    (folder / "pkg" / "train.py").write_text("from pkg.options import x")
    target = Target(kind="module", name="pkg.train", display="train")
    check_misplaced(target, "pkg.train", ["--gpus", "2"])
    with pytest.raises(UsageMistake, match=r"--nnodes after pkg\.train"):
        check_misplaced(target, "pkg.train", ["--nnodes", "2"])


def test_a_recipe_has_its_own_options() -> None:
    target = Target(kind="module", name="phalanx.recipes.mnist", display="mnist")
    check_misplaced(target, "mnist", ["--epochs", "2"])
    for name in ("--gpus", "--nproc-per-node", "--max-restarts", "--log-dir"):
        with pytest.raises(UsageMistake, match=f"{name} after mnist"):
            check_misplaced(target, "mnist", [name, "2"])
