"""A run saves itself and goes on where it stopped, or says why it cannot."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

from phalanx.dist import checkpoint_files as files
from phalanx.dist import checkpoint_writing
from phalanx.dist.checkpoints import (
    CheckpointError,
    CheckpointManager,
    CheckpointWarning,
    DamagedCheckpointsError,
    NotPlainError,
    OptimizerMismatchError,
    PlanMismatchError,
    Restored,
)
from phalanx.dist.state_dict import KeysDifferError, PickledCodeError, load_state_dict
from tests.dist.checkpoint_runs import OPTIMIZERS, Run


def manager(folder: Path, model: nn.Module, optimizer: Any = None, **options: Any) -> CheckpointManager:
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    return CheckpointManager(folder, model=model, optimizer=optimizer, **options)


def flip(path: Path, place: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writing, "PAUSE_S", 0.01)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    "stop_at", [3, 4, 6], ids=["within an epoch", "at an epoch's last step", "in the second epoch"]
)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    tmp_path: Path, optimizer: str, stop_at: int
) -> None:
    straight = Run(tmp_path / "straight", optimizer)
    straight.train(10)
    first = Run(tmp_path / "c", optimizer)
    first.train(stop_at)
    first.checkpoints.save(best=0.5)
    second = Run(tmp_path / "c", optimizer)
    restored = second.checkpoints.restore()
    assert restored.step == stop_at
    assert restored.values == {"best": 0.5}
    assert restored.path == tmp_path / "c" / f"step-{stop_at}"
    second.train(10)
    assert second.loader.progress == straight.loader.progress
    assert second.weights() == straight.weights()
    assert second.scheduler.get_last_lr() == straight.scheduler.get_last_lr()


def test_epochs_are_not_counted_twice_after_a_resume(tmp_path: Path) -> None:
    first = Run(tmp_path)
    for _ in range(7):
        for batch in first.loader:
            first.step(batch)
    first.checkpoints.save()
    steps_per_epoch = first.loader.plan.steps_per_epoch
    second = Run(tmp_path)
    restored = second.checkpoints.restore()
    assert (restored.epoch, restored.step) == (7, 7 * steps_per_epoch)
    for epoch in range(restored.epoch, 8):
        assert epoch == 7
        for batch in second.loader:
            second.step(batch)
    assert (second.loader.progress.epoch, second.loader.progress.step) == (8, 8 * steps_per_epoch)


def test_an_empty_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert Run(tmp_path / "new").checkpoints.restore() == Restored(0, 0, {}, None)
    assert Run(tmp_path / "new").checkpoints.latest() is None


def test_weights_load_without_phalanx_under_plain_names(tmp_path: Path) -> None:
    model = nn.DataParallel(torch.compile(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))))
    path = manager(tmp_path, model).save()
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    plain.load_state_dict(load_file(path / "model.safetensors"))
    assert torch.equal(plain[0].weight, model.state_dict()["module._orig_mod.0.weight"])
    other = nn.DataParallel(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
    load_state_dict(other, path)
    assert torch.equal(other.module[0].weight, plain[0].weight)
    assert sorted(os.listdir(path)) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model = make()
    path = manager(tmp_path, model).save()
    assert list(load_file(path / "model.safetensors")) == ["embed.weight"]
    other = make()
    manager(tmp_path, other).restore()
    assert torch.equal(other["head"].weight, model["embed"].weight)
    assert other["head"].weight is other["embed"].weight
    untied = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    assert load_state_dict(untied, path).missing == []
    assert torch.equal(untied["head"].weight, model["embed"].weight)


def test_optimizer_state_keeps_its_precision_and_the_parameters_layout(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Conv2d(3, 4, 3).to(torch.bfloat16, memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make()
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn_like(parameter, dtype=torch.float32),
            "exp_avg_sq": torch.rand_like(parameter, dtype=torch.float32),
        }
    manager(tmp_path, model, optimizer).save()
    other, resumed = make()
    manager(tmp_path, other, resumed).restore()
    for name, parameter in model.named_parameters():
        there = resumed.state[other.get_parameter(name)]
        for entry, value in optimizer.state[parameter].items():
            assert torch.equal(there[entry], value)
            assert there[entry].dtype == value.dtype
            assert there[entry].stride() == value.stride()


def test_an_optimizer_with_lists_and_numbers_in_its_state_comes_back(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.LBFGS, steps: int) -> list[float]:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = (model(torch.ones(1, 3)) - 2).pow(2).sum()
            value.backward()
            return value

        return [optimizer.step(loss).item() for _ in range(steps)]

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    run(model, optimizer, 2)
    manager(tmp_path, model, optimizer).save()
    other = nn.Linear(3, 1)
    resumed = torch.optim.LBFGS(other.parameters(), lr=0.1, max_iter=2)
    manager(tmp_path, other, resumed).restore()
    assert run(other, resumed, 3) == run(model, optimizer, 3)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("how", ["flipped bit", "cut", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, name: str, how: str
) -> None:
    run = Run(tmp_path)
    run.train(4, save_each=2)
    path = tmp_path / "step-4" / name
    if how == "flipped bit":
        flip(path)
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    assert len(run.checkpoints.verify()) == 1
    other = Run(tmp_path)
    with pytest.warns(CheckpointWarning, match=f"step-4 .*{name}.*Using step-2"):
        restored = other.checkpoints.restore()
    assert restored.path == tmp_path / "step-2"
    assert len(restored.damaged) == 1
    other.train(4, save_each=2)
    assert other.checkpoints.verify() == [], "the damaged one is replaced when its step comes round again"
    assert other.weights() == run.weights()


def test_when_all_checkpoints_are_damaged_the_run_does_not_start_over(tmp_path: Path) -> None:
    Run(tmp_path).train(0)
    run = Run(tmp_path)
    run.train(4, save_each=2)
    for step in (2, 4):
        flip(tmp_path / f"step-{step}" / "model.safetensors")
    with pytest.raises(DamagedCheckpointsError, match="all 2 checkpoints are damaged"):
        Run(tmp_path).checkpoints.restore(else_from=run.model.state_dict())


def test_old_checkpoints_go_only_once_the_new_one_is_there(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    run.train(5, save_each=1)
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-4", "step-5"]
    everything = Run(tmp_path / "all", keep=-1)
    everything.train(5, save_each=1)
    assert len(list((tmp_path / "all").glob("step-*"))) == 5


@pytest.mark.parametrize(
    "options",
    [{"keep": 0}, {"keep": -2}, {"every_steps": 0}, {"every_s": 0}, {"loader": [1, 2]}, {"keep": True}],
)
def test_settings_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        manager(tmp_path, nn.Linear(1, 1), **options)


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    with pytest.raises(ValueError, match="a file is where"):
        manager(tmp_path / "c", nn.Linear(1, 1))


def test_an_optimizer_of_another_model_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not one of the model's"):
        manager(tmp_path, nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1))


def test_without_a_loader_saves_are_epochs_and_maybe_saves_are_steps(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, nn.Linear(1, 1))
    for epoch in range(checkpoints.restore().epoch, 2):
        checkpoints.save(seen=epoch)
    model = nn.Linear(1, 1)
    resumed = manager(tmp_path, model, every_steps=2)
    assert resumed.restore() == Restored(2, 2, {"seen": 1}, tmp_path / "step-2")
    assert [resumed.maybe_save() for _ in range(4)] == [False, True, False, True]
    assert resumed.save() == tmp_path / "step-6"
    resumed.close()
    last = manager(tmp_path, model).restore()
    assert (last.epoch, last.step) == (3, 6)


def test_maybe_save_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = manager(tmp_path, nn.Linear(1, 1), every_s=30.0)
    assert not checkpoints.maybe_save()
    monkeypatch.setattr(checkpoints, "_saved_at", checkpoints._saved_at - 31)
    assert checkpoints.maybe_save()
    assert not checkpoints.maybe_save()
    checkpoints.close()


def test_a_value_that_needs_pickle_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, nn.Linear(1, 1))
    with pytest.raises(NotPlainError, match=r"save\(config=\.\.\.\) is a "):
        checkpoints.save(config=object())
    assert os.listdir(tmp_path) == [".lock"]


def test_a_write_that_fails_twice_is_tried_a_third_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    write_json, failures = files.write_json, [errno.EIO, errno.ESTALE]

    def shaky(path: Path, value: Any) -> files.FileRecord:
        if failures:
            raise OSError(failures.pop(), "a hiccup")
        return write_json(path, value)

    monkeypatch.setattr(files, "write_json", shaky)
    run.train(1)
    path = run.checkpoints.save()
    assert files.find_problems(path) == []
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-1"]


@pytest.mark.parametrize(("number", "tries"), [(errno.EIO, 3), (errno.ENOSPC, 1)])
def test_a_write_that_goes_on_failing_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, tries: int
) -> None:
    run = Run(tmp_path)
    run.train(2, save_each=2)
    calls = []

    def failing(path: Path, value: Any) -> files.FileRecord:
        calls.append(path)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "write_json", failing)
    run.train(3)
    with pytest.raises(CheckpointError, match=rf"{os.strerror(number)}(?s:.*)intact \(newest: .*step-2\)"):
        run.checkpoints.save()
    assert len(calls) == tries
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-2"]
    assert run.checkpoints.verify() == []


def test_a_checkpoint_of_another_model_is_refused_by_names_and_shapes(tmp_path: Path) -> None:
    manager(tmp_path, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).save()
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    before = model[0].weight.clone()
    with pytest.raises(KeysDifferError, match=r"step-1: 4 of .*\n.*0\.weight \[4, 3\] -> \[5, 3\]"):
        manager(tmp_path, model).restore()
    assert torch.equal(model[0].weight, before)
    with pytest.raises(KeysDifferError, match=r"missing: '2\.weight', '2\.bias'"):
        manager(tmp_path, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))).restore()


def test_other_optimized_parameters_are_named_or_start_fresh_on_request(tmp_path: Path) -> None:
    def make(*layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [{"params": list(model[layer].parameters()), "lr": 0.1 + layer} for layer in layers]
        return model, torch.optim.Adam(groups)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    model, optimizer = make(0, 1)
    step(model, optimizer)
    manager(tmp_path, model, optimizer).save()
    other, resumed = make(1, 2)
    checkpoints = manager(tmp_path, other, resumed)
    with pytest.raises(
        OptimizerMismatchError, match=r"without saved state: '2.weight', '2.bias'\n.*'0.weight', '0.bias'"
    ):
        checkpoints.restore()
    assert not resumed.state
    checkpoints.restore(partial_optimizer=True)
    assert torch.equal(resumed.state[other[1].weight]["exp_avg"], optimizer.state[model[1].weight]["exp_avg"])
    assert other[2].weight not in resumed.state
    assert torch.equal(other[2].weight, model[2].weight)
    assert [group["lr"] for group in resumed.param_groups] == [1.1, 2.1]


def test_groups_in_another_order_get_their_own_options(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(layer.parameters()), "lr": 0.5 + number} for number, layer in enumerate(model)]
    manager(tmp_path, model, torch.optim.SGD(groups)).save()
    resumed = torch.optim.SGD([{"params": list(layer.parameters()), "lr": 9.0} for layer in reversed(model)])
    manager(tmp_path, model, resumed).restore()
    assert [group["lr"] for group in resumed.param_groups] == [1.5, 0.5]
    with pytest.raises(OptimizerMismatchError, match="different 'lr'"):
        manager(tmp_path, model, torch.optim.SGD(model.parameters(), lr=9.0)).restore()


def test_another_optimizer_is_refused_and_adam_may_become_adamw(tmp_path: Path) -> None:
    run = Run(tmp_path, "adam")
    run.train(2, save_each=2)
    with pytest.raises(OptimizerMismatchError, match="optimizer is Adam, this run's is SGD"):
        Run(tmp_path, "sgd").checkpoints.restore()
    assert Run(tmp_path, "adamw").checkpoints.restore().step == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"loader_options": {"global_batch_size": 7}}, "global_batch_size 6 -> 7"),
        ({"loader_options": {"seed": 1}}, "seed 0 -> 1"),
        ({"num_items": 23}, "num_items 22 -> 23"),
    ],
)
def test_another_plan_is_refused_with_both_values(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    Run(tmp_path).checkpoints.save()
    with pytest.raises(PlanMismatchError, match=named):
        Run(tmp_path, **change).checkpoints.restore()
    assert Run(tmp_path, **change).checkpoints.restore(other_plan=True).epoch == 0


def tutorial(tmp_path: Path, kind: str = "adam") -> tuple[Path, Run]:
    """What a tutorial's script leaves behind, and the run that it left it in."""
    run = Run(tmp_path / "tutorial", kind)
    run.train(8)
    content = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "epoch": 2,
        "best": 0.75,
    }
    torch.save(content, tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt", run


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_tutorials_dict_starts_the_run_where_it_stopped(tmp_path: Path, kind: str) -> None:
    path, run = tutorial(tmp_path, kind)
    other = Run(tmp_path / "c", kind)
    restored = other.checkpoints.restore(else_from=path)
    assert (restored.epoch, restored.step, restored.path, restored.values) == (2, 8, None, {"best": 0.75})
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    run.train(11)
    other.train(11)
    assert other.weights() == run.weights()
    other.checkpoints.save()
    assert Run(tmp_path / "c", kind).checkpoints.restore(else_from=path).step == 11, "the folder comes first"


def test_bare_weights_start_a_run_from_its_beginning(tmp_path: Path) -> None:
    _, run = tutorial(tmp_path)
    other = Run(tmp_path / "c")
    assert other.checkpoints.restore(else_from=run.model.state_dict()) == Restored()
    assert other.weights() == run.weights()
    assert not other.optimizer.state
    run.checkpoints.save()
    other = Run(tmp_path / "d")
    other.checkpoints.restore(else_from=tmp_path / "tutorial" / "step-8")
    assert other.weights() == run.weights()


def test_a_starting_point_that_is_not_there_is_a_fresh_start_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(CheckpointWarning, match=r"checkpoint\.pt.*nothing there"):
        assert Run(tmp_path / "c").checkpoints.restore(else_from=tmp_path / "checkpoint.pt") == Restored()


def test_a_tutorials_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, _ = tutorial(tmp_path, "sgd")
    with pytest.raises(OptimizerMismatchError, match="momentum_buffer, which Adam cannot use"):
        Run(tmp_path / "c", "adam").checkpoints.restore(else_from=path)
    content = torch.load(path, weights_only=True)
    content["optimizer"]["param_groups"][0]["params"].pop()
    with pytest.raises(OptimizerMismatchError, match=r"saved with 3 parameters .* has 4"):
        Run(tmp_path / "c", "sgd").checkpoints.restore(else_from=content)


def test_a_starting_point_with_pickled_code_is_refused_without_running_it(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was-run"),)

    torch.save({"model": {}, "config": Payload()}, tmp_path / "evil.pt")
    with pytest.raises(PickledCodeError, match=r"posix\.mkdir"):
        Run(tmp_path / "c").checkpoints.restore(else_from=tmp_path / "evil.pt")
    assert not (tmp_path / "was-run").exists()


def test_a_scheduler_that_was_not_saved_starts_afresh_with_a_warning(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    manager(tmp_path, model).save()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(CheckpointWarning, match="no scheduler state"):
        manager(tmp_path, model, optimizer, scheduler=scheduler).restore()


@pytest.mark.parametrize(
    "make", ["StepLR", "MultiStepLR", "OneCycleLR", "SequentialLR", "LambdaLR", "ReduceLROnPlateau"]
)
def test_schedulers_of_torch_come_back(tmp_path: Path, make: str) -> None:
    from torch.optim import lr_scheduler as s

    model = nn.Linear(1, 1)

    def build() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        makers: dict[str, Any] = {
            "StepLR": lambda: s.StepLR(optimizer, 2),
            "MultiStepLR": lambda: s.MultiStepLR(optimizer, [2, 4]),
            "OneCycleLR": lambda: s.OneCycleLR(optimizer, 0.5, total_steps=9),
            "SequentialLR": lambda: s.SequentialLR(
                optimizer, [s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.5)], [3]
            ),
            "LambdaLR": lambda: s.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
            "ReduceLROnPlateau": lambda: s.ReduceLROnPlateau(optimizer, patience=0),
        }
        return optimizer, makers[make]()

    def advance(optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
        optimizer.step()
        scheduler.step(*([1.0] if make == "ReduceLROnPlateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's SequentialLR warns about itself
        optimizer, scheduler = build()
        for _ in range(3):
            advance(optimizer, scheduler)
        manager(tmp_path, model, optimizer, scheduler=scheduler).save()
        other, resumed = build()
        manager(tmp_path, model, other, scheduler=resumed).restore()
        assert [advance(other, resumed) for _ in range(4)] == [
            advance(optimizer, scheduler) for _ in range(4)
        ]


def test_a_model_with_plain_extra_state_comes_back(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        seen: Any = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    model = Counting(1, 1)
    model.seen = (3, "x")
    manager(tmp_path, model).save()
    other = Counting(1, 1)
    manager(tmp_path, other).restore()
    assert other.seen == (3, "x")


def test_the_loss_scale_of_fp16_comes_back(tmp_path: Path) -> None:
    from phalanx.dist.parallel import parallelize

    def make() -> tuple[CheckpointManager, Any]:
        model, optimizer, engine = parallelize(nn.Linear(2, 2), torch.optim.Adam, precision="fp16")
        return manager(tmp_path, model, optimizer), engine

    checkpoints, engine = make()
    state = engine.export()
    state["scaler"]["scale"] = 1024.0
    engine.load(state)
    checkpoints.save()
    other, resumed = make()
    other.restore()
    assert resumed.export()["scaler"]["scale"] == 1024.0


def test_nothing_is_saved_or_restored_within_a_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(2, save_each=2)
    x, y = next(iter(run.loader))
    with run.engine.micro_step():
        run.engine.backward(nn.functional.cross_entropy(run.model(x), y, reduction="sum"), 6)
    for call in (run.checkpoints.save, run.checkpoints.restore):
        with pytest.raises(CheckpointError, match="inside a step"):
            call()
    run.engine.step()
    assert run.checkpoints.restore().step == 2


def test_large_parameters_are_read_into_their_own_memory_and_modules_keep_their_say(tmp_path: Path) -> None:
    """Above 16 MB a tensor bypasses `load_state_dict`, unless its module wants to see it."""

    class Counting(nn.Linear):
        seen = 0

        def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
            self.seen += prefix + "weight" in state_dict
            super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]

    def build() -> nn.ModuleList:
        plain, half = nn.Linear(2048, 2100), nn.Linear(2048, 4200).bfloat16()
        turned = nn.Linear(2048, 2100)
        turned.weight = nn.Parameter(torch.randn(2048, 2100).t())
        return nn.ModuleList([plain, half, turned, Counting(2048, 2100), nn.Linear(3, 3)])

    first, second = build(), build()
    with CheckpointManager(tmp_path, model=first, optimizer=SGD(first.parameters(), lr=0.1)) as checkpoints:
        checkpoints.save()
    second[0].double()  # another dtype than the file's: converted on the way
    memory = [parameter.data_ptr() for parameter in second.parameters()]
    with CheckpointManager(tmp_path, model=second, optimizer=SGD(second.parameters(), lr=0.1)) as checkpoints:
        checkpoints.restore()
    assert [parameter.data_ptr() for parameter in second.parameters()] == memory
    for saved, loaded in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(saved.to(loaded.dtype), loaded)
    assert second[3].seen == 1
