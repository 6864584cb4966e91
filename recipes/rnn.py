"""A recurrent network that forecasts airline passengers, or writes text, on any number of ranks.

    phalanx run --nproc-per-node 2 rnn                                    # 44 months, forecast from the 100 before
    phalanx run --nproc-per-node 2 rnn --data text                        # characters of Python's help topics
    phalanx run --nproc-per-node 2 rnn --data text --text-file book.txt
    torchrun --nproc-per-node 2 -m phalanx.recipes.rnn                    # the same job; so do srun and plain python

`phalanx recipes copy rnn my_rnn.py` gives you this file to change.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.recipes.optimization import OptimizationSettings, OptimizerName
from phalanx.recipes.settings import SettingsError, require, run_recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from phalanx.dist import CheckpointManager, Engine
    from phalanx.dist.steps import StepLoader
    from phalanx.recipes.runs import RunFolder
    from phalanx.recipes.series import Series
    from phalanx.recipes.texts import Text

#: What a setting left at None becomes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "airline": {
        "cell": "rnn",
        "epochs": 150,
        "global_batch_size": 16,
        "lr": 5e-3,
        "hidden": 32,
        "dropout": 0.0,
    },
    "text": {"cell": "lstm", "epochs": 6, "global_batch_size": 32, "lr": 4e-3, "hidden": 256, "dropout": 0.1},
}


@dataclass(frozen=True, kw_only=True)
class RnnSettings(OptimizationSettings):
    """Forecast a monthly series, or model the characters of a text, with a recurrent network."""

    rises: ClassVar[float] = 0.1
    usual_optimizer: ClassVar[OptimizerName] = "adamw"

    # airline: passengers by month; text: characters
    data: Literal["airline", "text"] = "airline"
    # hand: Elman's network written out; the others are torch's; None: rnn for airline, lstm for text
    cell: Literal["hand", "rnn", "lstm", "gru"] | None = None
    # width of the hidden state; None: depends on the data
    hidden: int | None = None
    # recurrent layers, one on another
    layers: int = 1
    # the optimizer's pull of the weights towards zero
    weight_decay: float | None = 1e-4
    # before and after the recurrent layers; None: depends on the data
    dropout: float | None = None
    # gradients longer than this are shortened to it
    max_grad_norm: float = 1.0
    # airline: months that are known
    train_months: int = 100
    # airline: months that the network is shown before it forecasts the next
    window: int = 24
    # airline: whether the network is told the month of the year
    month: bool = True
    # text: a UTF-8 file; None: the help topics that come with Python
    text_file: str | None = None
    # text: each line is a sample of its own, in batches of similar lengths, instead of streams
    lines: bool = False
    # text: characters that a gradient reaches back (truncated backpropagation through time)
    segment: int = 64
    # text: share of the text, at its end, that is held out for the test; half as much before it for validation
    test_fraction: float = 0.1
    # text: characters that the trained network writes at the end
    sample: int = 300
    # text: below 1 it writes what is likelier, above 1 what is less so
    temperature: float = 0.7

    def check(self) -> None:
        """Raise a SettingsError for a value out of range."""
        super().check()
        for name in ("hidden", "layers", "segment", "sample"):
            value = getattr(self, name)
            require(
                value is None or value >= (name != "sample"), name, value, f"at least {int(name != 'sample')}"
            )
        for name in ("max_grad_norm", "temperature"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "above 0")
        require(0 <= (self.dropout or 0) < 1, "dropout", self.dropout, "at least 0, below 1")
        require(13 <= self.window <= 60, "window", self.window, "13 to 60")  # a year is warm-up
        require(
            self.window < self.train_months <= 132,
            "train_months",
            self.train_months,
            f"{self.window + 1} to 132",
        )
        require(0 < self.test_fraction < 0.5, "test_fraction", self.test_fraction, "above 0, below 0.5")
        self.check_judged(self.data == "text", "leave it out, or --data text")

    def resolved(self) -> RnnSettings:
        """With every None filled in that depends on the data."""
        chosen = {name: value for name, value in DEFAULTS[self.data].items() if getattr(self, name) is None}
        return dataclasses.replace(self, **chosen)


# What both runs have: model, optimizer, schedule and checkpoints.


@dataclass
class _Run:
    model: nn.Module
    optimizer: Any
    engine: Engine
    scheduler: Any
    checkpoints: CheckpointManager


def _begin(settings: RnnSettings, run: RunFolder, loader: StepLoader, network: Any) -> _Run:
    """Collective."""
    from phalanx.dist import CheckpointManager, parallelize, seed_everything
    from phalanx.recipes import schedules
    from phalanx.recipes.optimizers import initialise, optimizer_for

    assert settings.epochs is not None
    seed_everything(settings.seed)  # the same weights on any number of ranks
    made = network()
    initialise(made, settings.init)
    model, optimizer, engine = parallelize(
        made,
        optimizer_for(settings),
        settings.strategy,
        precision=settings.precision,
        max_grad_norm=settings.max_grad_norm,
        virtual_ranks=settings.virtual_ranks,
        loader=loader,
    )
    scheduler = schedules.scheduler_for(optimizer, settings, loader.plan.steps_per_epoch)
    checkpoints = CheckpointManager(
        run.checkpoints,
        model=model,
        optimizer=optimizer,
        loader=loader,
        scheduler=scheduler,
        every_steps=settings.checkpoint_every_steps,
    )
    return _Run(model, optimizer, engine, scheduler, checkpoints)


# The passengers: windows are samples, so that ranks share them.


def train_series(settings: RnnSettings) -> dict[str, float]:
    """Train, or go on training, then forecast; returns the errors in thousands of passengers. Collective."""
    from phalanx.dist import TensorLoader, init_world
    from phalanx.recipes import runs, series, training
    from phalanx.recipes.display import Display
    from phalanx.recipes.forecast_picture import draw_forecast
    from phalanx.recipes.ledger import Ledger
    from phalanx.recipes.metrics_log import MetricsLog, StepLoss
    from phalanx.recipes.recurrent import Forecaster
    from phalanx.recipes.step_profile import StepProfile

    world = init_world()
    training.share_cores(world)
    assert settings.epochs is not None
    assert settings.cell is not None
    assert settings.hidden is not None
    assert settings.dropout is not None
    known = series.airline_passengers(settings.train_months)
    run = training.from_rank_zero(lambda: runs.choose_run(settings, recipe="rnn"))
    with training.settings_errors():
        loader = TensorLoader(
            *known.windows(settings.window),
            global_batch_size=settings.global_batch_size,
            micro_batch_size=settings.micro_batch_size,
            shuffle=True,
            seed=settings.seed,
        )
        parts = _begin(
            settings,
            run,
            loader,
            lambda: Forecaster(
                settings.cell, settings.hidden, settings.layers, settings.dropout, month=settings.month
            ),
        )
        first_epoch = parts.checkpoints.restore().epoch

    log = MetricsLog(run, loader.progress, writes=world.is_rank_zero and not settings.test_only)
    step_loss = StepLoss(log, loader, every=settings.log_every_steps)
    ledger = Ledger(settings.ledger, world.rank)
    profile = StepProfile(settings.profile, run.path, world.rank)
    with Display(settings.epochs, speaks=world.is_rank_zero, profile=profile) as display:
        display.start(run, known.described())
        for epoch in range(first_epoch, 0 if settings.test_only else settings.epochs):
            for values, months in display.watch(loader, epoch):
                with parts.engine.micro_step(loader.key, last=loader.is_last_micro):
                    forecast = parts.model(values[:, :-1], months[:, 1:])
                    errors = (forecast - values[:, 1:].float().log())[:, series.MONTHS :]  # a year to warm up
                    loss_sum = 100 * errors.square().mean(dim=1).sum()
                    parts.engine.backward(loss_sum, loader.global_count)
                ledger.note(loader)
                step_loss.update(loss_sum, loader.local_count)
                if loader.is_last_micro:
                    parts.engine.step()
                    parts.scheduler.step()
                    parts.checkpoints.maybe_save()
            display.epoch_done(epoch, {})
            parts.checkpoints.save()
        ahead, at_once = forecasts(parts.model, known, settings.window, loader.device)
        scores = {
            "rmse": series.rmse(ahead, known.held_out),
            "rmse_all_at_once": series.rmse(at_once, known.held_out),
        }
        log.write("test", loader.progress.epoch, loader.progress.step, scores)
        log.close()
        ledger.close()
        naive = [series.rmse(forecast, known.held_out) for forecast in series.seasonal_naive(known)]
        display.say(
            f"one month ahead: RMSE {scores['rmse']:.1f} thousand (the month a year before: {naive[0]:.1f})"
        )
        display.say(
            f"all at once: RMSE {scores['rmse_all_at_once']:.1f} thousand (the last known year again: {naive[1]:.1f})"
        )
        if world.is_rank_zero and draw_forecast(known, ahead, at_once, run.path / "forecast.png"):
            display.say(f"forecast   {run.path / 'forecast.png'}")
        title = f"airline passengers on {world.world_size} rank{'s' * (world.world_size > 1)}"
        display.finish(run, parts.checkpoints.latest(), {}, title=title, tested_only=settings.test_only)
    return scores


def forecasts(model: nn.Module, known: Series, window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The held-out months one month ahead, and all at once. Every rank reckons them alike."""
    import torch

    from phalanx.recipes import series

    def predict(values: Tensor, months: Tensor) -> Tensor:
        with torch.no_grad():
            return model(values.to(device), months.to(device))[:, -1].exp().cpu()  # type: ignore[no-any-return]

    was_training = model.training
    model.eval()
    found = series.one_month_ahead(known, window, predict), series.all_at_once(known, window, predict)
    model.train(was_training)
    return found


