"""parallelize: the same training on any number of ranks, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from phalanx.dist.engines.compression import check_compression
from phalanx.dist.engines.ddp import DDPEngine
from phalanx.dist.engines.engine import engine_of
from phalanx.dist.engines.single import SingleEngine
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize
from phalanx.dist.wrappers import unwrap
from tests.ranks import RankError, RankRunner

NUM_ITEMS, BATCH = 53, 10  # the last step has 3 samples: on 4 ranks one has none


def _net(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).double()


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_ITEMS, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (NUM_ITEMS,), generator=generator))


def _weights(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in unwrap(model).parameters()]).tolist()


def _train(rank: int, world_size: int, optimizer: str, how: str) -> list[Any]:
    make = {"adam": lambda p: Adam(p, lr=1e-2), "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9)}[optimizer]
    micro = 2 if how == "accumulate" else None
    loader = ShardLoader(_data(), global_batch_size=BATCH, micro_batch_size=micro, shuffle=True)
    model, opt, engine = parallelize(
        _net(), make, loader=loader, max_grad_norm=0.5 if how == "clip" else None
    )
    forward = torch.compile(model, backend="eager") if how == "compiled" else model
    ran = reductions = 0
    if isinstance(engine, DDPEngine):

        def count(state: object, bucket):
            nonlocal reductions
            reductions += 1
            return default_hooks.allreduce_hook(None, bucket)

        model.register_comm_hook(None, count)
    for _ in range(4):
        for x, y in loader:
            if how in ("plain", "clip", "compiled"):
                loss = F.cross_entropy(forward(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                ran += 1
                continue
            with engine.micro_step():
                engine.backward(F.cross_entropy(model(x), y, reduction="sum"), loader.global_count)
            if loader.is_last_micro:
                engine.step()
                ran += 1
    return [_weights(model), ran, reductions]


@pytest.fixture(scope="module")
def one_rank() -> dict[tuple[str, str], list[float]]:
    """The weights of one process with a loop that owes nothing to us."""
    found = {}
    for name in ("adam", "sgd"):
        for clip in (None, 0.5):
            loader = ShardLoader(_data(), global_batch_size=BATCH, shuffle=True)
            model = _net()
            optimizer = (
                Adam(model.parameters(), lr=1e-2)
                if name == "adam"
                else SGD(model.parameters(), lr=0.1, momentum=0.9)
            )
            for _ in range(4):
                for x, y in loader:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    if clip:
                        nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
            for how in ("clip",) if clip else ("plain", "engine", "accumulate", "compiled"):
                found[name, how] = _weights(model)
    return found


CASES = [
    ("adam", "plain"),
    ("sgd", "plain"),
    ("adam", "accumulate"),
    ("sgd", "engine"),
    ("sgd", "clip"),
    ("sgd", "compiled"),
]


def _train_all(rank: int, world_size: int) -> list[Any]:
    return [_train(rank, world_size, optimizer, how) for optimizer, how in CASES]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_do_not_depend_on_the_number_of_ranks(
    run_ranks: RankRunner, one_rank, world_size: int
) -> None:
    steps = 4 * 6
    for found in run_ranks(_train_all, world_size=world_size, backend="gloo" if world_size > 1 else None):
        for case, (weights, ran, reductions) in zip(CASES, found, strict=True):
            assert ran == steps, case
            assert weights == pytest.approx(one_rank[case], rel=0, abs=1e-9), case
            # One bucket here: one all-reduce per optimizer step, however many micro steps.
            assert reductions == (steps if world_size > 1 else 0), case


def _nan_stand_in(rank: int, world_size: int, how: str) -> list[float]:
    """2 samples on 3 ranks; the loss of the rank without any is NaN."""
    loader = ShardLoader(
        TensorDataset(_data().tensors[0][:2]), global_batch_size=2, shuffle=True, micro_batch_size=1
    )
    model, optimizer, engine = parallelize(_net(), lambda p: SGD(p, lr=0.1), loader=loader)
    (x,) = next(iter(loader))
    poison = float("nan") if loader.local_count == 0 else 1.0
    if how == "plain":
        (model(x).square().sum(1).mean() * poison).backward()
        optimizer.step()
    else:
        with engine.micro_step():
            engine.backward(model(x).square().sum() * poison, loader.global_count)
        engine.step()
    return _weights(model)


@pytest.mark.parametrize("how", ["plain", "engine"])
def test_a_stand_in_weighs_nothing_not_even_nan(run_ranks: RankRunner, how: str) -> None:
    model = _net()
    model(_data().tensors[0][:2]).square().sum(1).mean().backward()
    SGD(model.parameters(), lr=0.1).step()
    for weights in run_ranks(_nan_stand_in, how, world_size=3):
        assert weights == pytest.approx(_weights(model), rel=0, abs=1e-12)


class _Spread:
    """A loader's counts, said by hand: 3 samples on rank 0 in 2 micro batches, 1 on rank 1, then a stand-in."""

    training, step_local_count, global_count, is_last_micro, local_count = False, 0, 4, True, 0


