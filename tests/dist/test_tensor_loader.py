"""TensorLoader: ShardLoader's batches from memory, augmented by position alone."""

from __future__ import annotations

import doctest
import gzip
import importlib.util
import json
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset, WeightedRandomSampler

try:  # at the top, since importing it sets an environment variable of torch's compiler
    from torchvision.transforms import v2
except ImportError:
    v2 = None

from phalanx.dist import tensor_loader
from phalanx.dist.augment import Cutout, HorizontalFlip, Normalize, RandomCrop
from phalanx.dist.augment_draws import Draws
from phalanx.dist.augment_policies import RandAugment, TrivialAugment
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.tensor_loader import TensorLoader
from phalanx.dist.world import init_world
from tests.conftest import ROOT
from tests.dist.loading import world
from tests.ranks import RankRunner

AUGMENT = [RandomCrop(2), HorizontalFlip(), RandAugment(2, 12), Normalize(0.4, 0.3), Cutout(4)]


def _data(count: int = 53, channels: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, channels, 12, 10), dtype=torch.uint8, generator=generator)
    return images, torch.arange(count)


def _loader(rank: int = 0, world_size: int = 1, count: int = 53, **options: Any) -> TensorLoader:
    used: dict[str, Any] = {
        "global_batch_size": 16,
        "shuffle": True,
        "seed": 3,
        "augment": AUGMENT,
        **options,
    }
    return TensorLoader(*_data(count), world=world(rank, world_size), **used)


def _rows(loader: TensorLoader, steps: int | None = None) -> dict[tuple[int, int], tuple[int, bytes]]:
    """(epoch, position) to (label, image) of one pass, or of its first steps."""
    found = {}
    for images, labels in loader:
        epoch = loader.progress.epoch
        for place, position in enumerate(loader.positions):
            found[epoch, int(position)] = int(labels[place]), images[place].numpy().tobytes()
        if loader.is_last_micro and steps is not None and loader.progress.step_in_epoch == steps:
            break
    return found


def test_the_example_in_the_docstring() -> None:
    found = doctest.testmod(tensor_loader)
    assert found.attempted > 0
    assert found.failed == 0


# The same batches as ShardLoader


@pytest.mark.parametrize("tail", ["uneven", "drop", "pad"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_and_attributes_are_those_of_shard_loader(tail: Any, world_size: int, shuffle: bool) -> None:
    names = (
        "progress", "local_count", "step_local_count", "global_count", "is_last_micro", "key", "training",
    )  # fmt: skip
    for rank in range(world_size):
        options: dict[str, Any] = {
            "global_batch_size": 20,
            "micro_batch_size": 4,
            "shuffle": shuffle,
            "tail": tail,
        }
        ours = TensorLoader(*_data(), world=world(rank, world_size), **options)
        theirs = ShardLoader(TensorDataset(*_data()), world=world(rank, world_size), **options)
        assert len(ours) == len(theirs)
        assert ours.plan == theirs.plan
        for _ in range(2):
            count = 0
            for (images, labels), (their_images, their_labels) in zip(ours, theirs, strict=True):
                assert torch.equal(images, their_images)
                assert torch.equal(labels, their_labels)
                assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
                assert ours.positions.tolist() == theirs.positions.tolist()
                count += 1
            assert count == len(ours)
        assert ours.state_dict() == theirs.state_dict()


def test_images_stay_bytes_until_the_batch() -> None:
    loader = _loader(augment=[Normalize(0.5, 0.25)])
    images, labels = next(iter(loader))
    assert loader.tensors[0].dtype == torch.uint8
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, (loader.tensors[0][labels] / 255 - 0.5) / 0.25)
    assert next(iter(_loader(augment=None)))[0].dtype == torch.uint8


def test_one_tensor_gives_tuples_of_one_and_any_shape_will_do_without_transforms() -> None:
    loader = TensorLoader(torch.arange(5.0), global_batch_size=2, world=world())
    assert [batch[0].tolist() for batch in loader] == [[0.0, 1.0], [2.0, 3.0], [4.0]]
    assert {len(batch) for batch in loader} == {1}


def test_a_sampler_says_the_order() -> None:
    sampler = WeightedRandomSampler([0.0] * 40 + [1.0] * 13, 53, replacement=True)
    rows = _rows(_loader(sampler=sampler, shuffle=False))
    assert len(rows) == 53
    assert {label for label, _ in rows.values()} <= set(range(40, 53))
    twice = [image for label, image in rows.values() if label == 41]
    assert len(set(twice)) > 1, "one image drawn twice has two positions, hence two augmentations"


# Invariance


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], tuple[int, bytes]]:
    """Two epochs on one rank."""
    loader = _loader()
    return {**_rows(loader), **_rows(loader)}


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_are_the_same_on_any_number_of_ranks_and_for_any_micro_batch(
    world_size: int, micro_batch_size: int | None, expected: dict[Any, Any]
) -> None:
    found: dict[Any, Any] = {}
    for rank in range(world_size):
        loader = _loader(rank, world_size, micro_batch_size=micro_batch_size)
        for _ in range(2):
            rows = _rows(loader)
            assert not found.keys() & rows.keys(), "ranks share a sample"
            found.update(rows)
    assert found == expected


