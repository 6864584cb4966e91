"""The deepspeed engine on gloo: ZeRO 0 to 3 beside one process, its configuration, its state."""

from __future__ import annotations

import copy
import doctest
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from phalanx.dist.engines import deepspeed_config
from phalanx.dist.engines.deepspeed_config import clip_norm, make_config, precision_of, read_config
from phalanx.dist.engines.single import SingleEngine
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize
from phalanx.dist.wrappers import unwrap
from tests.dist import engine_runs as runs
from tests.ranks import RankRunner

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install 'phalanx[deepspeed]')"
)
F32 = torch.float32


def _adamw(params: Any) -> AdamW:
    return AdamW(params, lr=1e-2, weight_decay=0.1)


# name: how it trains, and the reference that it must equal
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": ({"make": runs.sgd}, {}),
    "adamw, accumulated": ({"make": _adamw, "micro": 2}, {"make": _adamw}),
    "clip": ({"max_grad_norm": 0.5}, {"clip": 0.5}),
}


def _stages(rank: int, world_size: int, stages: list[int]) -> list[Any]:
    found = []
    for stage in stages:
        results: dict[str, Any] = {}
        for name, (options, _) in CASES.items():
            engine, results[name] = runs.run("deepspeed", dtype=F32, zero_stage=stage, **options)
            assert engine.model.zero_optimization_stage() == stage
            if name == "clip":
                with engine.micro_step():
                    engine.backward(engine.model(torch.ones(1, 5)).square().sum(), world_size)
                results["norm"] = engine.step().grad_norm
        results["resumed"] = _resumed(stage)
        if stage:
            results["bf16"] = runs.run("deepspeed", dtype=F32, zero_stage=stage, precision="bf16")[1]
        results["stand-in"] = _stand_in(stage)
        found.append(results)
    if 3 in stages:
        found.append(_refusals())
    return found


def _resumed(stage: int) -> list[Any]:
    """Two epochs; and one, its state put into a fresh engine of another stage, and another one."""
    loader = ShardLoader(runs.data(F32), global_batch_size=runs.BATCH, shuffle=True)
    model = runs.net(F32)
    optimizer = runs.adam(model.parameters())
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    model, given, engine = parallelize(model, optimizer, "deepspeed", zero_stage=stage, loader=loader)
    assert given is optimizer
    runs.train(engine, loader, epochs=1)
    scheduler.step()
    saved, at = copy.deepcopy(engine.export()), loader.state_dict()
    assert list(saved["model"]) == list(runs.net().state_dict())
    runs.train(engine, loader, epochs=1)
    after = runs.weights(engine)
    found = [saved["optimizer"]["param_groups"][0]["lr"]]
    for other in {stage, 2 if stage != 2 else 3}:
        fresh_loader = ShardLoader(runs.data(F32), global_batch_size=runs.BATCH, shuffle=True)
        fresh = runs.net(F32)
        nn.init.zeros_(fresh[0].weight)
        *_, fresh_engine = parallelize(fresh, runs.adam, "deepspeed", zero_stage=other, loader=fresh_loader)
        fresh_engine.load(saved)
        fresh_loader.load_state_dict(at)
        runs.train(fresh_engine, fresh_loader, epochs=1)
        again = runs.weights(fresh_engine)
        found.append(max(abs(a - b) for a, b in zip(after, again, strict=True)))
    return found


def _stand_in(stage: int) -> list[float]:
    """1 sample on 2 ranks; the loss of the rank without any is NaN."""
    loader = ShardLoader(TensorDataset(runs.data(F32).tensors[0][:1]), global_batch_size=1, shuffle=True)
    model, _, engine = parallelize(runs.net(F32), runs.sgd, "deepspeed", zero_stage=stage, loader=loader)
    (x,) = next(iter(loader))
    with engine.micro_step():
        poison = float("nan") if loader.local_count == 0 else 1.0
        engine.backward(model(x).square().sum() * poison, loader.global_count)
    engine.step()
    return runs.weights(engine)


