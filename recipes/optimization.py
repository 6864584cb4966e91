"""How a recipe's weights begin and move: settings of the optimizer, the learning rate's schedule and the end. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from phalanx.recipes.settings import RunSettings, SettingsError, require

ScheduleName = Literal["one-cycle", "cosine", "step", "multistep", "exponential", "plateau", "constant"]
OptimizerName = Literal["sgd", "adam", "adamw", "rmsprop"]


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings(RunSettings):
    """What every recipe that trains takes besides `RunSettings`."""

    #: Share of a one-cycle run in which the learning rate goes up.
    rises: ClassVar[float] = 0.25
    #: What `schedule` and `optimizer` are where they are not given; the learning rate's default is for that optimizer.
    usual_schedule: ClassVar[ScheduleName] = "one-cycle"
    usual_optimizer: ClassVar[OptimizerName] = "adam"
    #: Whether sgd's momentum is Nesterov's.
    nesterov: ClassVar[bool] = True

    # how the weights begin; default: as torch's layers do
    init: Literal["default", "xavier", "kaiming", "orthogonal"] = "default"
    # None: the recipe's own, for which its learning rate is meant; with another one --lr is needed
    optimizer: OptimizerName | None = None
    # peak learning rate; None: depends on data and model
    lr: float | None = None
    # of sgd and rmsprop
    momentum: float = 0.9
    # the optimizer's pull of the weights towards zero; None: depends on the recipe
    weight_decay: float | None = None
    # of the learning rate: up and down once, down along a cosine, by --gamma at intervals or epochs or each epoch or
    # where the validation loss stays, or not at all; None: the recipe's own
    schedule: ScheduleName | None = None
    # epochs in which the learning rate rises to its peak; None: depends on schedule and recipe
    warmup_epochs: float | None = None
    # factor of step, multistep and plateau (None: 0.1), and of each epoch of exponential (None: to 0.01 at the end)
    gamma: float | None = None
    # epochs from one step to the next; None: a third of the run after its warm-up
    step_epochs: int | None = None
    # epochs of multistep, as in 30,60,80; None: half and three quarters of the run
    milestones: str | None = None
    # epochs without a better validation loss before plateau lowers the learning rate
    plateau_epochs: int = 3
    # stop after so many epochs without a better validation loss, and keep the best weights; None: never
    patience: int | None = None

    def check(self) -> None:
        """Raise a SettingsError for a value out of range, or one without effect."""
        super().check()
        require(self.lr is None or self.lr > 0, "lr", self.lr, "above 0")
        require(0 <= self.momentum < 1, "momentum", self.momentum, "at least 0, below 1")
        require(
            self.weight_decay is None or self.weight_decay >= 0,
            "weight_decay",
            self.weight_decay,
            "at least 0",
        )
        require(
            self.warmup_epochs is None or self.warmup_epochs >= 0,
            "warmup_epochs",
            self.warmup_epochs,
            "at least 0",
        )
        require(self.gamma is None or 0 < self.gamma < 1, "gamma", self.gamma, "above 0, below 1")
        for name in ("step_epochs", "plateau_epochs", "patience"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")
        if self.optimizer not in (None, self.usual_optimizer) and self.lr is None:
            raise SettingsError(
                f"--optimizer {self.optimizer} without --lr: the recipe's learning rate is meant for "
                f"{self.usual_optimizer}.\nFix: give --lr as well, such as {_LR[self.optimizer_name]}"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        chosen = self.schedule_name
        for option, value, takers in (
            ("--gamma", self.gamma, ("step", "multistep", "exponential", "plateau")),
            ("--step-epochs", self.step_epochs, ("step",)),
            ("--milestones", self.milestones, ("multistep",)),
        ):
            if value is not None and chosen not in takers:
                raise SettingsError(
                    f"{option} {value} with --schedule {chosen}: it would have no effect.\n"
                    f"Fix: leave it out, or --schedule {takers[0]}"
                )
        self.milestone_epochs()

    def check_judged(self, judged: bool, fix: str) -> None:
        """Raise a SettingsError where something waits for a validation loss that the run does not have."""
        if judged:
            return
        for option, asked in (
            ("--schedule plateau", self.schedule_name == "plateau"),
            (f"--patience {self.patience}", self.patience is not None),
        ):
            if asked:
                raise SettingsError(f"{option}: this run has no validation loss to go by.\nFix: {fix}")

    @property
    def schedule_name(self) -> ScheduleName:
        """The schedule that is followed."""
        return self.schedule or self.usual_schedule

    @property
    def optimizer_name(self) -> OptimizerName:
        """The optimizer that is used."""
        return self.optimizer or self.usual_optimizer

    def milestone_epochs(self) -> tuple[int, ...] | None:
        """The epochs of `milestones`, None where they are left to the run.

        Raises:
            SettingsError: They are no rising whole numbers.
        """
        if self.milestones is None:
            return None
        words = [word.strip() for word in self.milestones.split(",")]
        epochs = tuple(int(word) if word.isascii() and word.isdigit() else 0 for word in words)
        if 0 in epochs or list(epochs) != sorted(set(epochs)):
            raise SettingsError(
                f"--milestones {self.milestones}: rising epochs, from 1 on, are needed.\nFix: --milestones 30,60,80"
            )
        return epochs


#: What beginners take for each, in the message that asks for it.
_LR = {"sgd": "0.1", "adam": "0.001", "adamw": "0.001", "rmsprop": "0.001"}