def test_rows_are_the_same_however_often_the_run_was_killed(expected: dict[Any, Any]) -> None:
    found: dict[Any, Any] = {}
    state: dict[str, Any] | None = None
    for world_size, steps in ((4, 1), (2, 3), (3, 2), (1, 1), (4, 4)):
        # Every rank delivers some steps and is gone; the next world starts from what was saved.
        for rank in range(world_size):
            loader = _loader(rank, world_size)
            if state is not None:
                loader.load_state_dict(state)
            stop = loader.progress.step + steps
            while loader.progress.step < stop and loader.progress.epoch < 2:
                left = stop - loader.progress.step
                end = min(loader.progress.step_in_epoch + left, loader.plan.steps_per_epoch)
                found.update(_rows(loader, steps=end if end < loader.plan.steps_per_epoch else None))
        state = json.loads(json.dumps(loader.state_dict()))
    assert found == expected


@pytest.mark.parametrize(("samples", "values"), [(1, 1 << 22), (7, 1 << 22), (2048, 1), (2048, 120 * 40)])
def test_rows_do_not_depend_on_how_many_are_made_together(
    samples: int, values: int, expected: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_loader, "_SAMPLES_TOGETHER", samples)
    monkeypatch.setattr(tensor_loader, "_VALUES_TOGETHER", values)
    loader = _loader(micro_batch_size=5)
    assert {**_rows(loader), **_rows(loader)} == expected


def test_seed_epoch_and_position_each_change_the_augmentation(expected: dict[Any, Any]) -> None:
    other_seed = _rows(_loader(seed=4, shuffle=False))
    same_order = _rows(_loader(seed=3, shuffle=False))
    assert [label for label, _ in other_seed.values()] == [label for label, _ in same_order.values()]
    assert sum(other_seed[key] != same_order[key] for key in same_order) > 40
    images, labels = _data()
    alike = TensorLoader(
        images[:1].expand(53, -1, -1, -1), labels, global_batch_size=16, augment=AUGMENT, world=world()
    )
    first, second = (
        [image for _, image in _rows(alike).values()],
        [image for _, image in _rows(alike).values()],
    )
    assert len({*first, *second}) > 90


