"""The accelerate engine on gloo, alone and under ``accelerate launch``."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from phalanx.dist.engines.accelerate import AccelerateEngine
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize
from phalanx.dist.wrappers import unwrap
from tests.dist import engine_runs as runs
from tests.ranks import RankRunner

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="Accelerate is not installed (pip install 'phalanx[accelerate]')"
)
F32 = torch.float32

# name: how it trains, and the reference that it must equal
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain adam": ({"make": runs.adam, "plain": True}, {"make": runs.adam}),
    "accumulate": ({"make": runs.adam, "micro": 2}, {"make": runs.adam}),
    "clip": ({"max_grad_norm": 0.5}, {"clip": 0.5}),
    "sync batch norm": ({"batch_norm": True, "sync_batch_norm": True, "plain": True}, {"batch_norm": True}),
}


def _cases(rank: int, world_size: int) -> dict[str, Any]:
    from accelerate.state import AcceleratorState

    found: dict[str, Any] = {}
    for name, (options, _) in CASES.items():
        engine, found[name] = runs.run("accelerate", **options)
        assert isinstance(engine, AccelerateEngine)
        assert engine.accelerator.num_processes == world_size
    with pytest.raises(
        ValueError, match="precision='bf16': an Accelerator made before in this process has another"
    ):
        parallelize(runs.net(F32), runs.sgd, "accelerate", precision="bf16")
    AcceleratorState._reset_state()
    found["bf16"] = runs.run("accelerate", dtype=F32, precision="bf16")[1]
    AcceleratorState._reset_state()
    found["rates"] = _rates()
    found["compiled"] = _compiled()
    found["buffers"] = _buffers(rank)
    found["stand-in"] = [_stand_in(plain) for plain in (True, False)]
    found["state"] = _state()
    with pytest.raises(ValueError, match="precision='fp16': Accelerate has it on GPUs only"):
        parallelize(runs.net(F32), runs.sgd, "accelerate", precision="fp16")
    return found


def _compiled() -> list[Any]:
    loader = ShardLoader(runs.data(), global_batch_size=runs.BATCH, shuffle=True)
    plain = runs.net()
    given = torch.compile(plain, backend="eager")
    model, _, engine = parallelize(given, runs.sgd(plain.parameters()), "accelerate", loader=loader)  # type: ignore[arg-type]
    runs.train(engine, loader)
    return [unwrap(model) is plain, list(engine.export()["model"]), runs.weights(engine)]


def _buffers(rank: int) -> list[float]:
    """They are rank 0's from the beginning, and after each step."""
    model = runs.net(batch_norm=True)
    model[1].running_mean.fill_(float(rank))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, engine = parallelize(model, runs.sgd, "accelerate")
    found = [engine.unwrap()[1].running_mean[0].item()]
    model(torch.randn(4, 5, dtype=torch.float64) + rank).sum().backward()
    optimizer.step()
    return [*found, *engine.unwrap()[1].running_mean.tolist()]


def _rates() -> list[float]:
    """A scheduler steps once for each optimizer step, whatever the world size."""
    loader = ShardLoader(runs.data(), global_batch_size=runs.BATCH, shuffle=True)
    model = runs.net()
    optimizer = runs.sgd(model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, given, engine = parallelize(model, optimizer, "accelerate", loader=loader)
    assert given is optimizer
    rates = []
    for x, _ in loader:
        with engine.micro_step():
            engine.backward(model(x).sum(), loader.global_count)
        engine.step()
        rates.append(scheduler.get_last_lr()[0])
        scheduler.step()
    return rates


def _stand_in(plain: bool) -> list[float]:
    """1 sample on several ranks; the losses of ranks without any are NaN."""
    loader = ShardLoader(TensorDataset(runs.data().tensors[0][:1]), global_batch_size=1, shuffle=True)
    model, optimizer, engine = parallelize(runs.net(), runs.sgd, "accelerate", loader=loader)
    (x,) = next(iter(loader))
    poison = float("nan") if loader.local_count == 0 else 1.0
    if plain:
        (model(x).square().sum(1).mean() * poison).backward()
        optimizer.step()
    else:
        with engine.micro_step():
            engine.backward(model(x).square().sum() * poison, loader.global_count)
        engine.step()
    return runs.weights(engine)


def _state() -> list[Any]:
    loader = ShardLoader(runs.data(), global_batch_size=runs.BATCH, shuffle=True)
    plain = runs.net()
    model, optimizer, engine = parallelize(plain, runs.adam, "accelerate", loader=loader)
    runs.train(engine, loader, epochs=1)
    saved, at = copy.deepcopy(engine.export()), loader.state_dict()
    runs.train(engine, loader, epochs=1)
    after = runs.weights(engine)
    engine.load(saved)
    loader.load_state_dict(at)
    runs.train(engine, loader, epochs=1)
    with pytest.warns(UserWarning, match="parallel already"):
        again = parallelize(model, optimizer, "accelerate")
    return [
        list(saved["model"]) == list(runs.net().state_dict()),
        runs.weights(engine) == after,
        unwrap(model) is plain,
        again == (model, optimizer, engine),
    ]


@needs_accelerate
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_weights_are_those_of_one_process(run_ranks: RankRunner, world_size: int) -> None:
    expected = {name: runs.reference(**options) for name, (_, options) in CASES.items()}
    in_fp32 = runs.reference(dtype=F32)
    model = runs.net()
    model(runs.data().tensors[0][:1]).square().sum(1).mean().backward()
    runs.sgd(model.parameters()).step()
    stood_in = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    backend = "gloo" if world_size > 1 else None
    buffers: list[list[float]] = []
    for found in run_ranks(_cases, world_size=world_size, backend=backend, timeout_s=120):
        for name, weights in expected.items():
            assert found[name] == pytest.approx(weights, rel=0, abs=1e-9), name
        assert found["bf16"] == pytest.approx(in_fp32, rel=0, abs=0.05)
        assert found["bf16"] != pytest.approx(in_fp32, rel=0, abs=1e-6)
        assert found["rates"] == [pytest.approx(0.1 / (step + 1)) for step in range(6)]
        for weights in found["stand-in"]:
            assert weights == pytest.approx(stood_in, rel=0, abs=1e-12)
        assert found["state"] == [True] * 4
        assert found["compiled"][:2] == [True, list(runs.net().state_dict())]
        assert found["compiled"][2] == pytest.approx(runs.reference(), rel=0, abs=1e-9)
        buffers.append(found["buffers"])
    assert buffers == [buffers[0]] * world_size
    assert buffers[0][0] == 0.0


# ---- what is refused


def _too_early(rank: int, world_size: int) -> str:
    """Accelerate looks before there is a group, and then never again."""
    from accelerate import PartialState

    PartialState(cpu=True)
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method="file://" + str(Path("late").absolute()), rank=rank, world_size=world_size
    )
    with pytest.raises(ValueError) as raised:
        parallelize(runs.net(), runs.sgd, "accelerate")
    dist.destroy_process_group()
    return str(raised.value)


