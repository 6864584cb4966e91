"""What TARGET means: a script, a module, an executable, or the name of a recipe."""

from __future__ import annotations

import ast
import os
import pkgutil
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch import sources
from phalanx.launch.spec import Target
from phalanx.tools.usage import UsageMistake, nearest

RECIPES = "phalanx.recipes"


@dataclass(frozen=True)
class Recipe:
    """A training job that comes with phalanx: its short name, file, and first line of documentation."""

    name: str
    path: Path
    summary: str


def recipes() -> dict[str, Recipe]:
    """The recipes of this installation by name; nothing is imported."""
    package = sources.find_module(RECIPES, Path.cwd())
    found: dict[str, Recipe] = {}
    for folder in (package and package.folders) or ():
        for path in sorted(Path(folder).glob("*.py")):
            tree = sources.parse(path)
            if tree is not None and _is_program(tree):
                found.setdefault(path.stem, Recipe(path.stem, path, _summary(tree)))
    return found


def _is_program(tree: ast.Module) -> bool:
    """Whether the file ends in ``if __name__ == "__main__":``, which the recipes' shared modules do not."""
    return any(
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.left, ast.Name)
        and node.test.left.id == "__name__"
        for node in tree.body
    )


def _summary(tree: ast.Module) -> str:
    return next(iter((ast.get_docstring(tree) or "").splitlines()), "")


def resolve(text: str, *, module: bool = False, no_python: bool = False) -> Target:
    """What ``phalanx run TEXT`` shall execute; a file beats a recipe of the same name.

    For instance ``train.py`` is a script, ``mnist`` the module ``phalanx.recipes.mnist``.

    Args:
        text: TARGET as typed.
        module: ``-m`` was given: ``text`` names a module.
        no_python: ``--no-python`` was given: ``text`` is an executable.

    Raises:
        UsageMistake: There is no such thing, or it cannot be run; the message names what is near.
    """
    if not text.strip():
        raise UsageMistake(f"TARGET is empty ({text!r}).", fix="phalanx run train.py")
    if module and no_python:
        raise UsageMistake(
            "-m and --no-python contradict each other: a module needs Python.", fix="give one of them"
        )
    if no_python:
        return _executable(text)
    if module:
        return _module(text)
    path = Path(text)
    if _exists(path) and not path.is_dir():
        return _script(path, text)
    known = recipes()
    if text in known:
        _check_requirements(known[text])
        return Target(kind="module", name=f"{RECIPES}.{text}", display=text)
    raise _not_found(text, path, known)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for a file
        return False


def _executable(text: str) -> Target:
    found = shutil.which(text)
    if found is None:
        if _exists(Path(text)) and "/" not in text and os.access(text, os.X_OK):
            raise UsageMistake(
                f"{text!r} is in this folder, but not on PATH, where --no-python looks for it.",
                fix=f"phalanx run --no-python ./{text}",
            )
        if Path(text).is_file():
            raise UsageMistake(
                f"{text!r} is not executable, so --no-python cannot start it.", fix=f"chmod +x {text}"
            )
        raise UsageMistake(
            f"There is no executable {text!r}, neither as a path nor on PATH.",
            fix="check the name after --no-python",
        )
    return Target(kind="command", name=found, display=Path(text).stem)


def _module(name: str) -> Target:
    if name.endswith(".py") or "/" in name:
        if Path(name).is_file():
            raise UsageMistake(
                f"-m {name}: that is a file, and -m takes a module.", fix=f"phalanx run {name}"
            )
        raise UsageMistake(
            f"-m {name}: -m takes a module's name, with dots and without .py.",
            fix="phalanx run -m package.train",
        )
    found = sources.find_module(name, Path.cwd()) if all(name.split(".")) else None
    if found is None:
        near = nearest(name, _modules_beside(name))
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else "start in the folder that holds it, or install it"
        )
        raise UsageMistake(f"There is no module {name!r}, neither in {Path.cwd()} nor installed.", fix=hint)
    if found.folders is not None and found.program is None:
        programs = [f"{name}.{info.name}" for info in pkgutil.iter_modules(found.folders)][:8]
        listed = f" It holds {', '.join(programs)}." if programs else ""
        raise UsageMistake(
            f"-m {name}: a package without __main__.py cannot be run.{listed}",
            fix=f"phalanx run -m {programs[0] if programs else name + '.MODULE'}",
        )
    return Target(kind="module", name=name, display=name.rpartition(".")[2])


def _modules_beside(name: str) -> list[str]:
    """Names that could have been meant: the modules of the parent, else those of this folder."""
    parent, _, _ = name.rpartition(".")
    while parent:
        package = sources.find_module(parent, Path.cwd())
        if package is not None and package.folders is not None:
            return [f"{parent}.{info.name}" for info in pkgutil.iter_modules(package.folders)]
        parent, _, _ = parent.rpartition(".")
    return [info.name for info in pkgutil.iter_modules([str(Path.cwd())])]


