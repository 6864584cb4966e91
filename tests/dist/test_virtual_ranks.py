"""Which ranks play which virtual ranks, and how a loader hands out their batches."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dist.loaders import ShardLoader
from phalanx.dist.numerics import NumericsWarning, differences, numerics_record, warn_of_other_bits
from phalanx.dist.plan import Progress
from phalanx.dist.tensor_loader import TensorLoader
from phalanx.dist.virtual_ranks import virtual_range, world_sizes
from tests.dist.loading import Augmented, numbers, world


@given(st.integers(1, 300))
def test_world_sizes_give_each_rank_a_whole_subtree(virtual_ranks: int) -> None:
    sizes = world_sizes(virtual_ranks)
    by_hand = {w for w in range(1, virtual_ranks + 1) if virtual_ranks % w == 0}
    by_hand = {w for w in by_hand if (virtual_ranks // w).bit_count() == 1} | {1}
    assert sizes == sorted(by_hand)
    for size in sizes:
        played = [virtual_range(virtual_ranks, rank, size) for rank in range(size)]
        assert list(itertools.chain(*played)) == list(range(virtual_ranks))
        assert len(set(map(len, played))) == 1


@pytest.mark.parametrize(
    ("virtual_ranks", "world_size", "words"),
    [
        (8, 3, ["8 virtual ranks cannot be shared evenly among 3", "start 1, 2, 4 or 8 ranks"]),
        (6, 2, ["each of 2 ranks would play 3, which is no power of two", "start 1, 3 or 6 ranks"]),
        (4, 8, ["4 virtual ranks cannot be shared evenly among 8", "start 1, 2 or 4 ranks"]),
        (1, 2, ["start 1 ranks"]),
    ],
)
def test_a_world_that_cannot_play_them_is_told_which_can(
    virtual_ranks: int, world_size: int, words: list[str]
) -> None:
    with pytest.raises(ValueError, match=f"virtual_ranks={virtual_ranks}") as caught:
        virtual_range(virtual_ranks, 0, world_size)
    assert all(word in str(caught.value) for word in [*words, "Fix: "])


@pytest.mark.parametrize("wrong", [0, -8, 2.0, "8", True, None])
def test_a_wrong_number_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="virtual_ranks="):
        world_sizes(wrong)


# ---- loaders


def _batches(loader: ShardLoader) -> dict[tuple[int, int, int], Any]:
    """Everything that a virtual rank meets in a pass, by step, virtual rank and micro batch."""
    found: dict[tuple[int, int, int], Any] = {}
    micro = 0
    for batch in loader:
        step = loader.progress.step - loader.is_last_micro
        drawn = torch.rand(()).item() if loader.training else 0.0
        contents = [part.tolist() for part in batch]
        met = (
            contents,
            loader.positions.tolist(),
            loader.local_count,
            loader.global_count,
            loader.key,
            drawn,
        )
        found[step, loader.virtual_rank, micro] = met
        micro = 0 if loader.ends_virtual_rank else micro + 1
    return found


@pytest.mark.parametrize(("virtual_ranks", "sizes"), [(8, (1, 2, 4, 8)), (6, (1, 3, 6))], ids=["8", "6"])
@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_size": 20},
        {"global_batch_size": 20, "micro_batch_size": 2},
        {"micro_batch_size": 3},
        {"global_batch_size": 5},  # less than the virtual ranks: stand-ins in every step
        {"global_batch_size": 20, "tail": "pad"},
        {"global_batch_size": 20, "shuffle": False},
    ],
    ids=str,
)
def test_a_virtual_ranks_batches_do_not_depend_on_the_world_size(
    virtual_ranks: int, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    def passes(world_size: int) -> list[dict[tuple[int, int, int], Any]]:
        loaders = [
            ShardLoader(
                Augmented(53),
                virtual_ranks=virtual_ranks,
                world=world(rank, world_size),
                **{"shuffle": True, **options},
            )
            for rank in range(world_size)
        ]
        counts = [len(loader) for loader in loaders]
        found = []
        for _ in range(2):
            ranks = [_batches(loader) for loader in loaders]
            assert [len(batches) for batches in ranks] == counts
            found.append({key: met for batches in ranks for key, met in batches.items()})
            assert sum(map(len, ranks)) == len(found[-1])  # nobody's batch came twice
        return found

    expected = passes(sizes[0])
    real = sorted(p for _, positions, *_ in expected[0].values() for p in positions)
    assert sorted(set(real)) == list(range(53))
    for world_size in sizes[1:]:
        assert passes(world_size) == expected


def test_the_steps_last_batch_is_that_of_the_ranks_last_virtual_rank() -> None:
    loader = ShardLoader(
        numbers(17), global_batch_size=8, shuffle=True, virtual_ranks=4, micro_batch_size=1, world=world(1, 2)
    )
    flags = [
        (loader.virtual_rank, loader.local_count, loader.ends_virtual_rank, loader.is_last_micro)
        for _ in loader
    ]
    step = [(2, 1, False, False), (2, 1, True, False), (3, 1, False, False), (3, 1, True, True)]
    assert flags == [*step, *step, (2, 0, True, False), (3, 0, True, True)]
    assert loader.progress == Progress(1, 0, 3)


def test_a_state_does_not_tell_the_world_size_and_resumes_on_another() -> None:
    def make(rank: int, world_size: int) -> ShardLoader:
        return ShardLoader(
            Augmented(53), global_batch_size=8, shuffle=True, virtual_ranks=4, world=world(rank, world_size)
        )

    whole = _batches(make(0, 1))
    two = [make(rank, 2) for rank in range(2)]
    for loader in two:
        for _ in itertools.islice(loader, 7):  # 3 steps and half of the rank's part of the fourth
            pass
    states = [loader.state_dict() for loader in two]
    assert states[0] == states[1]
    assert states[0]["progress"]["step"] == 3
    rest: dict[tuple[int, int, int], Any] = {}
    for rank in range(4):
        loader = make(rank, 4)
        loader.load_state_dict(states[0])
        rest |= _batches(loader)
    assert rest == {key: met for key, met in whole.items() if key[0] >= 3}


def test_a_micro_batch_is_a_virtual_ranks_when_virtual_ranks_come_later() -> None:
    loader = ShardLoader(numbers(100), micro_batch_size=5, shuffle=True, world=world(0, 2))
    assert loader.global_batch_size == 10
    loader.use_virtual_ranks(4)
    loader.use_virtual_ranks(4)
    assert (loader.global_batch_size, len(loader)) == (20, 10)
    with pytest.raises(ValueError, match="virtual_ranks=8, but the loader was made with virtual_ranks=4"):
        loader.use_virtual_ranks(8)
    begun = ShardLoader(numbers(100), micro_batch_size=5, shuffle=True, world=world(0, 2))
    next(iter(begun))
    with pytest.raises(RuntimeError, match=r"use_virtual_ranks\(4\) after batches were delivered"):
        begun.use_virtual_ranks(4)


def test_too_few_samples_for_all_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ShardLoader(numbers(100), global_batch_size=5, shuffle=True, virtual_ranks=8, world=world())
    assert "global_batch_size=5 is less than the 8 virtual ranks" in caplog.text


def test_batches_from_tensors_have_memory_of_their_own() -> None:
    """A slice begins anywhere in memory, where depends on the world size, and kernels look at that."""

    def make(rank: int, world_size: int, **options: Any) -> TensorLoader:
        tensors = torch.arange(53.0), torch.arange(53)
        return TensorLoader(
            *tensors, global_batch_size=20, shuffle=True, virtual_ranks=4, world=world(rank, world_size)
        )

    for x, y in make(0, 1):
        assert x.storage_offset() == y.storage_offset() == 0
        assert x.data_ptr() % 64 == y.data_ptr() % 64 == 0
    two = {key: met for rank in range(2) for key, met in _batches(make(rank, 2)).items()}
    assert two == _batches(make(0, 1))


# ---- what bits depend on


def test_a_record_has_plain_values_and_names_what_differs() -> None:
    record = numerics_record(torch.device("cpu"), virtual_ranks=8)
    assert all(isinstance(value, (str, int, bool)) for value in record.values())
    assert record["num_threads"] == torch.get_num_threads()
    assert record["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert differences(record, record) == []
    then = {**record, "cpu_capability": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    assert differences(then, record) == [
        f"cpu_capability 'AVX2' -> {record['cpu_capability']!r}",
        "ATEN_CPU_CAPABILITY 'avx2' -> None",
    ]


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        ({"num_threads": 4}, {"num_threads": 1}, "num_threads 4 -> 1"),
        ({"virtual_ranks": 8}, None, "virtual_ranks 8 -> None"),
        (None, {"virtual_ranks": 8}, "virtual_ranks None -> 8"),
    ],
)
def test_other_conditions_are_told(then: Any, now: Any, named: str) -> None:
    with pytest.warns(NumericsWarning, match=f"not bit-equal.*{named}"):
        warn_of_other_bits(then, now)


def test_equal_conditions_and_fresh_starts_are_silent(recwarn: pytest.WarningsRecorder) -> None:
    warn_of_other_bits(None, None)
    warn_of_other_bits({"num_threads": 1}, {"num_threads": 1})
    warn_of_other_bits(None, {"num_threads": 1}, started=False)
    assert not recwarn.list


def test_a_loader_keeps_the_record_in_its_state() -> None:
    loader = ShardLoader(numbers(20), global_batch_size=4, shuffle=True, virtual_ranks=2, world=world())
    loader.numerics = {"virtual_ranks": 2, "num_threads": 1}
    for _ in itertools.islice(loader, 4):
        pass
    state = loader.state_dict()
    assert state["numerics"] == {"virtual_ranks": 2, "num_threads": 1}
    loader.numerics = {"virtual_ranks": 2, "num_threads": 3}
    with pytest.warns(NumericsWarning, match="num_threads 1 -> 3"):
        loader.load_state_dict(state)
