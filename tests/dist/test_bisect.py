"""What differs between a step on one rank and on two is found, named, and explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from phalanx.dist.bisect import Bisection, NothingRecorded, bisect_divergence
from phalanx.dist.divergence import Comparison, Divergence, Run
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize
from phalanx.dist.seeds import seed_everything
from phalanx.dist.step_recorder import StepRecorder, record_if_asked
from phalanx.dist.world import init_world
from tests.ranks import RankRunner


class Noisy(nn.Module):
    """Draws from the global generator in its forward, in a layer whose kind says nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5)


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(120, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def _model(kind: str) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 3)]
    middle = {"batch norm": nn.BatchNorm1d(16), "dropout": nn.Dropout(), "noisy": Noisy()}.get(kind)
    if middle is not None:
        layers.insert(1, middle)
    return nn.Sequential(*layers)


def _train(rank: int, world_size: int, kind: str) -> None:
    """A script with parallelize and ShardLoader; ends by SystemExit when its steps are recorded."""
    world = init_world(device="cpu")
    seed_everything(0)
    if kind in ("unseeded weights", "own weights"):
        torch.seed()
    model = _model(kind)
    batch_size = 25 if kind == "means" else 50
    loader = ShardLoader(
        _data(), global_batch_size=batch_size, shuffle=True, seed=1 + world.world_size * (kind == "order")
    )
    if kind == "own weights" and world_size > 1:
        optimizer: Any = Adam(model.parameters())
    else:
        model, optimizer, _ = parallelize(model, Adam, loader=None if kind == "means" else loader)  # type: ignore[assignment]
    for x, y in loader:
        if kind == "noisy":
            torch.seed()
        logits = model(x)
        if kind == "tokens":  # class 0 alone counts, and ranks have different numbers of it
            loss = F.cross_entropy(logits, y, ignore_index=1)
        elif kind == "sum":
            loss = F.cross_entropy(logits, y, reduction="sum")
        else:
            loss = nn.CrossEntropyLoss()(logits, y)
        if kind == "lr":
            optimizer.param_groups[0]["lr"] = 1e-3 * world.world_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _plain_ddp(rank: int, world_size: int, kind: str) -> None:
    """A tutorial's script, without anything of ours but the hooks."""
    record_if_asked()
    torch.manual_seed(0)
    data = _data()
    several = world_size > 1
    sampler = DistributedSampler(data, world_size, rank, shuffle=False) if several else None
    per_rank = 20 if kind == "per rank" else 20 // world_size
    model: nn.Module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    inner = model
    if several:
        model = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=per_rank, sampler=sampler):
        output = (inner if kind == "module" else model)(x)
        optimizer.zero_grad()
        F.cross_entropy(output, y).backward()
        optimizer.step()


def _by_engine(rank: int, world_size: int, kind: str) -> None:
    """A script whose strategy shares weights or their update out; in two micro batches."""
    strategy, _, fault = kind.partition(" ")
    world = init_world(device="cpu")
    seed_everything(0)
    options: dict[str, Any] = {}
    if strategy.startswith("zero"):  # small weights are kept whole by stage 3, unless they are not small
        zero = {"stage": int(strategy[-1]), "stage3_param_persistence_threshold": 20}
        strategy, options = "deepspeed", {"config": {"zero_optimization": zero}}
    loader = ShardLoader(_data(), global_batch_size=50, micro_batch_size=13, shuffle=True)
    model, optimizer, engine = parallelize(_model("plain"), Adam, strategy, loader=loader, **options)
    if fault == "lr":
        optimizer.param_groups[0]["lr"] = 1e-3 * world.world_size
    for x, y in loader:
        with engine.micro_step():
            engine.backward(F.cross_entropy(model(x), y, reduction="sum"), loader.global_count)
        if loader.is_last_micro:
            engine.step()


def _idle(rank: int, world_size: int, kind: str) -> None:
    init_world(device="cpu")


def _until_recorded(rank: int, world_size: int, script: Callable[[int, int, str], None], kind: str) -> None:
    try:
        script(rank, world_size, kind)
    except SystemExit as end:
        if end.code != 0:
            raise
    from phalanx.dist import step_recorder

    if step_recorder._recorder is not None:
        step_recorder._recorder._write_rest()