# The text: its streams are read side by side, and each keeps its hidden state from segment to segment.


def text_loader(settings: RnnSettings, text: Text) -> StepLoader:
    """Segments of streams in their order, or lines in batches of similar lengths. Collective."""
    from phalanx.dist import LengthBucketSampler, ShardLoader
    from phalanx.recipes.texts import InOrder, Lines, Streams

    assert settings.global_batch_size is not None
    options: dict[str, Any] = {
        "global_batch_size": settings.global_batch_size,
        "micro_batch_size": settings.micro_batch_size,
        "seed": settings.seed,
        "num_workers": settings.num_workers,
    }
    if not settings.lines:
        streams = Streams(text.train, settings.global_batch_size, settings.segment)
        return ShardLoader(streams, sampler=InOrder(len(streams)), **options)
    lines = Lines(text.train, int(text.numbers("\n")))
    if len(lines) < settings.global_batch_size:
        raise SettingsError(
            f"--lines: {text.source} has {len(lines)} lines to train on, fewer than --global-batch-size "
            f"{settings.global_batch_size}.\nFix: --global-batch-size {max(1, len(lines) // 4)}, or leave out --lines"
        )
    sampler = LengthBucketSampler(
        lines.lengths, settings.global_batch_size, rank=0, world_size=1, seed=settings.seed
    )
    return ShardLoader(lines, sampler=sampler, collate_fn=lines.padded, **options)


