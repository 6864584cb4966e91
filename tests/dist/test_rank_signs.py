"""Ranks as others see them: the names of the launcher's sockets."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from phalanx.dist.rank_signs import RankSign, RankSigns, rank_signs


def sign(job: str = "train", **changes: int) -> RankSign:
    numbers = {"pid": os.getpid(), "rank": 3, "local_rank": 1, "world_size": 4, **changes}
    return RankSign(job=job, **numbers)


def test_what_is_shown_is_read_until_it_is_closed() -> None:
    signs = RankSigns()
    signs.show([sign("20261130-203437-train")])
    try:
        assert rank_signs()[os.getpid()] == sign("20261130-203437-train")
        signs.show([sign(rank=0, local_rank=0)])
        assert rank_signs()[os.getpid()].rank == 0
    finally:
        signs.close()
    assert os.getpid() not in rank_signs()


@given(job=st.text(max_size=200), rank=st.integers(0, 10**6))
def test_any_name_of_a_job_makes_a_name_that_is_read_back(job: str, rank: int) -> None:
    shown = sign(job, rank=rank, local_rank=1023, world_size=10**6)
    assert len(shown.name().encode()) < 107
    signs = RankSigns()
    signs.show([shown])
    try:
        found = rank_signs()[os.getpid()]
    finally:
        signs.close()
    assert (found.rank, found.local_rank, found.world_size) == (rank, 1023, 10**6)
    assert found.job == shown.name().rpartition("/")[2]


def test_a_process_number_of_another_namespace_says_nothing_here(tmp_path: Path) -> None:
    table = tmp_path / "unix"
    line = "0000000000000000: 00000002 00000000 00000000 0002 01 66871 @"
    table.write_text(f"{line}phalanx-rank/1/4711/0/0/2/train\n{line}{sign(pid=4712).name()}\n{line}other\n")
    assert list(rank_signs(table)) == [4712]


def test_without_the_table_there_are_no_ranks(tmp_path: Path) -> None:
    assert rank_signs(tmp_path / "missing") == {}


def test_two_with_one_name_do_no_harm() -> None:
    first, second = RankSigns(), RankSigns()
    first.show([sign()])
    second.show([sign()])
    second.close()
    assert rank_signs()[os.getpid()] == sign()
    first.close()