def _stand_in_after_real(rank: int, world_size: int) -> list[float]:
    loader = _Spread()
    loader.step_local_count = 3 if rank == 0 else 1
    model, _, engine = parallelize(_net(), lambda p: SGD(p, lr=0.1), loader=loader)
    rows = {0: [[0, 1], [2]], 1: [[3], [0]]}[rank]
    x = _data().tensors[0]
    for micro, mine in enumerate(rows):
        stands_in = rank == 1 and micro == 1
        loader.local_count = 0 if stands_in else len(mine)
        with engine.micro_step(last=micro == 1):
            engine.backward(model(x[mine]).square().sum() * (float("nan") if stands_in else 1.0), 4)
    engine.step()
    return _weights(model)


def test_a_stand_in_keeps_what_earlier_micro_batches_left(run_ranks: RankRunner) -> None:
    model = _net()
    model(_data().tensors[0][:4]).square().sum(1).mean().backward()
    SGD(model.parameters(), lr=0.1).step()
    for weights in run_ranks(_stand_in_after_real, world_size=2):
        assert weights == pytest.approx(_weights(model), rel=0, abs=1e-12)


def _tokens(rank: int, world_size: int) -> list[float]:
    weight = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(weight.weight)
    model, _, engine = parallelize(weight, lambda p: SGD(p, lr=1.0))
    count, total = (10, 20.0) if rank == 0 else (30, 30.0)
    x = torch.full((count, 1), total / count, dtype=torch.float64)
    with engine.micro_step():
        loss_sum = model(x).sum()
        engine.backward(loss_sum, 40)
    return [float(weight.weight.grad)]


def test_token_means_are_global(run_ranks: RankRunner) -> None:
    # not the mean of means, 1.5
    assert run_ranks(_tokens, world_size=2) == [[pytest.approx(1.25)]] * 2


def _two_losses(rank: int, world_size: int) -> list[float]:
    """Two backward passes of one step: the second must leave what the first reduced."""
    model, _, engine = parallelize(_net(), lambda p: SGD(p, lr=0.1))
    x = _data().tensors[0][rank:6:world_size]
    for factor in (1.0, 0.5):
        with engine.micro_step():
            engine.backward(model(x).square().sum() * factor, 6)
    engine.step()
    return _weights(model)


def test_two_losses_in_one_step(run_ranks: RankRunner) -> None:
    model = _net()
    (model(_data().tensors[0][:6]).square().sum(1).mean() * 1.5).backward()
    SGD(model.parameters(), lr=0.1).step()
    for weights in run_ranks(_two_losses, world_size=2):
        assert weights == pytest.approx(_weights(model), rel=0, abs=1e-12)


# ---- what goes wrong


def _all_in_no_sync(rank: int, world_size: int) -> None:
    model, _, engine = parallelize(_net(), lambda p: SGD(p, lr=0.1))
    with engine.micro_step(last=False):
        engine.backward(model(_data().tensors[0]).sum(), 1)
    engine.step()


