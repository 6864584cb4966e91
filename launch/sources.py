"""Reading Python source without running it: where a module lies, what it imports, what it mentions."""

from __future__ import annotations

import ast
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

_MOST_FILES = 200  # of one project: more is a library, whose options are not looked for


@dataclass(frozen=True)
class Module:
    """A module that was found, not imported: its source file, and for a package the folders of its modules."""

    name: str
    file: Path | None
    folders: tuple[str, ...] | None = None

    @property
    def program(self) -> Path | None:
        """The file that ``python -m`` would execute: for a package, its ``__main__.py``."""
        if self.folders is None:
            return self.file
        return next((path for f in self.folders if (path := Path(f) / "__main__.py").is_file()), None)


def find_module(name: str, folder: Path) -> Module | None:
    """The module that ``python -m name`` in ``folder`` would find, without importing its parents.

    `importlib.util.find_spec` would import ``a`` and ``a.b`` to find ``a.b.c``, and with them perhaps torch.
    """
    found: Module | None = None
    parts = name.split(".")
    places: Sequence[str] = [str(folder), *(entry for entry in sys.path if entry)]
    for count in range(1, len(parts) + 1):
        found = _find(".".join(parts[:count]), places, top=count == 1)
        if found is None or (found.folders is None and count < len(parts)):
            return None
        places = found.folders or ()
    return found


def _find(name: str, places: Sequence[str], *, top: bool) -> Module | None:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None:
            continue
        # Other finders, such as an editable installation's, know top-level modules by a path of None.
        path = None if top and finder is not importlib.machinery.PathFinder else list(places)
        try:
            spec = find_spec(name, path)
        except (ImportError, AttributeError, ValueError, KeyError):
            continue
        if spec is not None:
            return _module(spec, places)
    # The path finder asks the imported parent where a package without __init__.py lies: there is none.
    folders = _namespace(name, places)
    return Module(name, None, folders) if folders else None


def _module(spec: ModuleSpec, places: Sequence[str]) -> Module:
    file = Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    if spec.submodule_search_locations is None:
        return Module(spec.name, file)
    if file is not None:
        return Module(spec.name, file, tuple(spec.submodule_search_locations))
    return Module(spec.name, None, _namespace(spec.name, places))


def _namespace(name: str, places: Sequence[str]) -> tuple[str, ...]:
    """The folders that make up a package without ``__init__.py``."""
    last = name.rpartition(".")[2]
    return tuple(folder for place in places if os.path.isdir(folder := os.path.join(place, last)))


def parse(path: Path) -> ast.Module | None:
    """The file's syntax tree, or None when it cannot be read or is not Python."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def imported_names(tree: ast.Module, *, package: str = "", whole: bool = True) -> Iterator[str]:
    """Absolute names a file imports, ``from a import b`` as both ``a`` and ``a.b``.

    With ``whole=False`` only those on the top level: they are needed for the file to start at all.
    """
    nodes: Iterable[ast.AST] = ast.walk(tree) if whole else tree.body
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
                base = ".".join([*parents, *([base] if base else [])])
            if base:
                yield base
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)


def project_files(start: Path, *, folder: Path, root: str | None) -> list[Path]:
    """``start`` and the project's own files that it imports, directly or not.

    Of a script (``root`` None) these are the modules found in its folder; of a module, those of the package
    ``root``.
    """
    found: dict[Path, None] = {}
    waiting = [(start, root or "")]
    while waiting and len(found) < _MOST_FILES:
        path, package = waiting.pop()
        tree = parse(path)
        if path in found or tree is None:
            continue
        found[path] = None
        for name in imported_names(tree, package=package):
            if root is not None and not f"{name}.".startswith(f"{root}."):
                continue
            waiting.extend(_own_file(name, folder if root is None else None))
    return list(found)


def _own_file(name: str, folder: Path | None) -> list[tuple[Path, str]]:
    """The file of a module with its package: below ``folder``, else anywhere."""
    if folder is not None:
        base = folder.joinpath(*name.split("."))
        for candidate, package in (
            (base.with_suffix(".py"), name.rpartition(".")[0]),
            (base / "__init__.py", name),
        ):
            if candidate.is_file():
                return [(candidate, package)]
        return []
    module = find_module(name, Path.cwd())
    if module is None or module.file is None:
        return []
    return [(module.file, name if module.folders is not None else name.rpartition(".")[0])]


def knows_option(path: Path, option: str) -> bool:
    """Whether a file's code, comments and docstrings aside, has an option of its own of this name.

    That is ``"--log-dir"`` in a string, or ``log_dir`` as a dataclass field, an argument or an attribute that
    is read: enough for argparse, click, typer, fire, tyro and Hydra. A docstring counts where ``__doc__`` is
    used, as by docopt.
    """
    tree = parse(path)
    if tree is None:
        return False
    name = option.replace("-", "_")
    dashed = re.compile("--" + re.escape(option).replace(r"\-", "[-_]") + r"(?![\w-])")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    documents = set() if _uses_doc(tree) else {id(node) for node in _docstrings(tree)}
    nodes = (node for node in ast.walk(tree) if id(node) not in called and id(node) not in documents)
    return any(_is_option(node, name, dashed) for node in nodes)


def _is_option(node: ast.AST, name: str, dashed: re.Pattern[str]) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return text.rstrip("=").replace("-", "_") == name or dashed.search(text) is not None
        case ast.AnnAssign(target=ast.Name(id=word)) | ast.arg(arg=word) | ast.Attribute(attr=word):
            return word == name
    return False


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Strings that stand alone as a statement: docstrings, and what is commented out by quotes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _uses_doc(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__doc__" for node in ast.walk(tree))