def _refusals() -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain = runs.net(F32)
    model, optimizer, engine = parallelize(plain, runs.sgd, "deepspeed", zero_stage=2)
    found["unwrapped"] = unwrap(model) is plain
    for act in (lambda: model(torch.ones(1, 5)).sum().backward(), optimizer.step):
        with pytest.raises(RuntimeError, match=r"plain loss.backward\(\) or optimizer.step\(\)"):
            act()
    with engine.micro_step():
        engine.backward(model(torch.ones(1, 5)).sum(), 2)
    with pytest.raises(RuntimeError, match="inside a step"):
        engine.load(engine.export())
    engine.step()
    with pytest.warns(UserWarning, match="parallel already"):
        found["again"] = parallelize(model, optimizer, "deepspeed") == (model, optimizer, engine)
    with pytest.raises(ValueError, match=r"a OptimizedModule: DeepSpeed wraps the plain module"):
        parallelize(torch.compile(runs.net(F32), backend="eager"), SGD, "deepspeed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another one in the config"):
        parallelize(
            runs.net(F32), SGD, "deepspeed", config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        )
    own = parallelize(
        runs.net(F32),
        None,
        "deepspeed",
        config={"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": 1}},
    )
    found["own"] = [type(own[1]).__name__, own[1].param_groups[0]["lr"]]
    with pytest.raises(ValueError, match=r"precision='bf16' with zero_stage=0"):
        parallelize(runs.net(F32), SGD, "deepspeed", zero_stage=0, precision="bf16")
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        with pytest.raises(ValueError, match="cannot compute in fp16"):
            parallelize(runs.net(F32), SGD, "deepspeed", zero_stage=2, precision="fp16")
        return found
    *_, half = parallelize(runs.net(F32), runs.sgd, "deepspeed", zero_stage=2, precision="fp16")
    for step in range(2):
        with half.micro_step():
            loss = half.model(torch.ones(1, 5)).square().sum()
            half.backward(loss * float("inf") if step == 0 else loss, 2)
        found[f"fp16 {step}"] = half.step().skipped
    state = half.export()
    scale = state["scaler"]["scale"]
    half.load({**state, "scaler": {"scale": 2 * scale}})
    found["scale"] = half.scaler.state_dict()["scale"] / scale
    return found


@needs_deepspeed
@pytest.mark.parametrize("stages", [[0, 1], [2, 3]])
def test_weights_are_those_of_one_process(
    run_ranks: RankRunner, capfd: pytest.CaptureFixture[str], stages: list[int]
) -> None:
    expected = {name: runs.reference(dtype=F32, **options) for name, (_, options) in CASES.items()}
    model = runs.net(F32)
    model(runs.data(F32).tensors[0][:1]).square().sum(1).mean().backward()
    runs.sgd(model.parameters()).step()
    stood_in = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).tolist()
    every = run_ranks(_stages, stages, world_size=2, timeout_s=170)
    for results in every:
        for stage, found in zip(stages, results, strict=False):
            for name, weights in expected.items():
                assert found[name] == pytest.approx(weights, rel=0, abs=2e-5), (stage, name)
            assert found["norm"] > 0
            lr, *distances = found["resumed"]
            assert lr == 0.5e-2
            assert max(distances) < 1e-6, stage
            assert found.get("bf16", expected["sgd"]) == pytest.approx(expected["sgd"], rel=0, abs=0.05)
            assert found["stand-in"] == pytest.approx(stood_in, rel=0, abs=1e-6), stage
        if 3 in stages:
            refused = results[-1]
            assert refused["unwrapped"] is True
            assert refused["again"] is True
            assert refused["own"] == ["SGD", 0.5]
            assert refused.get("scale", 2.0) == 2.0
            assert (refused.get("fp16 0", True), refused.get("fp16 1", False)) == (True, False)
    assert every[0] == every[1]
    output = capfd.readouterr()
    assert "DeepSpeed" not in output.out + output.err
    assert "deprecated" not in output.err


# ---- without DeepSpeed


def test_one_process_gets_its_own_model_back() -> None:
    model = runs.net()
    same, _, engine = parallelize(
        model, runs.sgd, "deepspeed", config={"gradient_clipping": 0.5, "bf16": {"enabled": True}}
    )
    assert same is model
    assert type(engine) is SingleEngine
    assert engine.max_grad_norm == 0.5
    assert engine.precision == "bf16"


