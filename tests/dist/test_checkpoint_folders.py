"""The folder of checkpoints: order by number, leftovers, replacing, keeping, and one run at a time."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.dist import checkpoint_files as files
from phalanx.dist import checkpoint_folders as folders
from phalanx.dist.checkpoint_errors import FolderInUseError

_CONTEXT = multiprocessing.get_context("forkserver")


def make(folder: Path, number: int, name: str = "", content: int = 0) -> Path:
    path = folder / (name or f"step-{number}")
    path.mkdir(parents=True)
    files.write_manifest(path, number, {"state.json": files.write_json(path / "state.json", content)})
    return path


def numbers(folder: Path) -> list[int]:
    return [number for number, _ in folders.steps_in(folder)]


@pytest.mark.parametrize("steps", [[500, 2500], [9000, 10000], [9, 10, 100]])
def test_newest_is_newest_by_number_not_by_spelling(tmp_path: Path, steps: list[int]) -> None:
    for step in steps:
        make(tmp_path, step)
    assert folders.newest_whole(tmp_path) == tmp_path / f"step-{max(steps)}"


def test_temporary_names_strangers_and_incomplete_folders_are_never_newest(tmp_path: Path) -> None:
    make(tmp_path, 100)
    make(tmp_path, 200, "step-200.tmp-0123abcd")
    make(tmp_path, 300, "step-0300")
    make(tmp_path, 400, "best-400")
    (tmp_path / "step-500").mkdir()
    (make(tmp_path, 600) / "manifest.json").unlink()
    assert folders.newest_whole(tmp_path) == tmp_path / "step-100"
    assert folders.newest_whole(tmp_path / "nothing") is None


def test_leftovers_of_dead_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, 100)
    make(tmp_path, 200, "step-200.tmp-0123abcd")
    make(tmp_path, 300, "mine.tmp-0123abcd")
    assert folders.clear_leftovers(tmp_path) == ["step-200.tmp-0123abcd"]
    assert sorted(os.listdir(tmp_path)) == ["mine.tmp-0123abcd", "step-100"]


def test_a_replacement_that_died_half_way_is_undone(tmp_path: Path) -> None:
    make(tmp_path, 100, "step-100.old-0123abcd")
    make(tmp_path, 200, "step-200.old-0123abcd", content=1)
    make(tmp_path, 200, content=2)
    folders.clear_leftovers(tmp_path)
    assert numbers(tmp_path) == [100, 200]
    assert (tmp_path / "step-200" / "state.json").read_text() == "2\n"


@pytest.mark.parametrize("exchange", [True, False], ids=["swapped at once", "file system cannot swap"])
def test_the_same_step_is_replaced_only_when_it_differs(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
    final = make(tmp_path, 7, content=1)
    inode = final.stat().st_ino
    folders.publish(make(tmp_path, 7, "step-7.tmp-aa", content=1), final, known_damaged=False)
    assert final.stat().st_ino == inode, "the same content is kept"
    folders.publish(make(tmp_path, 7, "step-7.tmp-ab", content=2), final, known_damaged=False)
    assert (final / "state.json").read_text() == "2\n"
    assert files.find_problems(final) == []
    (final / "state.json").write_text("3\n")  # as long as before, and its manifest is the new one's
    folders.publish(make(tmp_path, 7, "step-7.tmp-ac", content=2), final, known_damaged=False)
    assert (final / "state.json").read_text() == "2\n"
    assert os.listdir(tmp_path) == ["step-7"]


def test_removing_what_is_gone_already_is_fine(tmp_path: Path) -> None:
    folders.remove(tmp_path / "step-1")


@settings(max_examples=60, deadline=None)
@given(
    present=st.sets(st.integers(1, 40), max_size=8),
    saved=st.integers(1, 40),
    keep=st.one_of(st.none(), st.integers(1, 4)),
    data=st.data(),
)
def test_the_newest_and_the_one_just_saved_always_survive(
    tmp_path_factory: pytest.TempPathFactory,
    present: set[int],
    saved: int,
    keep: int | None,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("keep")
    for number in present | {saved}:
        (folder / f"step-{number}").mkdir()
    damaged = data.draw(st.sets(st.sampled_from(sorted(present)), max_size=3)) - {saved} if present else set()
    folders.keep_newest(folder, keep, saved, damaged)
    left = set(numbers(folder))
    whole = sorted((present | {saved}) - damaged)
    assert saved in left
    assert max(whole) in left
    if keep is None:
        assert left == present | {saved}
    else:
        assert left - damaged == {*whole[-keep:], saved}
        assert all(number > max(left - damaged) for number in left & damaged)


def _hold(pipe: Connection, folder: str) -> None:
    lock = folders.FolderLock(Path(folder), 0)
    pipe.send("held")
    time.sleep(60)
    lock.close()


def test_two_runs_in_one_folder_are_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_hold, args=(theirs, str(tmp_path)))
    process.start()
    try:
        assert ours.recv() == "held"
        with pytest.raises(FolderInUseError, match=f"pid {process.pid}"):
            folders.FolderLock(tmp_path, 0.2)
    finally:
        process.kill()
        process.join()
    lock = folders.FolderLock(tmp_path, 5)
    again = folders.FolderLock(tmp_path, 0)  # the same process may
    lock.close()
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_try, args=(theirs, str(tmp_path)))
    process.start()
    assert ours.recv() == "in use", "the second one of this process still holds it"
    again.close()
    assert ours.recv() == "free"
    process.join()


def _try(pipe: Connection, folder: str) -> None:
    try:
        folders.FolderLock(Path(folder), 0)
        pipe.send("free")
    except FolderInUseError:
        pipe.send("in use")
    folders.FolderLock(Path(folder), 30).close()
    pipe.send("free")
