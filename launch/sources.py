"""Reading Python source without running it: where a module lies, what it imports, what it mentions."""

from __future__ import annotations

import ast
import importlib.machinery
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

_MOST_FILES = 200  # of one project: more is a library, whose options are not looked for


def find_module(name: str, folder: Path) -> ModuleSpec | None:
    """The module that ``python -m name`` in ``folder`` would find, without importing its parents.

    `importlib.util.find_spec` would import ``a`` and ``a.b`` to find ``a.b.c``, and with them perhaps torch.
    """
    spec: ModuleSpec | None = None
    path: Sequence[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        if count > 1:
            if spec is None or spec.submodule_search_locations is None:
                return None
            path = list(spec.submodule_search_locations)
        spec = _find(".".join(parts[:count]), path, folder)
        if spec is None:
            return None
    return spec


def _find(name: str, path: Sequence[str] | None, folder: Path) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None:
            continue
        where = path
        if finder is importlib.machinery.PathFinder and path is None:
            where = [str(folder), *(entry for entry in sys.path if entry)]
        try:
            spec = find_spec(name, where)
        except (ImportError, AttributeError, ValueError, KeyError):
            continue
        if spec is not None:
            assert isinstance(spec, ModuleSpec)
            return spec
    return None


def source_file(spec: ModuleSpec) -> Path | None:
    """The file that ``python -m`` would execute for this module, if it is Python source."""
    if spec.submodule_search_locations is not None:
        for place in spec.submodule_search_locations:
            main = Path(place) / "__main__.py"
            if main.is_file():
                return main
        return None
    if spec.origin is not None and spec.origin.endswith(".py"):
        return Path(spec.origin)
    return None


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
    spec = find_module(name, Path.cwd())
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    return [(Path(spec.origin), package)]


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
