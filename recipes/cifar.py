"""Small colour images, CIFAR-10 and CIFAR-100 first, on any number of ranks: fast to a good accuracy.

    phalanx run --nproc-per-node 2 cifar --data cifar10 --download
    phalanx run --nproc-per-node 2 cifar --data cifar100 --model resnet18 --augment trivial
    phalanx run --nproc-per-node 2 cifar --data fashion                   # Fashion-MNIST as 3 x 32 x 32
    torchrun --nproc-per-node 2 -m phalanx.recipes.cifar                  # the same job; so do srun and plain python

`phalanx recipes copy cifar my_cifar.py` gives you this file to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.recipes.optimization import OptimizationSettings, OptimizerName
from phalanx.recipes.settings import SettingsError, require, run_recipe

if TYPE_CHECKING:
    from phalanx.dist import TensorLoader
    from phalanx.recipes.color_images import ColorImages

#: What a setting left at None becomes, by the data and then by the model.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cifar10": {"global_batch_size": 512, "width": 64, "label_smoothing": 0.1},
    "cifar100": {"global_batch_size": 512, "width": 64, "label_smoothing": 0.1},
    "fashion": {"epochs": 12, "global_batch_size": 256, "width": 16, "lr": 0.2, "label_smoothing": 0.1},
    "fake": {"epochs": 3, "global_batch_size": 64, "width": 8, "lr": 0.05, "label_smoothing": 0.1},
}
MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "fast": {"epochs": 24, "lr": 0.4},
    "resnet18": {"epochs": 60, "lr": 0.3},
}


@dataclass(frozen=True, kw_only=True)
class CifarSettings(OptimizationSettings):
    """Train a residual network on CIFAR-10, CIFAR-100, or Fashion-MNIST as colour images."""

    rises: ClassVar[float] = 0.2
    usual_optimizer: ClassVar[OptimizerName] = "sgd"

    # cifar10, cifar100; fashion: Fashion-MNIST as 3 x 32 x 32; fake: made-up patterns
    data: Literal["cifar10", "cifar100", "fashion", "fake"] = "cifar10"
    # folder of the data, as torchvision lays it out
    data_dir: str = "data"
    # fetch the data into --data-dir, once per node
    download: bool = False
    # share of the training images that is held out for validation
    validation_fraction: float = 0.1
    # fast: eight convolutions; resnet18: ResNet-18 with a stem for small images
    model: Literal["fast", "resnet18"] = "fast"
    # channels of the first convolution, the last has eight times as many; None: depends on the data
    width: int | None = None
    # the optimizer's pull of the weights towards zero
    weight_decay: float | None = 5e-4
    # share of the target that is spread over all classes; None: depends on the data
    label_smoothing: float | None = None
    # crop: flip and crop; rand, trivial, auto: RandAugment, TrivialAugment, AutoAugment after them
    augment: Literal["none", "crop", "rand", "trivial", "auto"] = "crop"
    # side of the square that is blanked in each training image; 0: none is
    cutout: int = 8
    # draw every class equally often, however many images it has
    balanced: bool = False
    # judge an image and its mirror image, and take the mean
    test_flip: bool = True
    # let torch.compile fuse the network: its first steps take a minute, the others less than without
    compile: bool = False

    def check(self) -> None:
        """Raise a SettingsError for a value out of range."""
        super().check()
        fraction = self.validation_fraction
        require(0 <= fraction < 1, "validation_fraction", fraction, "at least 0, below 1")
        require(self.width is None or 1 <= self.width <= 1024, "width", self.width, "1 to 1024")
        smoothing = self.label_smoothing or 0.0
        require(0 <= smoothing < 1, "label_smoothing", smoothing, "at least 0, below 1")
        require(0 <= self.cutout <= 32, "cutout", self.cutout, "0 to 32")
        self.check_judged(self.validation_fraction > 0, "--validation-fraction 0.1")
        if self.compile and self.virtual_ranks is not None:
            raise SettingsError(
                "--compile with --virtual-ranks: what is compiled depends on the sizes of the batches that a rank met "
                "before, and its last digits with it.\nFix: leave out one of them"
            )

    def resolved(self) -> CifarSettings:
        """With every None filled in that depends on the data and the model."""
        known = MODEL_DEFAULTS[self.model] | DEFAULTS[self.data]
        return dataclasses.replace(self, **{n: v for n, v in known.items() if getattr(self, n) is None})


def transforms(settings: CifarSettings, images: ColorImages) -> list[Any]:
    """What happens to a batch of training images, in this order."""
    from phalanx.dist import Cutout, HorizontalFlip, Normalize, RandAugment, RandomCrop, TrivialAugment
    from phalanx.recipes.auto_augment import AutoAugment

    found: list[Any] = []
    if settings.augment != "none":
        found += [RandomCrop(2 if settings.data == "fashion" else 4, mode="reflect"), HorizontalFlip()]
    policies: dict[str, Any] = {"rand": RandAugment, "trivial": TrivialAugment, "auto": AutoAugment}
    if settings.augment in policies:
        found.append(policies[settings.augment]())
    found.append(Normalize(images.mean, images.std))
    if settings.cutout:
        found.append(Cutout(settings.cutout))  # zeros after normalisation: the mean colour
    return found


def loaders(settings: CifarSettings, images: ColorImages) -> tuple[TensorLoader, TensorLoader, TensorLoader]:
    """For training, validation and test. Collective."""
    from phalanx.dist import Normalize, TensorLoader, WeightedShardSampler, class_weights

    labels = images.train[1]
    by_weight = None
    if settings.balanced:  # of the whole epoch: the loader cuts each step's shares from it
        weights = class_weights(labels)[labels]
        by_weight = WeightedShardSampler(weights, rank=0, world_size=1, seed=settings.seed)
    train_loader = TensorLoader(
        *images.train,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.micro_batch_size,
        shuffle=by_weight is None,
        sampler=by_weight,
        seed=settings.seed,
        augment=transforms(settings, images),
    )
    validation_loader, test_loader = (
        TensorLoader(
            *part,
            global_batch_size=2000,
            micro_batch_size=250,
            virtual_ranks=settings.virtual_ranks,
            augment=[Normalize(images.mean, images.std)],
        )
        for part in (images.validation, images.test)
    )
    return train_loader, validation_loader, test_loader


def train(settings: CifarSettings) -> float:
    """Train, or go on training, then test; returns the test accuracy. Collective."""
    from torch.nn import functional as F

    from phalanx.dist import CheckpointManager, init_world, parallelize, seed_everything
    from phalanx.recipes import color_images, runs, schedules, training
    from phalanx.recipes.confusion import Confusion
    from phalanx.recipes.display import Display
    from phalanx.recipes.early_stop import EarlyStop
    from phalanx.recipes.ledger import Ledger
    from phalanx.recipes.metrics_log import MetricsLog, StepMetrics
    from phalanx.recipes.optimizers import initialise, optimizer_for
    from phalanx.recipes.residual import FlipMean, network
    from phalanx.recipes.step_profile import StepProfile

    # The ranks, the data, and the folder of this run.
    world = init_world()
    training.share_cores(world)
    settings = settings.resolved()
    assert settings.epochs is not None
    assert settings.width is not None
    images = color_images.load(
        settings.data, settings.data_dir, settings.download, settings.validation_fraction, settings.seed
    )
    run = training.from_rank_zero(lambda: runs.choose_run(settings, recipe="cifar"))

    # Loaders, model and checkpoints; a ValueError here is about what was asked for.
    with training.settings_errors():
        train_loader, validation_loader, test_loader = loaders(settings, images)
        # The same weights on any number of ranks; later random numbers are the loader's to seed.
        seed_everything(settings.seed)
        made = network(settings.model, len(images.class_names), settings.width)
        initialise(made, settings.init)
        if settings.compile:
            made.compile()
        model, optimizer, engine = parallelize(
            made,
            optimizer_for(settings),
            settings.strategy,
            precision=settings.precision,
            virtual_ranks=settings.virtual_ranks,
            loader=train_loader,
        )
        judged = FlipMean(model) if settings.test_flip else model
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
            "recipe": "cifar",
            "data": settings.data,
            "network": [settings.model, len(images.class_names), settings.width],
            "side": 32,
            "mean": list(images.mean),
            "std": list(images.std),
            "classes": list(images.class_names),
        }

    # The loop. What it tells goes to metrics.jsonl and the display, from rank 0.
    log = MetricsLog(run, train_loader.progress, writes=world.is_rank_zero and not settings.test_only)
    step_metrics = StepMetrics(log, train_loader, every=settings.log_every_steps)
    ledger = Ledger(settings.ledger, world.rank)
    profile = StepProfile(settings.profile, run.path, world.rank)
    with Display(settings.epochs, speaks=world.is_rank_zero, profile=profile) as display:
        display.start(run, images.described())
        for epoch in range(restored.epoch, 0 if settings.test_only else settings.epochs):
            if stopping.is_over:
                break
            for pictures, labels in display.watch(train_loader, epoch):
                with engine.micro_step(train_loader.key, last=train_loader.is_last_micro):
                    outputs = model(pictures)
                    smoothing = settings.label_smoothing or 0.0
                    loss_sum = F.cross_entropy(outputs, labels, reduction="sum", label_smoothing=smoothing)
                    engine.backward(loss_sum, train_loader.global_count)
                ledger.note(train_loader)
                step_metrics.update(outputs, labels)
                if train_loader.is_last_micro:
                    engine.step()
                    scheduler.step()
                    checkpoints.maybe_save(images=about, stopping=stopping.state)
            validation = training.evaluate(judged, validation_loader)
            log.write("validation", epoch + 1, train_loader.progress.step, validation)
            display.epoch_done(epoch, validation)
            schedules.judge(scheduler, validation["loss"])
            stopping.judge(validation["loss"], epoch, train_loader.progress.step)
            checkpoints.save(images=about, stopping=stopping.state)
            stopping.keep()
        kept = stopping.take_best(model=model, optimizer=optimizer, loader=train_loader, scheduler=scheduler)
        if kept is not None:
            display.say(kept)
        confusion = Confusion(images.class_names)
        test = training.evaluate(judged, test_loader, confusion)
        log.write("test", train_loader.progress.epoch, train_loader.progress.step, test, confusion)
        log.close()
        ledger.close()
        title = f"{settings.data} on {world.world_size} rank{'s' * (world.world_size > 1)}"
        display.finish(run, checkpoints.latest(), test, title=title, tested_only=settings.test_only)
    return test["accuracy"]


def main(argv: Sequence[str] | None = None) -> None:
    """The recipe's command line."""
    run_recipe(CifarSettings, train, argv, prog="cifar")


if __name__ == "__main__":
    main()
