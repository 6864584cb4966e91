"""Any of torchvision's classifiers on a folder of images, on any number of ranks: from scratch, or from published weights.

    phalanx run --nproc-per-node 2 resnet --data-dir FOLDER                           # FOLDER/train/CLASS/*.jpg, FOLDER/val
    phalanx run --nproc-per-node 2 resnet --data-dir FOLDER --weights DEFAULT --lr 0.01 --epochs 5
    phalanx run --nproc-per-node 8 resnet --data-dir imagenet --arch resnet50 --preset v1
    phalanx run --nproc-per-node 2 resnet --data fake                                 # made-up images, no files

`phalanx recipes copy resnet my_resnet.py` gives you this file to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.recipes.optimization import OptimizationSettings, OptimizerName, ScheduleName
from phalanx.recipes.settings import SettingsError, require, run_recipe

if TYPE_CHECKING:
    from torch import nn

    from phalanx.dist import ShardLoader

#: What a setting left at None becomes. v1 and v2 are how torchvision trained its ResNet-50 weights of that name,
#: to 76.130 % and 80.858 % top-1 on ImageNet (v2 with repeated augmentation as well, which is not here).
PRESETS: dict[str, dict[str, Any]] = {
    "short": {
        "epochs": 30, "global_batch_size": 128, "lr": 0.05, "schedule": "cosine", "warmup_epochs": 2,
        "weight_decay": 1e-4, "label_smoothing": 0.1, "mixup": 0.0, "cutmix": 0.0, "augment": "none", "erase": 0.0,
        "ema_decay": 0.0, "crop": 224, "test_crop": 224, "test_resize": 256,
    },
    "v1": {
        "epochs": 90, "global_batch_size": 256, "lr": 0.1, "schedule": "step", "warmup_epochs": 0,
        "weight_decay": 1e-4, "label_smoothing": 0.0, "mixup": 0.0, "cutmix": 0.0, "augment": "none", "erase": 0.0,
        "ema_decay": 0.0, "crop": 224, "test_crop": 224, "test_resize": 256,
    },
    "v2": {
        "epochs": 600, "global_batch_size": 1024, "lr": 0.5, "schedule": "cosine", "warmup_epochs": 5,
        "weight_decay": 2e-5, "label_smoothing": 0.1, "mixup": 0.2, "cutmix": 1.0, "augment": "trivial", "erase": 0.1,
        "ema_decay": 0.999966, "crop": 176, "test_crop": 224, "test_resize": 232, "decay_norms": False,
    },
}  # fmt: skip
FAKE = {
    "epochs": 2, "global_batch_size": 32, "lr": 0.02, "warmup_epochs": 0, "crop": 32, "test_crop": 32, "test_resize": 32
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ResnetSettings(OptimizationSettings):
    """Train one of torchvision's classifiers on a folder of images."""

    usual_optimizer: ClassVar[OptimizerName] = "sgd"
    nesterov: ClassVar[bool] = False

    # folder: images in --data-dir; fake: made-up patterns
    data: Literal["folder", "fake"] = "folder"
    # holds train/CLASS/*.jpg and val/CLASS/*.jpg
    data_dir: str = "data"
    # torchvision's name of a classifier: resnet18 to resnet152, alexnet, vgg16, googlenet, mobilenet_v3_small, ...
    arch: str = "resnet18"
    # DEFAULT: torchvision's published weights, fetched once per node; or a file; None: fresh ones
    weights: str | None = None
    # what the settings below are where they are not given; v1, v2: as torchvision trained those weights of ResNet-50
    preset: Literal["short", "v1", "v2"] = "short"
    # whether it also pulls at biases and the scales of norms; None: the preset's, which is yes but for v2
    decay_norms: bool | None = None
    # share of the target that is spread over all classes; None: the preset's
    label_smoothing: float | None = None
    # alpha of mixup, 0: none; None: the preset's
    mixup: float | None = None
    # alpha of CutMix, 0: none; with both, each batch takes one of them; None: the preset's
    cutmix: float | None = None
    # of the decoded image, after a random crop and flip; None: the preset's
    augment: Literal["none", "rand", "trivial", "auto"] | None = None
    # chance that a rectangle of a training image is blanked; None: the preset's
    erase: float | None = None
    # of a moving average of the weights, by the step, which is what is tested; 0: none; None: the preset's
    ema_decay: float | None = None
    # side of a training image; None: the preset's
    crop: int | None = None
    # side of a tested image; None: the preset's
    test_crop: int | None = None
    # the shorter side that a tested image is brought to before the middle is taken; None: the preset's
    test_resize: int | None = None
    # batch norm over the batches of all ranks
    sync_bn: bool = False
    # images with their colours side by side in memory, which most convolutions like
    channels_last: bool = True
    # let torch.compile fuse the network
    compile: bool = False

    def check(self) -> None:
        """Raise a SettingsError for a value out of range."""
        super().check()
        for name in ("mixup", "cutmix"):
            require((getattr(self, name) or 0) >= 0, name, getattr(self, name), "at least 0")
        for name in ("label_smoothing", "ema_decay"):
            require(0 <= (getattr(self, name) or 0) < 1, name, getattr(self, name), "at least 0, below 1")
        for name in ("crop", "test_crop", "test_resize"):
            value = getattr(self, name)
            require(value is None or 8 <= value <= 4096, name, value, "8 to 4096")
        require(0 <= (self.erase or 0) <= 1, "erase", self.erase, "0 to 1")
        chosen = self.resolved()
        assert chosen.test_crop is not None
        assert chosen.test_resize is not None
        needed = f"at least --test-crop, {chosen.test_crop}"
        require(chosen.test_resize >= chosen.test_crop, "test_resize", chosen.test_resize, needed)
        if self.weights is not None and self.init != "default":
            raise SettingsError(
                f"--weights {self.weights} with --init {self.init}: the weights would begin anew.\nFix: leave out one of them"
            )
        for name in ("compile", "sync_bn"):
            if getattr(self, name) and self.virtual_ranks is not None:
                raise SettingsError(
                    f"--{name.replace('_', '-')} with --virtual-ranks: its sums depend on the number of ranks.\n"
                    "Fix: leave out one of them"
                )

    @property
    def schedule_name(self) -> ScheduleName:
        """The schedule that is followed."""
        name: ScheduleName = self.schedule or PRESETS[self.preset]["schedule"]
        return name

    def resolved(self) -> ResnetSettings:
        """With every None filled in that depends on the preset."""
        known = {"decay_norms": True} | PRESETS[self.preset] | (FAKE if self.data == "fake" else {})
        return dataclasses.replace(self, **{n: v for n, v in known.items() if getattr(self, n) is None})


