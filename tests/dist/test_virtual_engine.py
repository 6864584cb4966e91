"""parallelize(virtual_ranks=V): the same bits on every world size, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from phalanx.dist.engines.virtual import VirtualEngine
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.numerics import NumericsWarning
from phalanx.dist.parallel import parallelize
from tests.dist.virtual_runs import Net, VirtualRun, run
from tests.ranks import RankError, RankRunner

# The last step of an epoch has no sample for some virtual ranks, or one.
CASES: list[dict[str, Any]] = [
    {"virtual_ranks": 8, "steps": 12, "optimizer": "adam", "batch": 32},
    {"virtual_ranks": 8, "steps": 12, "optimizer": "sgd", "batch": 19, "micro": 2},
    {"virtual_ranks": 6, "steps": 12, "optimizer": "adam", "batch": 32, "max_grad_norm": None},
    {"virtual_ranks": 4, "steps": 6, "optimizer": "sgd", "batch": 32, "precision": "bf16"},
    {"virtual_ranks": 4, "steps": 4, "optimizer": "adam", "batch": 32, "precision": "fp16", "num_threads": 2},
]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _runs(rank: int, world_size: int) -> list[Any]:
    playable = [case for case in CASES if _playable(case["virtual_ranks"], world_size)]
    return [run(**case) for case in playable]


def _playable(virtual_ranks: int, world_size: int) -> bool:
    from phalanx.dist.virtual_ranks import world_sizes

    return world_size in world_sizes(virtual_ranks)


@pytest.fixture(scope="module")
def on_one_rank() -> list[Any]:
    threads = torch.get_num_threads()
    found = _runs(0, 1)
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_losses_and_weights_are_equal_to_the_bit(
    run_ranks: RankRunner, on_one_rank: list[Any], world_size: int
) -> None:
    """Batch norm, dropout, augmentation, clipping, unused parameters, uneven steps."""
    expected = [
        found
        for case, found in zip(CASES, on_one_rank, strict=True)
        if _playable(case["virtual_ranks"], world_size)
    ]
    assert expected
    for found in run_ranks(_runs, world_size=world_size, timeout_s=180):
        assert found == expected


def test_the_number_of_virtual_ranks_shows_in_the_bits(on_one_rank: list[Any]) -> None:
    """Else equality would say nothing; and losses are finite."""
    losses, bits = run(**{**CASES[0], "virtual_ranks": 4})
    assert bits != on_one_rank[0][1]
    assert all(float(word) > 0 for line in losses for word in line.split())


def _killed(rank: int, world_size: int, folder: str, until: int, kill: int | None) -> list[Any]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = VirtualRun(8, Path(folder), batch=20)
        begun = made.loader.progress.step
        made.train(until, killed_at=kill if rank == world_size - 1 else None)
    return [begun, made.losses, made.bits(), [str(w.message) for w in told if w.category is NumericsWarning]]


def test_killed_on_4_ranks_resumed_on_2_and_then_8(run_ranks: RankRunner, tmp_path: Path) -> None:
    steps, folder = 14, str(tmp_path / "checkpoints")
    losses, bits = run(8, steps, batch=20)
    for world_size, killed_at in ((4, 4), (2, 9)):
        with pytest.raises(RankError, match="died without a traceback"):
            run_ranks(_killed, folder, steps, killed_at, world_size=world_size)
    for begun, rest, found, told in run_ranks(_killed, folder, steps, None, world_size=8):
        # The save of the step before the kill may have been under way, or the one before it.
        assert begun in (7, 8, 9)
        assert rest == losses[begun:]
        assert (found, told) == (bits, [])


def test_resuming_under_other_conditions_is_told(tmp_path: Path) -> None:
    made = VirtualRun(2, tmp_path)
    made.train(3)
    assert made.checkpoints is not None
    made.checkpoints.close()
    with pytest.warns(NumericsWarning, match=r"not bit-equal.*\(num_threads 1 -> 2\)"):
        again = VirtualRun(2, tmp_path, num_threads=2)
    assert torch.get_num_threads() == 2
    assert again.checkpoints is not None
    again.checkpoints.close()
    with pytest.warns(NumericsWarning, match=r"\(virtual_ranks 2 -> 4\)"):
        other = VirtualRun(4, tmp_path)
    assert other.checkpoints is not None
    other.checkpoints.close()
    state = made.engine.export()
    assert state["numerics"]["num_threads"] == 1
    with pytest.warns(NumericsWarning, match="num_threads 1 -> 2"):
        again.engine.load(state)


# ---- what a step is


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def _data(num_items: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_items, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (num_items,), generator=generator))


def _sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)


def test_a_step_weighs_samples_alike_and_averages_buffers() -> None:
    """Against a loop that owes nothing to us: one batch norm batch per virtual rank, the sum over all samples."""
    loader = ShardLoader(_data(), global_batch_size=20, shuffle=True, virtual_ranks=4)
    model, _, engine = parallelize(_net(), _sgd, loader=loader)  # the loader says it
    assert isinstance(engine, VirtualEngine)
    plain = _net()
    optimizer = _sgd(plain.parameters())
    reference = ShardLoader(_data(), global_batch_size=20, shuffle=True, virtual_ranks=4)
    for _ in range(2):
        start, ends, total = copy.deepcopy(plain.state_dict()), [], 0.0
        for (x, y), (a, b) in zip(loader, reference, strict=True):
            with engine.micro_step():
                engine.backward(F.cross_entropy(model(x), y, reduction="sum"), loader.global_count)
            for name, buffer in plain.named_buffers():
                buffer.data.copy_(start[name])
            loss = F.cross_entropy(plain(a), b, reduction="sum") / reference.global_count
            loss.backward()
            total += loss.item()
            ends.append(copy.deepcopy(plain.state_dict()))
            if not loader.is_last_micro:
                continue
            info = engine.step()
            optimizer.step()
            optimizer.zero_grad()
            for name, buffer in plain.named_buffers():
                buffer.data.copy_(torch.stack([end[name].double() for end in ends]).mean(0))
            assert info.loss is not None
            assert info.loss.item() == pytest.approx(total, rel=1e-12)
            assert (info.grad_norm, info.skipped) == (None, False)
            start, ends, total = copy.deepcopy(plain.state_dict()), [], 0.0
            for key, value in model.state_dict().items():
                torch.testing.assert_close(value, start[key], rtol=0, atol=1e-12)
    assert model[1].num_batches_tracked == 6  # type: ignore[index]


def _plain_loop(rank: int, world_size: int) -> list[list[float]]:
    found = []
    for how in ("plain", "engine"):
        loader = ShardLoader(_data(), global_batch_size=14, shuffle=True, virtual_ranks=2)
        model, optimizer, engine = parallelize(_net(), _sgd, loader=loader, max_grad_norm=0.5)
        for x, y in itertools.chain(loader, loader):
            if how == "plain":
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                with engine.micro_step():
                    engine.backward(F.cross_entropy(model(x), y, reduction="sum"), loader.global_count)
                engine.step()
        found.append(torch.cat([value.reshape(-1) for value in model.state_dict().values()]).tolist())
    return found


def test_the_plain_loop_is_right_with_one_virtual_rank_on_each_rank(run_ranks: RankRunner) -> None:
    (plain, engine), (other, _) = run_ranks(_plain_loop, world_size=2)
    assert plain == other
    assert plain == pytest.approx(engine, rel=0, abs=1e-12)


def _backward(engine: VirtualEngine, model: nn.Module, x: Tensor, y: Tensor, count: int) -> None:
    with engine.micro_step():
        engine.backward(F.cross_entropy(model(x), y, reduction="sum"), count)


def test_without_a_loader_each_micro_step_is_a_virtual_rank() -> None:
    x, y = _data(12).tensors
    weights = []
    for loader in (None, ShardLoader(TensorDataset(x, y), global_batch_size=12, shuffle=True, tail="drop")):
        model, _, engine = parallelize(_net(), _sgd, virtual_ranks=4, loader=loader)
        assert isinstance(engine, VirtualEngine)
        shares: Any = loader
        if loader is None:
            plan = ShardLoader(TensorDataset(x, y), global_batch_size=12, shuffle=True).plan
            order = plan.indices(0, 0, 0)
            shares = [(x[order[v::4]], y[order[v::4]]) for v in range(4)]
        for a, b in shares:
            _backward(engine, model, a, b, 12)
        engine.step()
        weights.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    assert torch.equal(*weights)


def test_wrong_loops_are_told_the_lines_to_write() -> None:
    x, y = _data(12).tensors
    model, optimizer, engine = parallelize(_net(), _sgd, virtual_ranks=4)
    assert isinstance(engine, VirtualEngine)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"virtual_ranks=4 on 1 ranks: each rank plays 4") as caught:
        optimizer.step()
    assert "with engine.micro_step():" in str(caught.value)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"engine.backward\(\) outside engine.micro_step\(\)"):
        engine.backward(F.cross_entropy(model(x), y), 12)
    with (
        pytest.raises(RuntimeError, match=r"loss.backward\(\) in engine.micro_step\(\)"),
        engine.micro_step(),
    ):
        F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    model, _, engine = parallelize(_net(), _sgd, virtual_ranks=2)
    assert isinstance(engine, VirtualEngine)
    _backward(engine, model, x, y, 12)
    with pytest.raises(RuntimeError, match=r"engine.step\(\) after 1 of this rank's 2 virtual ranks"):
        engine.step()
    _backward(engine, model, x, y, 12)
    with pytest.raises(RuntimeError, match="another micro step came"):
        _backward(engine, model, x, y, 12)
    engine.step()


def test_a_batch_left_out_is_named() -> None:
    loader = ShardLoader(_data(), global_batch_size=20, shuffle=True)
    model, _, engine = parallelize(_net(), _sgd, virtual_ranks=4, loader=loader)
    assert isinstance(engine, VirtualEngine)
    batches = iter(loader)
    _backward(engine, model, *next(batches), 20)
    next(batches)
    with pytest.raises(RuntimeError, match="a batch of virtual rank 2 came where virtual rank 1 is next"):
        _backward(engine, model, *next(batches), 20)


def test_a_step_left_halfway_leaves_no_trace() -> None:
    def train(leave: bool) -> dict[str, Tensor]:
        loader = ShardLoader(_data(), global_batch_size=20, shuffle=True)
        model, _, engine = parallelize(_net(), _sgd, virtual_ranks=4, loader=loader)
        assert isinstance(engine, VirtualEngine)
        if leave:
            for x, y in itertools.islice(loader, 3):
                _backward(engine, model, x, y, 20)
        loader.set_epoch(1)
        for x, y in loader:
            _backward(engine, model, x, y, loader.global_count)
            if loader.is_last_micro:
                engine.step()
        return dict(model.state_dict())

    straight = train(False)
    assert all(torch.equal(value, straight[key]) for key, value in train(True).items())


def test_a_copy_and_a_pickle_of_the_model_take_no_engine_along() -> None:
    model, _, engine = parallelize(_net(), _sgd, virtual_ranks=1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.randn(4, 5).double())
    assert isinstance(engine, VirtualEngine)
    assert not engine._begun


def test_what_cannot_be_is_refused() -> None:
    def refused(words: str, model: nn.Module | None = None, **options: Any) -> None:
        with pytest.raises(ValueError, match=words):
            parallelize(model or _net(), _sgd, **{"virtual_ranks": 4, **options})

    refused("virtual_ranks=0", virtual_ranks=0)
    refused("virtual_ranks='4'", virtual_ranks="4")
    refused(r"SyncBatchNorm \(1\)", nn.SyncBatchNorm.convert_sync_batchnorm(_net()))
    refused("'find_unused_parameters'", find_unused_parameters=True)
    refused("'num_thread'; did you mean 'num_threads'", num_thread=2)
    refused("num_threads=0", num_threads=0)
    loader = ShardLoader(_data(), global_batch_size=20, shuffle=True, virtual_ranks=2)
    refused("made with virtual_ranks=2", loader=loader)
    refused("loader is a DataLoader", loader=DataLoader(_data()))

    class Counting:
        training = is_last_micro = True
        local_count = step_local_count = global_count = 4

    refused("with a Counting, which gives a rank one batch", loader=Counting())


def test_sparse_gradients_are_refused() -> None:
    model, _, engine = parallelize(nn.Embedding(5, 2, sparse=True), _sgd, virtual_ranks=1)
    with pytest.raises(ValueError, match="a gradient is sparse"), engine.micro_step():
        engine.backward(model(torch.tensor([1, 2])).sum(), 2)


def _disagree(rank: int, world_size: int) -> list[str]:
    found = []
    for options in ({"virtual_ranks": 2 << rank}, {"virtual_ranks": 3}):
        try:
            parallelize(Net(), _sgd, **options)  # type: ignore[arg-type]
        except ValueError as error:
            found.append(str(error))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", NumericsWarning)
        parallelize(Net(), _sgd, virtual_ranks=2, num_threads=1 + rank)
    return [*found, *(str(warning.message) for warning in told if warning.category is NumericsWarning)]


def test_ranks_that_disagree_hear_it(run_ranks: RankRunner) -> None:
    first, second = run_ranks(_disagree, world_size=2)
    assert "ranks disagree on virtual_ranks: rank 0: 2, rank 1: 4" in first[0]
    assert "virtual_ranks=3: 3 virtual ranks cannot be shared evenly among 2 ranks" in second[1]
    assert first[:2] == second[:2]
    assert "rank 1 computes under other conditions than rank 0 (num_threads 1 -> 2)" in first[2]
    assert len(second) == 2