def train_text(settings: RnnSettings) -> dict[str, float]:
    """Train, or go on training, test, and write a sample; returns the test's scores. Collective."""
    from torch.nn import functional as F

    from phalanx.dist import init_world
    from phalanx.recipes import runs, schedules, training
    from phalanx.recipes.display import Display
    from phalanx.recipes.early_stop import EarlyStop
    from phalanx.recipes.ledger import Ledger
    from phalanx.recipes.metrics_log import MetricsLog, StepLoss
    from phalanx.recipes.recurrent import CharacterModel
    from phalanx.recipes.step_profile import StepProfile
    from phalanx.recipes.stream_states import StreamStates
    from phalanx.recipes.texts import load_text

    world = init_world()
    training.share_cores(world)
    assert settings.epochs is not None
    assert settings.global_batch_size is not None
    assert settings.cell is not None
    assert settings.hidden is not None
    assert settings.dropout is not None
    text = load_text(settings.text_file, settings.test_fraction)
    run = training.from_rank_zero(lambda: runs.choose_run(settings, recipe="rnn"))
    with training.settings_errors():
        loader = text_loader(settings, text)
        parts = _begin(
            settings,
            run,
            loader,
            lambda: CharacterModel(
                settings.cell, text.symbols, settings.hidden, settings.layers, settings.dropout
            ),
        )
        restored = parts.checkpoints.restore()
        state_size = settings.hidden * (2 if settings.cell == "lstm" else 1)
        states = StreamStates(settings.global_batch_size, (settings.layers, state_size), loader.device)
        states.load(restored.values.get("states"))
        stopping = EarlyStop(settings.patience, parts.checkpoints, run.path, restored.values.get("stopping"))

    log = MetricsLog(run, loader.progress, writes=world.is_rank_zero and not settings.test_only)
    step_loss = StepLoss(log, loader, every=settings.log_every_steps)
    ledger = Ledger(settings.ledger, world.rank)
    profile = StepProfile(settings.profile, run.path, world.rank)
    with Display(settings.epochs, speaks=world.is_rank_zero, profile=profile) as display:
        display.start(run, text.described())
        for epoch in range(restored.epoch, 0 if settings.test_only else settings.epochs):
            if stopping.is_over:
                break
            for numbers, following in display.watch(loader, epoch):
                with parts.engine.micro_step(loader.key, last=loader.is_last_micro):
                    # A line stands alone; a stream goes on from where its last segment ended.
                    logits, state = parts.model(numbers, None if settings.lines else states.before(loader))
                    nats = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
                    loss_sum = nats / settings.segment  # per character, were each sample a whole segment
                    parts.engine.backward(loss_sum, loader.global_count)
                if not settings.lines:
                    states.after(loader, state)
                ledger.note(loader)
                step_loss.update(nats, int((following >= 0).sum()) if loader.local_count else 0)
                if loader.is_last_micro:
                    parts.engine.step()
                    parts.scheduler.step()
                    parts.checkpoints.maybe_save(states=states.gathered, stopping=stopping.state)
            validation = judge(settings, parts.model, text, text.validation, loader.device)
            log.write("validation", epoch + 1, loader.progress.step, validation)
            display.epoch_done(epoch, validation)
            schedules.judge(parts.scheduler, validation["bits_per_character"])
            stopping.judge(validation["bits_per_character"], epoch, loader.progress.step)
            parts.checkpoints.save(states=states.gathered, stopping=stopping.state)
            stopping.keep()
        kept = stopping.take_best(
            model=parts.model, optimizer=parts.optimizer, loader=loader, scheduler=parts.scheduler
        )
        if kept is not None:
            display.say(kept)
        test = judge(settings, parts.model, text, text.test, loader.device)
        log.write("test", loader.progress.epoch, loader.progress.step, test)
        log.close()
        ledger.close()
        sample = written(settings, parts.model, text, loader.device)
        if sample:
            display.say(f"---\n{sample}\n---")
        display.say(f"gzip needs {text.gzip_bits:.4f} bits per character for the same text")
        title = f"{text.source} on {world.world_size} rank{'s' * (world.world_size > 1)}"
        display.finish(run, parts.checkpoints.latest(), test, title=title, tested_only=settings.test_only)
    return test