def change(settings: ResnetSettings) -> Any:
    """What happens to a training image, after the random crop and flip."""
    from torchvision.transforms import v2

    policies: dict[str, Any] = {
        "rand": v2.RandAugment,
        "trivial": v2.TrivialAugmentWide,
        "auto": v2.AutoAugment,
    }
    return policies[settings.augment]() if settings.augment in policies else v2.Identity()


def loaders(settings: ResnetSettings) -> tuple[ShardLoader, ShardLoader, tuple[str, ...]]:
    """For training and for the test; the classes' names. Collective."""
    from phalanx.dist import ShardLoader
    from phalanx.recipes import datasets
    from phalanx.recipes.image_folder import FakeImages, ImageFolder, class_names, side_by_side

    assert settings.crop is not None
    assert settings.test_crop is not None
    assert settings.test_resize is not None
    train_set: Any
    test_set: Any
    if settings.data == "fake":
        names = tuple(f"pattern {number}" for number in range(10))
        train_set, test_set = FakeImages(256, settings.crop, 0), FakeImages(64, settings.test_crop, 256)
    else:
        folder = Path(settings.data_dir)
        names = datasets.everywhere(lambda: class_names(folder))
        middle = settings.test_crop / settings.test_resize
        train_set = ImageFolder(
            folder / "train", names, settings.crop, change(settings), erase=settings.erase or 0.0
        )
        test_set = ImageFolder(folder / "val", names, settings.test_crop, middle=middle)
    train_loader = ShardLoader(
        train_set,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.micro_batch_size,
        shuffle=True,
        seed=settings.seed,
        num_workers=settings.num_workers,
        collate_fn=side_by_side,
    )
    test_loader = ShardLoader(
        test_set,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.micro_batch_size,
        virtual_ranks=settings.virtual_ranks,
        num_workers=settings.num_workers,
        collate_fn=side_by_side,
    )
    return train_loader, test_loader, names


