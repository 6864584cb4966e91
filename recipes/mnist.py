"""Handwritten digits, or clothes, on any number of ranks: settings, model and loop of a whole training run.

    phalanx run --nproc-per-node 2 mnist                        # the digits that come along
    phalanx run --nproc-per-node 2 mnist --data fashion         # Fashion-MNIST from disk
    torchrun --nproc-per-node 2 -m phalanx.recipes.mnist        # the same job; so do srun and plain python

`phalanx recipes copy mnist my_mnist.py` gives you this file to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from phalanx.recipes.optimization import OptimizationSettings
from phalanx.recipes.settings import SettingsError, require, run_recipe

if TYPE_CHECKING:
    from torch import nn

    from phalanx.dist import ShardLoader
    from phalanx.recipes.datasets import ImageSets

#: What a setting left at None becomes. The digits are 1,797 small images: many cheap epochs, and augmentation.
CLOTHES: dict[str, Any] = {
    "epochs": 5,
    "global_batch_size": 256,
    "lr": 6e-3,
    "augment": "none",
    "label_smoothing": 0.0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "epochs": 40,
        "global_batch_size": 64,
        "lr": 3e-3,
        "augment": "affine",
        "label_smoothing": 0.1,
    },
    "mnist": CLOTHES,
    "fashion": CLOTHES,
    "kmnist": CLOTHES,
    "emnist-letters": CLOTHES,
    "emnist-balanced": CLOTHES,
    "emnist-byclass": CLOTHES,
    "emnist-bymerge": CLOTHES,
    "emnist-digits": CLOTHES,
    "emnist-mnist": CLOTHES,
    "fake": CLOTHES | {"epochs": 2},
}


@dataclass(frozen=True, kw_only=True)
class MnistSettings(OptimizationSettings):
    """Train a small convolutional network on MNIST or a set like it, or on the digits that come along."""

    # auto: mnist if it is in --data-dir, else digits
    data: Literal[
        "auto", "digits", "mnist", "fashion", "kmnist", "emnist-letters", "emnist-balanced", "emnist-byclass",
        "emnist-bymerge", "emnist-digits", "emnist-mnist", "fake",
    ] = "auto"  # fmt: skip
    # folder of IDX files, flat or as torchvision lays them out
    data_dir: str = "data"
    # fetch the data set into --data-dir, once per node
    download: bool = False
    # share of the training images that is held out for validation
    validation_fraction: float = 0.1
    # the optimizer's pull of the weights towards zero
    weight_decay: float | None = 1e-4
    # share of the target that is spread over all classes; None: depends on the data
    label_smoothing: float | None = None
    # of alpha dropout before the linear layers
    dropout: float = 0.1
    # of --strategy deepspeed: 0 to 3, how much of the training's state is in shards; None: 0
    zero_stage: Literal[0, 1, 2, 3] | None = None
    # random change of each training image; None: affine for digits, else none
    augment: Literal["none", "shift", "affine"] | None = None

    def check(self) -> None:
        """Raise a SettingsError for a value out of range."""
        super().check()
        require(
            0 <= self.validation_fraction < 1,
            "validation_fraction",
            self.validation_fraction,
            "at least 0, below 1",
        )
        require(
            0 <= (self.label_smoothing or 0) < 1,
            "label_smoothing",
            self.label_smoothing,
            "at least 0, below 1",
        )
        require(0 <= self.dropout < 1, "dropout", self.dropout, "at least 0, below 1")
        if self.zero_stage is not None and self.strategy != "deepspeed":
            raise SettingsError(
                f"--zero-stage {self.zero_stage} with --strategy {self.strategy}: it would be ignored.\n"
                "Fix: --strategy deepspeed, or leave out --zero-stage"
            )
        self.check_judged(self.validation_fraction > 0, "--validation-fraction 0.1")

    def resolved(self, data: str) -> MnistSettings:
        """For this data set: with every None filled in that depends on it."""
        chosen = {name: value for name, value in DEFAULTS[data].items() if getattr(self, name) is None}
        return dataclasses.replace(self, data=data, **chosen)  # type: ignore[arg-type]


def network(side: int, classes: int, dropout: float) -> nn.Module:
    """Two convolutions with batch norm, two linear layers with alpha dropout, for images of ``side`` x ``side``."""
    import torch
    from torch import nn

    large = side > 8
    channels = (16, 48) if large else (32, 64)
    pool = nn.MaxPool2d(2)
    model = nn.Sequential(
        nn.Conv2d(1, channels[0], 3, padding=1, bias=False),
        pool,  # before batch norm and activation, which keep the order of values: the same maxima, a quarter of the work
        nn.BatchNorm2d(channels[0]),
        nn.SELU(),
        nn.Conv2d(channels[0], channels[1], 3, padding=1, bias=False),
        pool if large else nn.Identity(),
        nn.BatchNorm2d(channels[1]),
        nn.SELU(),
        nn.Flatten(),
        nn.AlphaDropout(dropout),
        nn.Linear(channels[1] * (side // (4 if large else 2)) ** 2, 128),
        nn.SELU(),
        nn.AlphaDropout(dropout),
        nn.Linear(128, classes),
    )
    return model.to(memory_format=torch.channels_last)  # convolutions on CPUs take two thirds of the time


def loaders(settings: MnistSettings, sets: ImageSets) -> tuple[ShardLoader, ShardLoader, ShardLoader]:
    """For training, validation and test. Collective."""
    from phalanx.dist import ShardLoader
    from phalanx.recipes import datasets

    train_set, collate = datasets.augmented(sets.train, settings.augment or "none")
    train_loader = ShardLoader(
        train_set,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.micro_batch_size,
        shuffle=True,
        seed=settings.seed,
        num_workers=settings.num_workers,
        collate_fn=collate,
    )
    validation_loader, test_loader = (
        ShardLoader(
            part,
            global_batch_size=8000,
            micro_batch_size=1000,
            virtual_ranks=settings.virtual_ranks,
            collate_fn=datasets.whole_batch,
        )
        for part in (sets.validation, sets.test)
    )
    return train_loader, validation_loader, test_loader


def train(settings: MnistSettings) -> float:
    """Train, or go on training, then test; returns the test accuracy. Collective."""
    from torch.nn import functional as F

    from phalanx.dist import CheckpointManager, init_world, parallelize, seed_everything
    from phalanx.recipes import datasets, runs, schedules, training
    from phalanx.recipes.confusion import Confusion
    from phalanx.recipes.display import Display
    from phalanx.recipes.early_stop import EarlyStop
    from phalanx.recipes.ledger import Ledger
    from phalanx.recipes.metrics_log import MetricsLog, StepMetrics
    from phalanx.recipes.optimizers import initialise, optimizer_for
    from phalanx.recipes.step_profile import StepProfile

    # The ranks, the data, and the folder of this run.
    world = init_world()
    training.share_cores(world)
    settings = settings.resolved(datasets.locate(settings.data, settings.data_dir, settings.download))
    assert settings.epochs is not None
    sets = datasets.load(
        settings.data, settings.data_dir, settings.download, settings.validation_fraction, settings.seed
    )
    run = training.from_rank_zero(lambda: runs.choose_run(settings, recipe="mnist"))

    # Loaders, model and checkpoints; a ValueError here is about what was asked for.
    with training.settings_errors():
        train_loader, validation_loader, test_loader = loaders(settings, sets)
        # The same weights on any number of ranks; later random numbers are the loader's to seed.
        seed_everything(settings.seed)
        made = network(sets.side, sets.classes, settings.dropout)
        initialise(made, settings.init)
        stage: dict[str, Any] = {} if settings.zero_stage is None else {"zero_stage": settings.zero_stage}
        model, optimizer, engine = parallelize(
            made,
            optimizer_for(settings),
            settings.strategy,
            precision=settings.precision,
            virtual_ranks=settings.virtual_ranks,
            loader=train_loader,
            **stage,
        )
        scheduler = schedules.scheduler_for(optimizer, settings, train_loader.plan.steps_per_epoch)
        checkpoints = CheckpointManager(
            run.checkpoints,
            model=model,
            optimizer=optimizer,
            loader=train_loader,
            scheduler=scheduler,
            every_steps=settings.checkpoint_every_steps,
        )
        restored = checkpoints.restore()
        stopping = EarlyStop(settings.patience, checkpoints, run.path, restored.values.get("stopping"))
        # What whoever shows the checkpoint an image has to know: see the recipe gradcam.
        about = {
            "recipe": "mnist",
            "data": settings.data,
            "network": [sets.side, sets.classes, settings.dropout],
            "side": sets.side,
            "mean": [sets.train.mean],
            "std": [sets.train.std],
            "classes": list(sets.names),
        }

    # The loop. What it tells goes to metrics.jsonl and the display, from rank 0.
    writes = world.is_rank_zero and not settings.test_only
    log = MetricsLog(run, train_loader.progress, writes=writes)
    step_metrics = StepMetrics(log, train_loader, every=settings.log_every_steps)
    ledger = Ledger(settings.ledger, world.rank)
    profile = StepProfile(settings.profile, run.path, world.rank)
    with Display(settings.epochs, speaks=world.is_rank_zero, profile=profile) as display:
        display.start(run, sets.described())
        for epoch in range(restored.epoch, 0 if settings.test_only else settings.epochs):
            if stopping.is_over:
                break
            for images, labels in display.watch(train_loader, epoch):
                with engine.micro_step(train_loader.key, last=train_loader.is_last_micro):
                    outputs = model(images)
                    smoothing = settings.label_smoothing or 0.0
                    loss_sum = F.cross_entropy(outputs, labels, reduction="sum", label_smoothing=smoothing)
                    engine.backward(loss_sum, train_loader.global_count)
                ledger.note(train_loader)
                step_metrics.update(outputs, labels)
                if train_loader.is_last_micro:
                    engine.step()
                    scheduler.step()
                    checkpoints.maybe_save(images=about, stopping=stopping.state)
            validation = training.evaluate(model, validation_loader)
            log.write("validation", epoch + 1, train_loader.progress.step, validation)
            display.epoch_done(epoch, validation)
            schedules.judge(scheduler, validation["loss"])
            stopping.judge(validation["loss"], epoch, train_loader.progress.step)
            checkpoints.save(images=about, stopping=stopping.state)
            stopping.keep()
        kept = stopping.take_best(model=model, optimizer=optimizer, loader=train_loader, scheduler=scheduler)
        if kept is not None:
            display.say(kept)
        confusion = Confusion(sets.names)
        test = training.evaluate(model, test_loader, confusion)
        log.write("test", train_loader.progress.epoch, train_loader.progress.step, test, confusion)
        log.close()
        ledger.close()
        title = f"{settings.data} on {world.world_size} rank{'s' * (world.world_size > 1)}"
        display.finish(run, checkpoints.latest(), test, title=title, tested_only=settings.test_only)
    return test["accuracy"]


def main(argv: Sequence[str] | None = None) -> None:
    """The recipe's command line."""
    run_recipe(MnistSettings, train, argv, prog="mnist")


if __name__ == "__main__":
    main()