def judge(
    settings: RnnSettings, model: nn.Module, text: Text, numbers: Tensor, device: torch.device
) -> dict[str, float]:
    """Bits per character of a part of the text, each character once. Every rank reckons it alike."""
    import torch
    from torch.nn import functional as F

    was_training = model.training
    model.eval()
    nats = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for before, after, state in _pieces(settings, text, numbers):
            logits, after_state = model(before.to(device), None if state is None else state[0])
            nats += (
                F.cross_entropy(logits.flatten(0, 1), after.flatten().to(device), reduction="sum")
                .double()
                .cpu()
            )
            if state is not None:
                state[0] = after_state
    model.train(was_training)
    return {"bits_per_character": float(nats) / math.log(2) / len(numbers)}


def _pieces(
    settings: RnnSettings, text: Text, numbers: Tensor
) -> Iterator[tuple[Tensor, Tensor, list[Any] | None]]:
    """A text as (what stands before, the characters, where its state is kept): eight rows side by side, or lines."""
    import torch

    from phalanx.recipes.texts import Lines

    newline = int(text.numbers("\n"))
    if settings.lines:
        lines = Lines(numbers, newline, keep_empty=True)
        for start in range(0, len(lines), 64):
            before, after = lines.padded(
                [lines[place] for place in range(start, min(start + 64, len(lines)))]
            )
            yield before, after, None
        return
    rows, length, piece = 8, -(-len(numbers) // 8), 256
    after = torch.full((rows * length,), -100)
    after[: len(numbers)] = numbers
    before = torch.cat([torch.tensor([newline]), after[:-1]]).clamp_min(0).view(rows, length)
    after = after.view(rows, length)
    state: list[Any] = [None]
    for start in range(0, length, piece):
        yield before[:, start : start + piece], after[:, start : start + piece], state


def written(settings: RnnSettings, model: nn.Module, text: Text, device: torch.device) -> str:
    """A text that the network writes, the same on every rank and for every number of them."""
    import torch

    generator = torch.Generator().manual_seed(settings.seed)
    numbers, state = [int(text.numbers("\n"))], None
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(settings.sample):
            logits, state = model(torch.tensor([[numbers[-1]]], device=device), state)
            chances = (logits[0, -1].double().cpu() / settings.temperature).softmax(0)
            numbers.append(int(torch.multinomial(chances, 1, generator=generator)))
    model.train(was_training)
    return text.characters_of(numbers[1:])


def train(settings: RnnSettings) -> dict[str, float]:
    """Train on what ``settings.data`` names; returns the test's scores. Collective."""
    settings = settings.resolved()
    return train_text(settings) if settings.data == "text" else train_series(settings)


def main(argv: Sequence[str] | None = None) -> None:
    """The recipe's command line."""
    run_recipe(RnnSettings, train, argv, prog="rnn")


if __name__ == "__main__":
    main()