def groups(settings: ResnetSettings, weights: Iterable[nn.Parameter]) -> Any:
    """The optimizer over these; what has one dim (biases, scales) is pulled at only if asked for."""
    from phalanx.recipes.optimizers import optimizer_for

    weights = list(weights)
    found: Any = weights
    if not settings.decay_norms:
        found = [
            {"params": [weight for weight in weights if weight.ndim > 1]},
            {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
        ]
    return optimizer_for(settings)(found)


def train(settings: ResnetSettings) -> float:
    """Train, or go on training, then test; returns the test accuracy. Collective."""
    from phalanx.dist import CheckpointManager, init_world, parallelize, seed_everything
    from phalanx.recipes import classifiers, runs, schedules, training
    from phalanx.recipes.confusion import Confusion
    from phalanx.recipes.display import Display
    from phalanx.recipes.early_stop import EarlyStop
    from phalanx.recipes.ledger import Ledger
    from phalanx.recipes.metrics_log import MetricsLog, StepMetrics
    from phalanx.recipes.optimizers import initialise
    from phalanx.recipes.step_profile import StepProfile

    # The ranks, the data, and the folder of this run.
    world = init_world()
    training.share_cores(world)
    settings = settings.resolved()
    assert settings.epochs is not None
    classifiers.check_name(settings.arch)
    with training.settings_errors():
        train_loader, test_loader, names = loaders(settings)
    run = training.from_rank_zero(lambda: runs.choose_run(settings, recipe="resnet"))

    # Model and checkpoints; a ValueError here is about what was asked for.
    with training.settings_errors():
        seed_everything(settings.seed)  # the same weights on any number of ranks
        network = classifiers.plain(settings.arch, len(names))
        initialise(network, settings.init)
        if settings.weights is not None:
            taken = classifiers.take_weights(network, settings.arch, settings.weights)
        made = classifiers.Classifier(
            network, averaged=bool(settings.ema_decay), channels_last=settings.channels_last
        )
        if settings.compile:
            network.compile()
        model, optimizer, engine = parallelize(
            made,
            lambda weights: groups(settings, weights),
            settings.strategy,
            precision=settings.precision,
            virtual_ranks=settings.virtual_ranks,
            sync_batch_norm=settings.sync_bn,
            loader=train_loader,
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
        # What whoever shows the checkpoint an image has to know: see the recipe gradcam. The network takes bytes.
        about = {
            "recipe": "resnet",
            "data": settings.data,
            "network": [settings.arch, len(names), bool(settings.ema_decay), settings.channels_last],
            "side": settings.test_crop,
            "mean": [0.0] * 3,
            "std": [1 / 255] * 3,
            "classes": list(names),
        }

    # The loop. What it tells goes to metrics.jsonl and the display, from rank 0.
    log = MetricsLog(run, train_loader.progress, writes=world.is_rank_zero and not settings.test_only)
    step_metrics = StepMetrics(log, train_loader, every=settings.log_every_steps)
    ledger = Ledger(settings.ledger, world.rank)
    smoothing, mixup, cutmix = settings.label_smoothing or 0.0, settings.mixup or 0.0, settings.cutmix or 0.0
    profile = StepProfile(settings.profile, run.path, world.rank)
    with Display(settings.epochs, speaks=world.is_rank_zero, profile=profile) as display:
        display.start(run, f"{settings.arch} on {len(train_loader.dataset)} images of {len(names)} classes")
        if settings.weights is not None and restored.epoch == 0:
            display.say(taken)
        for epoch in range(restored.epoch, 0 if settings.test_only else settings.epochs):
            if stopping.is_over:
                break
            for images, labels in display.watch(train_loader, epoch):
                with engine.micro_step(train_loader.key, last=train_loader.is_last_micro):
                    pictures, targets = classifiers.mixed(images.float(), labels, len(names), mixup, cutmix)
                    outputs = model(pictures)
                    loss_sum, logits = classifiers.loss_of(settings.arch, outputs, targets, smoothing)
                    engine.backward(loss_sum, train_loader.global_count)
                ledger.note(train_loader)
                step_metrics.update(logits, labels)
                if train_loader.is_last_micro:
                    engine.step()
                    scheduler.step()
                    if settings.ema_decay:
                        made.follow(settings.ema_decay, train_loader.progress.step)
                    checkpoints.maybe_save(images=about, stopping=stopping.state)
            validation = training.evaluate(model, test_loader)
            log.write("validation", epoch + 1, train_loader.progress.step, validation)
            display.epoch_done(epoch, validation)
            schedules.judge(scheduler, validation["loss"])
            stopping.judge(validation["loss"], epoch, train_loader.progress.step)
            checkpoints.save(images=about, stopping=stopping.state)
            stopping.keep()
        kept = stopping.take_best(model=model, optimizer=optimizer, loader=train_loader, scheduler=scheduler)
        if kept is not None:
            display.say(kept)
        confusion = Confusion(names)
        test = training.evaluate(model, test_loader, confusion)
        log.write("test", train_loader.progress.epoch, train_loader.progress.step, test, confusion)
        log.close()
        ledger.close()
        title = f"{settings.arch} on {world.world_size} rank{'s' * (world.world_size > 1)}"
        display.finish(run, checkpoints.latest(), test, title=title, tested_only=settings.test_only)
    return test["accuracy"]


def main(argv: Sequence[str] | None = None) -> None:
    """The recipe's command line."""
    run_recipe(ResnetSettings, train, argv, prog="resnet")


if __name__ == "__main__":
    main()