@given(
    count=st.integers(1, 70), batch=st.integers(1, 40), micro=st.none() | st.integers(1, 20), ranks=st.integers(1, 5),
    tail=st.sampled_from(["uneven", "pad"]), seed=st.integers(-(2**63), 2**63 - 1), shuffle=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_ranks_together_deliver_the_rows_of_one_whatever_the_sizes(
    count: int, batch: int, micro: int | None, ranks: int, tail: Any, seed: int, shuffle: bool
) -> None:
    options: dict[str, Any] = {
        "count": count, "global_batch_size": batch, "tail": tail, "seed": seed, "shuffle": shuffle,
        "augment": [RandomCrop(3), TrivialAugment()],
    }  # fmt: skip
    expected = _rows(_loader(**options))
    assert len(expected) == count
    found: dict[Any, Any] = {}
    for rank in range(ranks):
        for key, row in _rows(_loader(rank, ranks, micro_batch_size=micro, **options)).items():
            assert found.setdefault(key, row) == row, "padding repeats the row of its position"
    assert found == expected


# Steps without a sample, generators


def test_a_rank_without_samples_gets_a_stand_in_in_training_only() -> None:
    loader = _loader(2, 3, count=17)
    batches = [(images, loader.local_count, loader.global_count) for images, _ in loader]
    assert [count for _, count, _ in batches] == [5, 0]
    assert batches[1][2] == 1
    (real,) = [images for number, (images, _) in enumerate(_loader(0, 3, count=17)) if number == 1]
    assert torch.equal(batches[1][0], real), "a stand-in is the step's first sample"
    evaluation = _loader(2, 3, count=17, shuffle=False)
    assert [len(images) for images, _ in evaluation] == [5]


def test_global_generators_are_reseeded_in_training_and_left_alone_in_evaluation() -> None:
    drawn = []
    for start in (1, 2):
        torch.manual_seed(start)
        drawn.append([torch.rand(()).item() for _ in _loader()])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == len(drawn[0])
    torch.manual_seed(5)
    plain = [torch.rand(()).item() for _ in range(4)]
    torch.manual_seed(5)
    assert [torch.rand(()).item() for _ in _loader(shuffle=False)] == plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rows_on_a_gpu_are_those_of_the_cpu() -> None:
    for augment in (AUGMENT, [TrivialAugment()]):
        pairs = zip(_loader(augment=augment), _loader(augment=augment, device="cuda"), strict=True)
        for (images, labels), (gpu_images, gpu_labels) in pairs:
            assert gpu_images.is_cuda
            assert gpu_labels.is_cuda
            assert torch.equal(images, gpu_images.cpu())
            assert torch.equal(labels, gpu_labels.cpu())


# What ranks must agree on, and bad input


class _Plain:
    """A user's transform without a repr of its own."""

    def draw(self, draws: Draws, height: int, width: int) -> tuple[Any, ...]:
        return (draws.integers(200).astype(np.uint8),)

    def apply(self, images: Tensor, parameters: tuple[Any, ...]) -> Tensor:
        return images ^ torch.from_numpy(parameters[0]).view(-1, 1, 1, 1)


def _on_a_real_rank(rank: int, world_size: int) -> tuple[list[str], dict[tuple[int, int], tuple[int, bytes]]]:
    """What is said to ranks with different values, different transforms, and equal ones; and a rank's rows."""
    init_world()
    said = []
    for what in ("values", "transforms", "nothing"):
        images, labels = _data()
        if what == "values":
            images = images + rank
        p = 0.5 - 0.1 * rank if what == "transforms" else 0.5
        try:
            augment = [HorizontalFlip(p), _Plain()]
            said.append(
                str(len(TensorLoader(images, labels, global_batch_size=16, shuffle=True, augment=augment)))
            )
        except ValueError as error:
            said.append(str(error))
    loader = TensorLoader(*_data(), global_batch_size=16, shuffle=True, seed=3, augment=AUGMENT)
    return said, {**_rows(loader), **_rows(loader)}


def test_real_ranks_share_the_rows_of_one_and_are_told_when_they_differ(
    run_ranks: RankRunner, expected: dict[Any, Any]
) -> None:
    (one, rows), (other, other_rows) = run_ranks(_on_a_real_rank, world_size=2)
    assert not rows.keys() & other_rows.keys()
    assert {**rows, **other_rows} == expected
    assert one == other
    assert "rank 1 holds other values than rank 0 (dataset.tensors[0].values)" in one[0]
    assert "HorizontalFlip(p=0.4)" in one[1]
    assert one[2] == "4", "transforms of a user's own, without a repr, are equal by their names"


@pytest.mark.parametrize(
    ("tensors", "options", "value"),
    [
        ((), {}, "no tensors"),
        (([1, 2],), {}, "list"),
        ((torch.tensor(3),), {}, "without dims"),
        ((torch.zeros(3), torch.zeros(4)), {}, r"\[3, 4\]"),
        (_data(), {"batch_size": 32}, "global_batch_size=32"),
        (_data(), {"global_batch_size": None}, "no batch size"),
        (_data(), {"global_batch_size": 0}, "0"),
        (_data(), {"tail": "keep"}, "keep"),
        (_data(), {"augment": [HorizontalFlip]}, r"HorizontalFlip\(\)"),
        (_data(), {"augment": HorizontalFlip()}, "no sequence"),
        (_data(), {"augment": [Normalize([0.1, 0.2], 0.5)]}, "2 means"),
        (_data(channels=4), {"augment": [RandAugment()]}, "4 channels"),
        ((_data()[1],), {"augment": [HorizontalFlip()]}, "int64"),
        ((_data()[0][:, 0],), {"augment": [HorizontalFlip()]}, "unsqueeze"),
    ],
)
def test_what_cannot_work_is_refused(tensors: Any, options: Any, value: str) -> None:
    with pytest.raises(ValueError, match=value):
        TensorLoader(*tensors, world=world(), **{"global_batch_size": 4, **options})


@pytest.mark.parametrize("name", ["num_workers", "collate_fn", "pin_memory"])
def test_options_of_data_loader_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"(?s){name}.*Fix:.*ShardLoader"):
        TensorLoader(*_data(), global_batch_size=4, world=world(), **{name: 1})


# The benchmark


def _benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # where a script finds what all of them share
    spec = importlib.util.spec_from_file_location(
        "bench_tensor_loader", ROOT / "benchmarks" / "tensor_loader.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(v2 is None, reason="torchvision, which the benchmark compares with, is missing")
def test_the_benchmark_reads_idx_files_and_prints_both_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (300, 28, 28), dtype=np.uint8)
    for name, array in (("images-idx3", images), ("labels-idx1", np.arange(300, dtype=np.uint8) % 10)):
        header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
        (tmp_path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    module, threads = _benchmark(monkeypatch), torch.get_num_threads()
    assert np.array_equal(module.read_idx(tmp_path / "train-images-idx3-ubyte.gz").numpy(), images)
    words = [
        "--data",
        str(tmp_path),
        "--runs",
        "1",
        "--seconds",
        "0.1",
        "--workers",
        "0",
        "--batch-size",
        "50",
    ]
    monkeypatch.setattr("sys.argv", ["tensor_loader.py", *words, "--json"])
    try:
        assert module.main() == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out)
    assert [row["target"] for row in result["results"]] == [20.0, 8.0]
    assert all(row["ratio"] > 0 for row in result["results"])
    assert result["torch"] == torch.__version__