def _around_the_wrapper(rank: int, world_size: int) -> None:
    model, optimizer, _ = parallelize(_net(), lambda p: SGD(p, lr=0.1))
    model.module(_data().tensors[0]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("function", [_all_in_no_sync, _around_the_wrapper])
def test_gradients_that_were_not_reduced_are_refused(run_ranks: RankRunner, function) -> None:
    with pytest.raises(RankError, match="gradients that were not reduced over the ranks"):
        run_ranks(function, world_size=2)


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1)
        self.unused = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _unused(rank: int, world_size: int, options: dict[str, Any]) -> int:
    model, optimizer, _ = parallelize(_Branch(), lambda p: SGD(p, lr=0.1), **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return 3


def test_unused_parameters_are_named(run_ranks: RankRunner) -> None:
    with pytest.raises(RankError, match=r"2 of 4 parameters got no gradient: unused.weight, unused.bias\."):
        run_ranks(_unused, {}, world_size=2)
    assert run_ranks(_unused, {"find_unused_parameters": True}, world_size=2) == [3, 3]


def test_bad_options() -> None:
    net, sgd = _net(), SGD
    with pytest.raises(ValueError, match=r"compression='zip': say 'bf16', 'fp16', 'powersgd'"):
        check_compression("zip", "fp32")
    with pytest.raises(ValueError, match="compression='powersgd' with precision='fp16'"):
        check_compression("powersgd", "fp16")
    with pytest.raises(ValueError, match="did you mean 'single'"):
        parallelize(net, sgd, "singel")
    with pytest.raises(ValueError, match="'bucket_cap'; did you mean 'bucket_cap_mb'"):
        parallelize(net, sgd, bucket_cap=3)
    with pytest.raises(ValueError, match="precision='bf8'"):
        parallelize(net, sgd, precision="bf8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_grad_norm=0"):
        parallelize(net, sgd, max_grad_norm=0)
    with pytest.raises(ValueError, match="virtual_ranks=0"):
        parallelize(net, sgd, virtual_ranks=0)
    with pytest.raises(ValueError, match="list, which does not tell"):
        parallelize(net, sgd, loader=[])  # type: ignore[arg-type]


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    net = _net()
    other = SGD(copy.deepcopy(net).parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"4 of the optimizer's parameters are not the model's \(shapes \(16, 5\)"
    ):
        parallelize(net, other)
    used = SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 5).double()).sum().backward()
    used.step()
    with pytest.raises(ValueError, match="has state already"):
        parallelize(net, used)
    with pytest.raises(ValueError, match="str is no optimizer"):
        parallelize(net, "adam")  # type: ignore[type-var]


def test_one_process_gets_its_own_model_back() -> None:
    net = _net()
    before = _weights(net)
    model, optimizer, engine = parallelize(net, lambda p: SGD(p, lr=0.1), "ddp")
    assert model is net
    assert isinstance(engine, SingleEngine)
    assert engine_of(model) is engine
    model(torch.ones(2, 5).double()).sum().backward()
    optimizer.step()
    assert _weights(model) != before
    with pytest.warns(UserWarning, match="parallel already"):
        again = parallelize(model, optimizer)
    assert again == (model, optimizer, engine)


# ---- compression