def _given(rank: int, world_size: int) -> list[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    found: list[Any] = []
    own = Accelerator(cpu=True, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="the accelerator has gradient_accumulation_steps=4"):
        parallelize(runs.net(), runs.sgd, "accelerate", accelerator=own)
    AcceleratorState._reset_state(True)
    own = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(ValueError, match="but the accelerator has mixed_precision='bf16'"):
        parallelize(runs.net(F32), runs.sgd, "accelerate", accelerator=own, precision="fp16")
    *_, engine = parallelize(runs.net(F32), runs.sgd, "accelerate", accelerator=own)
    found.append([engine.accelerator is own, engine.precision])
    sys.modules["accelerate"] = None  # type: ignore[assignment]
    with pytest.raises(ImportError) as raised:
        parallelize(runs.net(), runs.sgd, "accelerate")
    found.append(str(raised.value))
    return found


@needs_accelerate
def test_what_is_refused(run_ranks: RankRunner) -> None:
    first, second = run_ranks(_too_early, world_size=2, backend=None)
    assert "Accelerate takes this for process 0 of 1, but it is rank 0 of 2" in first
    assert "rank 1 of 2" in second
    (found,) = run_ranks(_given, world_size=1, backend=None)
    assert found[0] == [True, "bf16"]
    assert found[1] == "strategy='accelerate' needs Accelerate.\nFix: pip install 'phalanx[accelerate]'"


# ---- accelerate launch

SCRIPT = """
import json, sys
import torch
from phalanx.dist import init_world, parallelize
from tests.dist import engine_runs as runs
world = init_world()
engine, weights = runs.run("accelerate", micro=2)
open(f"{sys.argv[1]}/{world.rank}.json", "w").write(json.dumps([world.world_size, engine.accelerator.num_processes, weights]))
"""


def _launch(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(script), str(folder)]
    import os

    environ = {
        **os.environ,
        "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
        "HF_HOME": str(folder),
    }
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=150)


@needs_accelerate
@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs, --multi_gpu would use them")
def test_accelerate_launch(tmp_path: Path) -> None:
    done = _launch(tmp_path, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    assert done.returncode == 0, done.stderr
    expected = runs.reference()
    for rank in range(2):
        world_size, processes, weights = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (world_size, processes) == (2, 2)
        assert weights == pytest.approx(expected, rel=0, abs=1e-9)
    alone = _launch(tmp_path, "--cpu", "--num_processes", "2")
    assert alone.returncode != 0
    assert "accelerate launch was asked for 2 processes and has started this one alone" in alone.stderr
    assert "Fix: accelerate launch --multi_gpu --num_processes 2" in alone.stderr


@pytest.mark.gpu
@needs_accelerate
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_gpus(run_ranks: RankRunner, precision: str) -> None:
    first, second = run_ranks(_on_gpus, precision, world_size=2, backend="cpu:gloo,cuda:nccl")
    assert first == second
    assert first[-1] == pytest.approx(first[-1], abs=0.1)


def _on_gpus(rank: int, world_size: int, precision: str) -> list[float]:
    from phalanx.dist.world import init_world

    torch.cuda.set_device(rank)
    world = init_world()
    engine, weights = runs.run("accelerate", dtype=F32, precision=precision, max_grad_norm=1.0)
    assert engine.accelerator.device == world.device
    return weights
