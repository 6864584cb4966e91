"""Where ranks stand, from faulthandler's own dumps, and which of them keeps the others waiting."""

from __future__ import annotations

import faulthandler
import json
import tempfile

import pytest

from phalanx.launch.stacks import Frame, Stack, collective, groups, last_stack, stragglers
from tests.launch.launching import Launcher

C10D = "/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


def waiting_in(name: str) -> Stack:
    wrapper = Frame("/lib/python3/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper")
    return (Frame(C10D, 3000, name), wrapper, Frame("train.py", 9, "<module>"))


REDUCE, GATHER = waiting_in("all_reduce"), waiting_in("all_gather")
SAVE: Stack = (Frame("train.py", 20, "save"), Frame("train.py", 12, "<module>"))
LOADER: Stack = (Frame("/lib/torch/utils/data/dataloader.py", 1, "_try_get_data"), *SAVE)


@pytest.mark.parametrize("all_threads", [False, True])
def test_a_dump_of_faulthandler_is_read_from_the_innermost_call(all_threads: bool) -> None:
    with tempfile.TemporaryFile("w+") as file:
        for _ in range(2):
            faulthandler.dump_traceback(file, all_threads=all_threads)
        file.seek(0)
        stack = last_stack(file.read())
    assert stack[0].file == __file__
    assert stack[0].function == "test_a_dump_of_faulthandler_is_read_from_the_innermost_call"
    assert len(stack) > 3


def test_the_newest_dump_counts_and_half_a_line_does_not() -> None:
    head = "Stack (most recent call first):\n"
    old, new = '  File "a.py", line 1 in f\n', '  File "a b.py", line 2 in g\n'
    assert last_stack(head + old + head + new + '  File "c.p') == (Frame("a b.py", 2, "g"),)
    assert last_stack("") == last_stack("no stack here\n") == ()


def test_only_a_rank_whose_innermost_call_is_of_torch_distributed_waits_in_a_collective() -> None:
    wrapper_first = (REDUCE[1], REDUCE[0])
    assert collective(REDUCE) == collective(wrapper_first) == "all_reduce"
    assert collective(SAVE) is collective(LOADER) is collective(()) is None
    assert collective((*SAVE, *REDUCE)) is None, "at work below a call of torch.distributed"


def test_equal_stacks_are_one_group_the_largest_first() -> None:
    found = groups({2: REDUCE, 0: SAVE, 1: REDUCE, 3: GATHER})
    assert [group.ranks for group in found] == [(1, 2), (0,), (3,)]
    assert found[0].stack == REDUCE


@pytest.mark.parametrize(
    ("stacks", "expected"),
    [
        ({0: REDUCE, 1: GATHER, 2: REDUCE}, [1]),  # in another collective
        ({0: REDUCE, 1: REDUCE, 2: None}, [2]),  # left the loop
        ({0: LOADER, 1: REDUCE}, [0]),  # waits for its loader
        ({0: SAVE, 1: REDUCE, 2: REDUCE}, [0]),  # at work
        ({0: REDUCE, 1: REDUCE}, []),  # all in the same one
        ({0: REDUCE, 1: GATHER}, []),  # nothing says which side is wrong
        ({0: REDUCE, 1: GATHER, 2: SAVE}, [2]),
        ({0: SAVE, 1: LOADER}, []),  # nobody waits in a collective
    ],
)
def test_stragglers_are_the_ranks_that_are_not_where_the_others_wait(
    stacks: dict[int, Stack | None], expected: list[int]
) -> None:
    assert stragglers(stacks) == expected


@pytest.mark.parametrize("how", ["--show=all", "--no-preload"])
@pytest.mark.parametrize(
    ("what", "said"),
    [("sleep", "rank 1: at work, not in a collective <- "), ("other", "rank 1: in all_gather <- ")],
)
def test_a_hang_ends_the_job_and_names_the_straggler(
    launcher: Launcher, how: str, what: str, said: str
) -> None:
    script = launcher.script(
        """
        import sys, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        if dist.get_rank() == 1 and sys.argv[1] == "sleep":
            time.sleep(1000)
        if dist.get_rank() == 1:
            dist.all_gather([x.clone() for _ in range(3)], x)
        dist.all_reduce(x)
        time.sleep(1000)
        """
    )
    ended = launcher.run(how, "--hang-timeout-s", 4, script, what, ranks=3, timeout_s=120)
    assert ended.returncode == 1, ended.stderr
    assert "Hang: no progress for 4 s; the others wait for rank 1" in ended.stderr
    assert said in ended.stderr
    content = json.loads((launcher.logs / "hang.json").read_text())
    assert content["stragglers"] == [1]
    assert sorted(group["ranks"] for group in content["groups"]) == [[0, 2], [1]]
    assert not launcher.left()