@pytest.fixture
def bisect(run_ranks: RankRunner) -> Callable[..., Bisection]:
    def run(kind: str, script: Callable[[int, int, str], None] = _train, **options: Any) -> Bisection:
        def start(world_size: int, variables: Mapping[str, str]) -> int:
            backend = "gloo" if world_size > 1 else None
            run_ranks(
                _until_recorded, script, kind, world_size=world_size, backend=backend, environ=variables
            )
            return 0

        return bisect_divergence(start, **options)

    return run


def test_a_healthy_script_is_the_same(bisect: Callable[..., Bisection]) -> None:
    found = bisect("healthy", world_sizes=(1, 2, 3), steps=2)
    assert found.divergence is None
    assert (found.steps, found.skipped) == (2, ())
    assert found.compared > 60
    assert str(found) == f"The same on 2, 3 ranks and on 1: {found.compared} tensors of 2 steps."


@pytest.mark.parametrize(
    ("kind", "what", "name", "reason"),
    [
        ("batch norm", "output", "1", "statistics of each rank's own samples (25, 25), the first run by those of 50"),
        ("dropout", "output", "1", "dropout draws its random numbers on each rank"),
        ("noisy", "output", "1", "differs between two runs on 1 rank as well: random numbers that nobody seeds"),
        ("means", "gradient", "2.bias", "ranks had 13, 12 samples, and each rank's mean counts alike"),
        ("tokens", "gradient", "2.bias", "a mean of means: the loss is a mean over something"),
        ("sum", "gradient", "2.bias", "it is 0.5 times the first run's: the loss is a sum"),
        ("lr", "weight", "0.weight", "the update is 2 times the first run's: a learning rate"),
        ("unseeded weights", "initial weight", "0.weight", "random numbers that nobody seeds"),
        ("order", "input", "samples", "of its 25 samples are not in the first run's step of 50: another order"),
    ],
)  # fmt: skip
def test_what_differs_is_found_with_its_reason(
    bisect: Callable[..., Bisection], kind: str, what: str, name: str, reason: str
) -> None:
    found = bisect(kind)
    divergence = found.divergence
    assert divergence is not None
    assert (divergence.kind, divergence.name, divergence.step, divergence.world_size) == (what, name, 0, 2)
    assert reason in divergence.reason
    assert divergence.max_difference > 0
    assert f"Step 0 differs on 2 ranks from 1, first in the {what} '{name}' on rank " in str(found)
    assert "\nFix: " in str(found)


def test_without_dropout_the_rest_is_the_same(bisect: Callable[..., Bisection]) -> None:
    assert bisect("dropout", dropout=False).divergence is None
    assert bisect("noisy", dropout=False).divergence is None  # functional dropout too


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("healthy", None),
        ("per rank", "the ranks have 40 together: the global batch size depends on the number of ranks"),
        ("module", "ranks hold different gradients: they were not reduced"),
    ],
)
def test_a_plain_ddp_script(bisect: Callable[..., Bisection], kind: str, expected: str | None) -> None:
    found = bisect(kind, _plain_ddp)
    if expected is None:
        assert found.divergence is None
        assert found.skipped == ()
    else:
        assert found.divergence is not None
        assert expected in found.divergence.reason


@pytest.mark.parametrize("kind", ["fsdp", "fsdp lr", "accelerate", "zero2", "zero3 lr"])
def test_strategies_that_share_weights_out(bisect: Callable[..., Bisection], kind: str) -> None:
    package = {"a": "accelerate", "z": "deepspeed"}.get(kind[0])
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install 'phalanx[{package}]')")
    found = bisect(kind, _by_engine, steps=2)
    if kind.endswith("lr"):
        assert found.divergence is not None
        assert (found.divergence.kind, found.divergence.name) == ("weight", "0.weight")
        assert "the update is 2 times the first run's" in found.divergence.reason
    else:
        assert found.divergence is None, str(found)
        assert found.skipped == ()
        assert found.compared > 40


def test_a_script_that_trains_nothing(bisect: Callable[..., Bisection]) -> None:
    with pytest.raises(NothingRecorded, match="ended on 1 rank without a training step"):
        bisect("", _idle)


def test_a_script_that_fails() -> None:
    with pytest.raises(NothingRecorded, match=r"failed on 3 ranks \(exit code 7\)"):
        bisect_divergence(lambda world_size, variables: 7, [3, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_sizes": (1,)}, "world_sizes"),
        ({"world_sizes": (2, 2)}, "world_sizes"),
        ({"world_sizes": (0, 1)}, "world_sizes"),
        ({"world_sizes": "1,2"}, "world_sizes"),
        ({"world_sizes": 2}, "world_sizes"),
        ({"world_sizes": (1, True)}, "world_sizes"),
        ({"steps": 0}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"tolerance": -1}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"tolerance": "x"}, "tolerance"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}="):
        bisect_divergence(lambda world_size, variables: 0, **options)