def _missing(rank: int, world_size: int) -> str:
    sys.modules["deepspeed"] = None  # type: ignore[assignment]
    with pytest.raises(ImportError) as raised:
        parallelize(runs.net(), runs.sgd, "deepspeed", zero_stage=1)
    return str(raised.value)


def test_a_missing_package_is_one_line(run_ranks: RankRunner) -> None:
    (message,) = run_ranks(_missing, world_size=1)
    assert message == "strategy='deepspeed' needs DeepSpeed.\nFix: pip install 'phalanx[deepspeed]'"


def test_what_deepspeed_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert doctest.testmod(deepspeed_config).failed == 0
    path = tmp_path / "zero.json"
    theirs = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": False},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 1.5,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    }
    path.write_text(json.dumps(theirs))
    asked = read_config(path, None)
    assert asked["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
    norm = clip_norm(asked, None)
    assert norm == 1.5
    with caplog.at_level("INFO"):
        config = make_config(asked, world_size=4, precision="bf16", max_grad_norm=norm)
    assert "{'train_batch_size': 64} of the DeepSpeed config" in caplog.text
    assert config["train_batch_size"] == 4
    assert config["train_micro_batch_size_per_gpu"] == config["gradient_accumulation_steps"] == 1
    assert config["gradient_clipping"] == 1.5
    assert config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert make_config({}, world_size=1, precision="fp32", max_grad_norm=None)["gradient_clipping"] == 0.0
    assert read_config({}, None)["zero_optimization"] == {"stage": 0}
    assert read_config(None, None)["zero_optimization"] == {"stage": 1}
    assert precision_of({"fp16": {"enabled": True}}, "fp32") == "fp16"
    assert theirs["train_batch_size"] == 64


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"zero_stage": 4}, "zero_stage=4: ZeRO has the stages"),
        ({"zero_optimization": {"stage": 1}}, {"zero_stage": 2}, "zero_stage=2, but the config says stage 1"),
        ({"zero_optimization": {"reduce_bucket_size": 1}}, {}, 'has no "stage"'),
        ({"zero_optimization": True}, {}, "not a section"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, '"scheduler" would be stepped by DeepSpeed'),
        ({"fp16": {"enabled": True}}, {"precision": "bf16"}, "precision='bf16', but the config enables fp16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {}, "both bf16 and fp16"),
        ({"gradient_clipping": 2.0}, {"max_grad_norm": 1.0}, "the config says gradient_clipping=2.0"),
        ("nowhere.json", {}, "config='nowhere.json': No such file"),
        (__file__, {}, "is no JSON"),
    ],
)
def test_what_is_refused(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(runs.net(), runs.sgd, "deepspeed", config=config, **options)


@pytest.mark.gpu
@needs_deepspeed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_gpus(run_ranks: RankRunner, stage: int, precision: str) -> None:
    first, second = run_ranks(
        _on_gpus, stage, precision, world_size=2, backend="cpu:gloo,cuda:nccl", timeout_s=170
    )
    assert first == second
    assert first[-1] < first[0]


def _on_gpus(rank: int, world_size: int, stage: int, precision: str) -> list[float]:
    from phalanx.dist.world import all_reduce_sum, init_world

    torch.cuda.set_device(rank)
    init_world()
    loader = ShardLoader(runs.data(F32), global_batch_size=runs.BATCH, shuffle=True)
    model, _, engine = parallelize(
        runs.net(F32),
        runs.adam,
        "deepspeed",
        loader=loader,
        precision=precision,
        zero_stage=stage,
        max_grad_norm=1.0,
    )  # type: ignore[arg-type]
    losses = []
    for _ in range(10):
        total = 0.0
        for x, y in loader:
            with engine.micro_step():
                loss = F.cross_entropy(model(x), y, reduction="sum")
                engine.backward(loss, loader.global_count)
            engine.step()
            total += float(loss) if loader.local_count else 0.0
        losses.append(float(all_reduce_sum(total)))
    return losses
