"""A run saves itself and goes on where it stopped, or says why it cannot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

from phalanx.dist.checkpoints import (
    CheckpointError,
    CheckpointManager,
    NotPlainError,
    PlanMismatchError,
    Restored,
)
from phalanx.dist.state_dict import KeysDifferError, load_state_dict
from tests.dist.checkpoint_runs import OPTIMIZERS, Run, manager


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


def test_a_value_may_be_a_function_which_is_called_when_a_save_is_due(tmp_path: Path) -> None:
    run = Run(tmp_path)
    checkpoints = CheckpointManager(
        tmp_path, model=run.model, optimizer=run.optimizer, loader=run.loader, every_steps=2
    )
    called: list[int] = []

    def hidden() -> list[float]:
        called.append(run.loader.progress.step)
        return [0.1, 0.2]

    with checkpoints:
        for batch in run.loader:
            run.step(batch)
            checkpoints.maybe_save(hidden=hidden, best=1)
    assert called == [step for step in range(1, run.loader.progress.step + 1) if step % 2 == 0]
    assert checkpoints.restore().values == {"hidden": [0.1, 0.2], "best": 1}


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


def test_a_checkpoint_of_another_model_is_refused_by_names_and_shapes(tmp_path: Path) -> None:
    manager(tmp_path, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).save()
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    before = model[0].weight.clone()
    with pytest.raises(KeysDifferError, match=r"step-1: 4 of .*\n.*0\.weight \[4, 3\] -> \[5, 3\]"):
        manager(tmp_path, model).restore()
    assert torch.equal(model[0].weight, before)
    with pytest.raises(KeysDifferError, match=r"missing: '2\.weight', '2\.bias'"):
        manager(tmp_path, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))).restore()


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