@given(st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers())))
def test_what_is_no_function(value: Any) -> None:
    with pytest.raises(ValueError, match="start_ranks="):
        bisect_divergence(value)


# ---- the comparison alone


def _record(rows: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {
        "rows": [len(rows)], "inputs": [[rows]], "weights": {}, "outputs": {"layer": [(0, rows * 2)]},
        "gradients": {}, "weights_after": {}, "kinds": {}, **more,
    }  # fmt: skip


def _compare(base: list[dict[str, Any]], other: list[dict[str, Any]]) -> Divergence | None:
    return Comparison(Run(base), Run(other), 0).first_difference()


@given(st.integers(1, 12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_samples_are_matched_however_ranks_share_them(count: int, world_size: int, draw: Any) -> None:
    whole = torch.arange(count * 2.0).reshape(count, 2)
    order = list(range(count))
    draw.shuffle(order)
    shares = [_record(whole[order[rank::world_size]]) for rank in range(world_size)]
    assert _compare([_record(whole)], shares) is None
    victim = draw.randrange(world_size)
    if len(shares[victim]["inputs"][0][0]):
        shares[victim]["outputs"]["layer"][0][1][-1, -1] += 1
        found = _compare([_record(whole)], shares)
        assert found is not None
        assert (found.kind, found.name, found.rank) == ("output", "layer", victim)
        assert found.max_difference == pytest.approx(1)


def test_rounding_is_no_difference_and_adams_step_of_it_neither() -> None:
    rows = torch.ones(4, 2)
    noise = {"w": torch.tensor([1.0, 1e-9])}, {"w": torch.tensor([1.0 + 1e-6, -1e-9])}
    after = {"w": torch.tensor([0.5, 0.51])}, {"w": torch.tensor([0.5, 0.49])}
    base, other = (
        _record(rows, gradients=gradient, weights_after=weights)
        for gradient, weights in zip(noise, after, strict=True)
    )
    assert _compare([base], [other]) is None
    other["weights_after"] = {"w": torch.tensor([0.6, 0.49])}
    found = _compare([base], [other])
    assert found is not None
    assert found.kind == "weight"


def test_samples_left_out_are_told() -> None:
    rows = torch.arange(8.0).reshape(4, 2)
    found = _compare([_record(rows)], [_record(rows[:2]), _record(rows[2:3])])
    assert found is not None
    assert "the ranks have 3 samples together, the first run 4" in found.reason


def test_batches_with_time_first_or_flattened_are_compared() -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    for shape in (lambda part: part.t()[:, :, None], lambda part: part.reshape(-1, 1)):
        base = _record(rows, outputs={"rnn": [(0, shape(rows))]})
        shares = [
            _record(rows[rank::2], outputs={"rnn": [(0, shape(rows[rank::2].clone()))]}) for rank in range(2)
        ]
        assert _compare([base], shares) is None
        shares[1]["outputs"]["rnn"][0][1][0] += 1
        assert _compare([base], shares) is not None


def _some_forwards(rank: int, world_size: int, folder: str) -> None:
    recorder = StepRecorder(Path(folder), 2)
    model, loss = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.MSELoss()
    optimizer = SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.ones(3, 2))
    model.eval()
    model(torch.ones(3, 2))
    model.train()
    value = loss(model(torch.ones(5, 2)), torch.zeros(5, 1))
    model[0](torch.ones(7, 2))  # as activation checkpointing does in backward
    value.backward()
    optimizer.step()
    recorder._stop()


def test_evaluation_and_recomputed_forwards_are_not_recorded(run_ranks: RankRunner, tmp_path: Path) -> None:
    run_ranks(_some_forwards, str(tmp_path), world_size=1, backend=None)
    record = torch.load(tmp_path / "rank-0-step-0.pt", weights_only=True)
    assert record["rows"] == [5]
    assert list(record["outputs"]) == ["0", "1", "(the model)", "loss MSELoss input 1", "loss MSELoss"]
    assert set(record["gradients"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert not torch.equal(record["weights"]["0.weight"], record["weights_after"]["0.weight"])
