"""ShardLoader goes on where a run was delivered to, on any number of ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from phalanx.dist.loaders import ShardLoader
from phalanx.dist.plan import Progress
from tests.dist.loading import Augmented, flat, numbers, rows, taken, world


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_goes_on_where_it_was_delivered_to(num_workers: int) -> None:
    """Workers draw ahead; what they drew and the loop has not seen comes again, with the same numbers."""

    def make(workers: int) -> ShardLoader:
        return ShardLoader(
            Augmented(64), global_batch_size=6, shuffle=True, num_workers=workers, world=world()
        )

    uninterrupted = make(0)
    epochs = [rows(uninterrupted) for _ in range(3)]
    loader = make(num_workers)
    seen = rows(loader, 4)
    state = loader.state_dict()
    assert state["progress"] == {"epoch": 0, "step_in_epoch": 4, "step": 4, "skipped": 0}
    del loader
    resumed = make(2 - num_workers)
    resumed.load_state_dict(state)
    assert seen + rows(resumed) == epochs[0]
    assert [rows(resumed) for _ in range(2)] == epochs[1:]


@pytest.mark.parametrize("call_set_epoch", [False, True])
def test_a_pass_stopped_in_a_later_epoch_resumes_in_that_epoch(call_set_epoch: bool) -> None:
    loader = ShardLoader(numbers(50), global_batch_size=5, shuffle=True, world=world())
    epochs = [taken(loader) for _ in range(5)]
    loader.set_epoch(3)
    taken(loader, 4)
    resumed = ShardLoader(numbers(50), global_batch_size=5, shuffle=True, world=world())
    resumed.load_state_dict(loader.state_dict())
    if call_set_epoch:
        resumed.set_epoch(3)
    assert taken(resumed) == epochs[3][4:]
    assert taken(resumed) == epochs[4]


def test_a_state_taken_at_an_epochs_last_step_leaves_an_empty_rest() -> None:
    loader = ShardLoader(numbers(12), global_batch_size=4, shuffle=True, world=world())
    states = [loader.state_dict() for _ in loader]
    resumed = ShardLoader(numbers(12), global_batch_size=4, shuffle=True, world=world())
    resumed.load_state_dict(states[-1])
    assert taken(resumed) == []
    assert resumed.progress == loader.progress == Progress(1, 0, 3)


def test_steps_of_the_run_go_on_counting_after_a_resume() -> None:
    loader = ShardLoader(numbers(250), global_batch_size=1, shuffle=True, world=world())
    state = {**loader.state_dict(), "progress": Progress(epoch=7, step=1750).to_dict()}
    loader.load_state_dict(state)
    assert len(taken(loader)) == 250
    assert loader.progress == Progress(epoch=8, step=2000)


def test_8_ranks_state_resumes_on_4_with_the_same_samples() -> None:
    def make(rank: int, world_size: int) -> ShardLoader:
        return ShardLoader(numbers(1280), global_batch_size=64, shuffle=True, world=world(rank, world_size))

    def step(loaders: list[ShardLoader]) -> list[int]:
        return sorted(flat([batch for loader in loaders for batch in taken(loader, 1)]))

    eight = [make(rank, 8) for rank in range(8)]
    for loader in eight:
        taken(loader, 10)
    states = [loader.state_dict() for loader in eight]
    assert all(state == states[0] for state in states)
    assert states[0]["progress"]["step_in_epoch"] == 10

    def resumed(world_size: int) -> list[ShardLoader]:
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            loader.load_state_dict(states[0])
        return loaders

    assert step(resumed(4)) == step(resumed(8)) == step(resumed(1))


def test_another_batch_size_resumes_within_an_epoch_when_it_divides_what_was_seen() -> None:
    loader = ShardLoader(numbers(640), global_batch_size=64, shuffle=True, world=world())
    order = flat(taken(loader))
    loader.set_epoch(0)
    taken(loader, 5)
    state = loader.state_dict()

    half = ShardLoader(numbers(640), micro_batch_size=8, shuffle=True, world=world(0, 4))  # 32 a step
    half.load_state_dict(state)
    assert half.progress == Progress(0, 10, 15)
    assert set(taken(half, 1)[0]) <= set(order[320:352])
    with pytest.raises(ValueError, match="320 samples into epoch 0") as caught:
        ShardLoader(numbers(640), global_batch_size=50, shuffle=True, world=world()).load_state_dict(state)
    assert "Fix: global_batch_size=64" in str(caught.value)


@pytest.mark.parametrize(
    ("num_items", "options", "named"),
    [(640, {"seed": 1}, "seed .0 then, 1 now"), (641, {}, "num_items"), (640, {"tail": "pad"}, "tail")],
)
def test_within_an_epoch_other_data_or_order_is_refused(
    num_items: int, options: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ShardLoader(numbers(640), global_batch_size=64, shuffle=True, world=world())
    at_start = loader.state_dict()
    taken(loader, 5)
    other = ShardLoader(numbers(num_items), global_batch_size=64, shuffle=True, world=world(), **options)
    with pytest.raises(ValueError, match=named):
        other.load_state_dict(loader.state_dict())
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(at_start)  # between epochs it is the user's choice, and said
    assert named.split()[0] in caplog.text