def _script(path: Path, text: str) -> Target:
    if not path.is_file():
        raise UsageMistake(
            f"{text!r} is not a regular file: each rank reads the script anew, and a pipe can be read once.",
            fix="write it to a file first",
        )
    if not os.access(path, os.R_OK):
        raise UsageMistake(f"{text!r} cannot be read: no permission.", fix=f"chmod u+r {text}")
    if not _is_python(path):
        recipe = f", or phalanx run -m {RECIPES}.{text} for the recipe" if text in recipes() else ""
        if path.suffix == ".ipynb":
            raise UsageMistake(
                f"{text!r} is a notebook, not a Python script.",
                fix=f"jupyter nbconvert --to script {text}{recipe}",
            )
        raise UsageMistake(
            f"{text!r} is not a Python script.",
            fix=f"phalanx run --no-python {text if '/' in text else './' + text} for an executable{recipe}",
        )
    return Target(kind="script", name=text, display=path.stem)


def _is_python(path: Path) -> bool:
    """By its ending, its first line, or, where neither says, whether it can be parsed."""
    if path.suffix in (".py", ".pyw"):
        return True
    with path.open("rb") as file:
        first = file.readline(200)
    if first.startswith(b"#!"):
        return b"python" in first
    return path.suffix == "" and sources.parse(path) is not None


def _check_requirements(recipe: Recipe) -> None:
    """Name packages that the recipe, and what it imports from its own folder, cannot start without."""
    missing: dict[str, None] = {}
    waiting, seen = [recipe.path], set()
    while waiting:
        path = waiting.pop()
        tree = sources.parse(path)
        if tree is None or path in seen:
            continue
        seen.add(path)
        for name in sources.imported_names(tree, package=RECIPES, whole=False):
            root = name.split(".")[0]
            if name.startswith(f"{RECIPES}."):
                waiting.append(recipe.path.with_name(name.split(".")[2] + ".py"))
            elif root not in missing and root != "phalanx" and sources.find_module(root, Path.cwd()) is None:
                missing[root] = None
    if missing:
        raise UsageMistake(
            f"The recipe {recipe.name!r} needs {', '.join(missing)}, which is not installed.",
            fix=f"pip install 'phalanx[{_extras(missing)}]'",
        )


def _extras(missing: Iterable[str]) -> str:
    """torchvision is an extra of its own, since it pins one torch."""
    return ",".join(dict.fromkeys("torchvision" if name == "torchvision" else "recipes" for name in missing))


def _not_found(text: str, path: Path, known: dict[str, Recipe]) -> UsageMistake:
    folder = path.parent if _exists(path.parent) else Path()
    beside = sorted(entry.name for entry in folder.glob("*.py"))[:200]
    prefix = "" if folder == Path() else f"{folder}/"
    if _exists(path):
        return _folder(text, path)
    near = [f"{prefix}{name}" for name in nearest(path.name, beside)]
    if f"{path.name}.py" in beside:
        near.insert(0, f"{prefix}{path.name}.py")
    if "/" not in text:
        near += nearest(text, known)
    near = list(dict.fromkeys(near))[:3]
    if not near and sources.find_module(text, Path.cwd()) is not None and all(text.split(".")):
        return UsageMistake(f"{text!r} is an installed module, not a file.", fix=f"phalanx run -m {text}")
    if "/" in text or path.suffix == ".py":
        what = f"There is no script {text!r}" + (
            "." if folder == Path() or _exists(folder) else f" ({folder})."
        )
        if path.parent != folder:
            what = f"There is no script {text!r}: its folder does not exist."
    else:
        what = f"There is no script and no recipe {text!r}."
    what += f"\nPython files in {folder.resolve()}: {_listed(beside)}."
    if "/" not in text:
        what += f"\nRecipes: {_listed(sorted(known))}."
    fix = " or ".join(f"phalanx run {name}" for name in near) if near else "phalanx run SCRIPT.py"
    return UsageMistake(what, fix=fix)


def _folder(text: str, path: Path) -> UsageMistake:
    inside = sorted(entry.name for entry in path.glob("*.py"))[:200]
    name = text.rstrip("/")
    if (path / "__main__.py").is_file() and "/" not in name:
        return UsageMistake(f"{text!r} is a folder, not a script.", fix=f"phalanx run -m {name}")
    return UsageMistake(
        f"{text!r} is a folder, not a script. Python files in it: {_listed(inside)}.",
        fix=f"phalanx run {name}/{inside[0] if inside else 'train.py'}",
    )


def _listed(names: list[str], most: int = 8) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
