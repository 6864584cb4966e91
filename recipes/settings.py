"""Settings of a training run: from the command line and a YAML file into a frozen dataclass. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T", bound="RunSettings")


class SettingsError(ValueError):
    """What the user asked for cannot be done: one message, exit code 2, no traceback."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What every recipe takes. The comment above a setting is its help."""

    # single, ddp, fsdp, deepspeed, accelerate or dp; auto: ddp on several ranks
    strategy: str = "auto"
    # of the forward pass; weights stay fp32
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    # samples per optimizer step, over all ranks; None: depends on the data
    global_batch_size: int | None = None
    # at most so many samples per forward pass on one rank; None: a rank's whole share of a step
    micro_batch_size: int | None = None
    # passes over the training samples; None: depends on the data
    epochs: int | None = None
    # of the initial weights, the order, the augmentation and the validation split
    seed: int = 0
    # the same bits on any number of ranks that divides it; None: the same samples only
    virtual_ranks: int | None = None
    # processes that load samples, per rank; 0 loads them in the loop
    num_workers: int = 0
    # save so often within an epoch; every epoch's end saves anyway
    checkpoint_every_steps: int | None = None
    # a line in metrics.jsonl for every so many steps, about that step's batch
    log_every_steps: int = 20
    # folder of the run; None: runs/<recipe>, or the next free of runs/<recipe>-2, -3, ...
    output_dir: str | None = None
    # go on with a run that was cut short; --no-resume starts anew and keeps an earlier run of --output-dir aside
    resume: bool = True
    # record some steps: a trace per rank in the run's folder, and a table of where their time goes
    profile: bool = False
    # test the newest checkpoint of the run, train nothing
    test_only: bool = False
    # YAML file of settings; the command line wins over it
    config: str | None = None
    # print the settings as YAML and stop
    print_config: bool = False
    # folder for a file per rank that notes which positions of the epoch each step took
    ledger: str | None = None

    def check(self) -> None:
        """Raise a SettingsError for a value out of range."""
        for name in (
            "global_batch_size", "micro_batch_size", "epochs", "virtual_ranks", "checkpoint_every_steps", "log_every_steps",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")
        require(self.num_workers >= 0, "num_workers", self.num_workers, "at least 0")


#: Settings that say where and how a run is kept, not what is trained: two runs may differ in them and be the same run.
KEEPING = frozenset(
    {
        "checkpoint_every_steps", "config", "data_dir", "download", "ledger", "log_every_steps", "micro_batch_size",
        "num_workers", "output_dir", "print_config", "profile", "resume", "strategy", "test_only", "zero_stage",
    }
)  # fmt: skip


def training_settings(settings: RunSettings) -> dict[str, Any]:
    """The settings that decide what is trained: a run goes on only with the same ones."""
    return {name: value for name, value in dataclasses.asdict(settings).items() if name not in KEEPING}


def require(condition: bool, name: str, value: object, needed: str) -> None:
    """Raise a SettingsError that names the option unless ``condition``."""
    if not condition:
        option = "--" + name.replace("_", "-")
        raise SettingsError(f"{option} {value}: {needed} is needed.\nFix: {option} takes {needed}")


def run_recipe(
    settings_type: type[T], train: Callable[[T], object], argv: Sequence[str] | None, prog: str
) -> None:
    """Turn flags into settings and train; what was asked for in vain is told by rank 0 alone, exit code 2."""
    speaks, problem = True, None
    try:
        speaks = is_rank_zero()
        settings = parse(settings_type, sys.argv[1:] if argv is None else argv, prog=prog, speaks=speaks)
        if settings.print_config:
            if speaks:
                print(to_yaml(dataclasses.asdict(settings)), end="")
            return
        train(settings)
    except SettingsError as error:
        problem = str(error)
    if problem is not None:  # out here, so that no launcher finds a traceback behind the exit
        if speaks:
            print(f"{prog}: {problem}", file=sys.stderr, flush=True)
        raise SystemExit(2)


def is_rank_zero() -> bool:
    """Whether this process is rank 0, known from the launcher's variables before any group exists."""
    from phalanx.dist.environments import InvalidRankEnvironment, detect

    try:
        return detect().rank == 0
    except InvalidRankEnvironment as error:
        raise SettingsError(str(error)) from error


def parse(settings_type: type[T], argv: Sequence[str], *, prog: str, speaks: bool = True) -> T:
    """Settings from defaults, then the file behind ``--config``, then ``argv``.

    A file's values go through the same door as the command line's, so that both are checked alike.

    Args:
        settings_type: A frozen dataclass derived from `RunSettings`.
        argv: The words after the program's name.
        prog: The program's name in usage and messages.
        speaks: Whether this process prints usage and errors: rank 0 does.

    Raises:
        SettingsError: The file cannot be used, or a value is out of range.
        SystemExit: 0 after ``--help``, 2 for a word that cannot be understood.
    """
    try:
        import tyro
    except ImportError:
        raise SettingsError(
            "tyro, which reads a recipe's settings, is not installed.\nFix: pip install 'phalanx[recipes]'"
        ) from None
    from_file: list[str] = []
    path = _config_path(argv)
    if path is not None:
        from_file = _as_words(settings_type, read_yaml(Path(path)), path)
    words = [*from_file, *argv]
    with contextlib.ExitStack() as stack:
        if not speaks:  # console_outputs=False still prints some errors (tyro 1.0)
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        settings = tyro.cli(settings_type, args=words, prog=prog, description=settings_type.__doc__)
    settings.check()
    return settings


def _config_path(argv: Sequence[str]) -> str | None:
    path = None
    for place, word in enumerate(argv):
        if word == "--config" and place + 1 < len(argv):
            path = argv[place + 1]
        elif word.startswith("--config="):
            path = word.partition("=")[2]
    return path


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        SettingsError: It cannot be read, or holds something else.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"The settings file {path} cannot be read: {error}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise SettingsError(
            f"The settings file {path} holds a {type(content).__name__}, not settings.\nFix: write lines such as: epochs: 3"
        )
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def to_yaml(values: Mapping[str, Any]) -> str:
    """Settings as lines of YAML, in their order."""
    import yaml

    text: str = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return text


def _as_words(settings_type: type[RunSettings], values: Mapping[str, Any], path: str) -> list[str]:
    """A file's settings as command-line words."""
    fields = {field.name: field for field in dataclasses.fields(settings_type)}
    words: list[str] = []
    for name, value in values.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            raise SettingsError(
                f"The settings file {path} has {name!r}, which is no setting: it would be ignored.\n"
                f"Fix: {f'write {near[0]!r}' if near else 'take it out; --help lists the settings'}"
            )
        if isinstance(value, (list, dict)):
            raise SettingsError(
                f"The settings file {path} gives {name} a {type(value).__name__}; one value is needed."
            )
        option = "--" + name.replace("_", "-")
        if isinstance(fields[name].default, bool):
            if not isinstance(value, bool):
                raise SettingsError(
                    f"The settings file {path} has {name}: {value!r}; true or false is needed."
                )
            words.append(option if value else "--no-" + option[2:])
        else:
            words += [f"{option}={value}"]
    return words
