"""What is to be read: files, folders, standard input, or the logs of the last run."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from phalanx.tools.usage import UsageMistake

LOG_FOLDER = "phalanx-logs"
_MAX_FILES = 20_000
_LOG_NAME = re.compile(
    r"(?:^|[._-])(?:log|out|err|txt|std(?:out|err))(?:[._-]?\d*)?(?:\.gz)?$", re.IGNORECASE
)
_REPORTS = frozenset({"failure.json", "error.json", "hang.json"})
_RANK_IN_NAME = re.compile(
    r"(?:^|[._/-])(?:rank|worker|proc)[._-]?(\d{1,6})(?=\D|$)|/(\d{1,6})/(?:std(?:out|err)\.log|error\.json)$"
)
_ATTEMPT = re.compile(r"^attempt-(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One stream of bytes; ``rank`` is the rank whose log it is, where its name says so."""

    name: str
    path: Path | None = None
    data: bytes | None = None
    stream: IO[bytes] | None = None
    rank: int | None = None

    def blocks(self, size: int) -> Iterator[bytes]:
        """Its bytes in pieces; a damaged gzip file ends where the damage starts."""
        if self.data is not None:
            yield from _pieces(io.BytesIO(self.data), size)
        elif self.stream is not None:
            yield from _pieces(self.stream, size)
        elif self.path is not None:
            with self.path.open("rb") as file:
                yield from _pieces(file, size)


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    read1 = getattr(file, "read1", file.read)
    head = b""
    while len(head) < 2:  # a terminal or pipe may give one byte
        piece = read1(size)
        if not piece:
            break
        head += piece
    if head[:2] == b"\x1f\x8b":
        yield from _unzipped(head, file, size)
        return
    while head:
        yield head
        head = read1(size)


class _Joined(io.RawIOBase):
    """A file whose first bytes were read already."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head[: len(buffer)] or self._rest.read(len(buffer)) or b""
        self._head = self._head[len(data) :]
        buffer[: len(data)] = data
        return len(data)


def _unzipped(head: bytes, file: IO[bytes], size: int) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=io.BufferedReader(_Joined(head, file))) as unzipped:
        while True:
            try:
                piece = unzipped.read1(size)
            except (EOFError, OSError, zlib.error):
                return
            if not piece:
                return
            yield piece


def find_sources(
    words: Sequence[str], *, stdin: IO[bytes] | None = None, folder: Path | None = None
) -> list[Source]:
    """The sources that a command line names.

    Args:
        words: Files and folders; ``-`` is standard input; none asks for the last run under ``folder``.
        stdin: Standard input.
        folder: The working directory.

    Raises:
        UsageMistake: A file is not there or cannot be read, or there is no last run.
    """
    if not words:
        return _in_folder(last_run(folder or Path()))
    found: list[Source] = []
    for word in words:
        if word == "-":
            if stdin is None:
                raise UsageMistake("'-' is standard input, and there is none.", fix="give a log file")
            found.append(Source(name="stdin", stream=stdin))
            continue
        path = Path(word)
        _check_readable(path, word)
        found += _in_folder(path) if path.is_dir() else [_of_file(path, word)]
    return found


def _check_readable(path: Path, word: str) -> None:
    try:
        if path.is_dir():
            os.listdir(path)
        else:
            path.open("rb").close()
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise UsageMistake(
            f"{word!r} cannot be read: {problem}.",
            fix="a log file, a folder of logs, or - for standard input",
        ) from None


def last_run(folder: Path) -> Path:
    """The newest run's folder under ``phalanx-logs`` of a working directory."""
    logs = folder / LOG_FOLDER
    runs = [path for path in _listed(logs) if path.is_dir()]
    if not runs:
        raise UsageMistake(
            f"No log was named, and there is no run under {logs}.",
            fix="phalanx explain LOG, or phalanx explain - < LOG",
        )
    return max(runs, key=lambda path: (_modified(path / "run.json"), _modified(path), path.name))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _of_file(path: Path, name: str) -> Source:
    if path.name in _REPORTS:
        text = _report_text(path)
        if text is not None:
            return Source(name=name, data=text.encode(errors="replace"), rank=_rank_of(path))
    return Source(name=name, path=path, rank=_rank_of(path))


def _rank_of(path: Path) -> int | None:
    found = _RANK_IN_NAME.search(path.as_posix())
    return int(found[1] or found[2]) if found else None


def _in_folder(folder: Path) -> list[Source]:
    if folder.name == LOG_FOLDER and not (folder / "run.json").exists():
        folder = last_run(folder.parent)
    seen: set[str] = set()
    found = []
    for path in _log_files(folder):
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        found.append(_of_file(path, str(path)))
        if len(found) >= _MAX_FILES:
            break
    if not found:
        raise UsageMistake(f"{str(folder)!r} holds no log.", fix="name the files: phalanx explain FILE FILE")
    # Reports last, so that evidence is quoted from the logs where they have it.
    return sorted(found, key=lambda source: source.data is not None)


def _log_files(folder: Path) -> Iterator[Path]:
    newest = _newest_attempt(folder)
    for path in _listed(folder):
        if path.is_dir():
            if _ATTEMPT.match(path.name) and path != newest:
                continue
            if not path.is_symlink() and not path.name.startswith("."):
                yield from _log_files(path)
        elif path.name in _REPORTS or (_LOG_NAME.search(path.name) and path.is_file()):
            yield path


def _newest_attempt(folder: Path) -> Path | None:
    """Earlier attempts of a run are over: the last one is what it ended with."""
    attempts = [path for path in _listed(folder) if _ATTEMPT.match(path.name)]
    return max(attempts, key=lambda path: int(path.name.partition("-")[2]), default=None)


def _report_text(path: Path) -> str | None:
    """A report of ours or of torch's elastic agent, as the text that it stands for."""
    try:
        content = json.loads(path.read_bytes())
        if path.name == "failure.json":
            return _failure_text(content)
        if path.name == "error.json":
            return _elastic_text(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return None


def _failure_text(content: Any) -> str:
    first = content["first"]
    what = first.get("exception") or first.get("signal") or f"exit code {first.get('exit_code')}"
    place = f"rank {int(first['rank'])} (local rank {first.get('local_rank')}, node {first.get('node')})"
    lines = [f"First failure: {place}: {what}: {first.get('message', '')}"]
    lines += [
        f"[rank{int(first['rank'])}]: {line}" for line in str(first.get("traceback") or "").splitlines()
    ]
    return "\n".join(lines) + "\n"


def _elastic_text(content: Any) -> str:
    message = content["message"]
    if isinstance(message, str):
        return message + "\n"
    stack = message.get("extraInfo", {}).get("py_callstack", "")
    return f"{stack or message['message']}\n"