def _compressed(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name in ("fp16", "bf16", "powersgd"):
        loader = ShardLoader(_data(), global_batch_size=BATCH, shuffle=True)
        model, optimizer, _ = parallelize(
            _net(), lambda p: SGD(p, lr=0.1, momentum=0.9), loader=loader, compression=name
        )
        for _ in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        found[name] = _weights(model)
    return found


def test_compressed_gradients_keep_the_weights_of_samples(run_ranks: RankRunner, one_rank) -> None:
    """On 3 ranks shares are 4, 3, 3 and 1, 1, 1: unweighted, weights would be off by more than rounding."""
    expected = one_rank["sgd", "plain"]
    first, *others = run_ranks(_compressed, world_size=3)
    assert all(other == first for other in others)
    for name, tolerance in (("fp16", 2e-3), ("bf16", 2e-2), ("powersgd", 0.3)):
        off = max(abs(a - b) for a, b in zip(first[name], expected, strict=True))
        assert 1e-7 < off < tolerance, name


# ---- wrappers


def _wrappers(rank: int, world_size: int, kind: str) -> list[Any]:
    torch.manual_seed(rank)
    plain = nn.Linear(3, 2).double()
    plain.config = "mine"  # type: ignore[assignment]
    given: nn.Module = plain
    if "compile" in kind:
        given = torch.compile(given, backend="eager")  # type: ignore[assignment]
    if "ddp" in kind:
        given = DistributedDataParallel(given)
    if "ddp compile" in kind:
        given = torch.compile(given, backend="eager")  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, engine = parallelize(given, lambda p: SGD(p, lr=0.1))
        again, *_ = parallelize(model, optimizer)
    told = sum("already" in str(warning.message) for warning in caught)
    x = torch.full((rank + 1, 3), float(rank + 1), dtype=torch.float64)
    model(x).sum().backward()
    optimizer.step()
    keys = sorted(key.replace("_orig_mod.", "") for key in model.state_dict())
    return [
        unwrap(model) is plain,
        unwrap(model).config,
        again is model,
        told,
        keys,
        isinstance(engine, DDPEngine),
        _weights(model),
    ]


@pytest.mark.parametrize("kind", ["plain", "compile", "ddp", "ddp compile"])
def test_wrappers_in_any_order(run_ranks: RankRunner, kind: str) -> None:

    first, second = run_ranks(_wrappers, kind, world_size=2)
    assert first[:-1] == [
        True,
        "mine",
        True,
        2 if "ddp" in kind else 1,
        ["module.bias", "module.weight"],
        True,
    ]
    assert first[-1] == second[-1]  # rank 0's weights, then the same gradients


def _frozen(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(rank)
    teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    teacher[1].running_mean.fill_(rank + 1.0)
    model, optimizer, _ = parallelize(teacher, None)
    return [
        model is teacher,
        _weights(model),
        model[1].running_mean.tolist(),
        isinstance(optimizer, torch.optim.Optimizer),
    ]


def test_a_frozen_model_is_not_wrapped_but_equal(run_ranks: RankRunner) -> None:
    first, second = run_ranks(_frozen, world_size=2)
    assert first == second
    assert first[0] is True
    assert first[2] == [1.0, 1.0]
    with pytest.raises(ValueError, match="NoneType is no optimizer"):
        parallelize(_net(), None)


def _batch_norm(rank: int, world_size: int, broadcast: bool) -> list[Any]:
    """two forwards, then one backward."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer, _ = parallelize(net, lambda p: SGD(p, lr=0.1), broadcast_buffers=broadcast)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        real = model(torch.randn(6, 4, generator=generator))
        fake = model(torch.randn(6, 4, generator=generator) + 1)
        optimizer.zero_grad()
        (fake.mean() - real.mean() + real.square().mean()).backward()
        optimizer.step()
    norm = unwrap(model)[1]
    return [norm.running_mean.tolist(), norm.running_var.tolist(), int(norm.num_batches_tracked)]


def test_two_forwards_before_one_backward_with_batch_norm(run_ranks: RankRunner) -> None:
    first, second = run_ranks(_batch_norm, True, world_size=2)
    assert first == second
    assert first[2] == 4
    own_first, own_second = run_ranks(_batch_norm, False, world_size=2)
    assert own_first == first
    assert own_first[0] != own_second[0]


def _sync_batch_norm(rank: int, world_size: int) -> None:
    parallelize(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2))), SGD)


def test_sync_batch_norm_on_the_cpu_is_refused(run_ranks: RankRunner) -> None:
    with pytest.raises(RankError, match=r"SyncBatchNorm \(0\) works on GPUs only"):
        run_ranks(_sync_batch_norm, world_size=2)


def _single_on_two(rank: int, world_size: int) -> None:
    parallelize(_net(), SGD, "single")


def test_single_on_several_ranks_is_refused(run_ranks: RankRunner) -> None:
    with pytest.raises(RankError, match="strategy='single' on 2 ranks"):
        run_ranks(_single_on_two, world_size=2)
