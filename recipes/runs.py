"""The folder of a run: which one to take, and whether to go on with what it holds. No torch."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.recipes.settings import RunSettings, SettingsError, read_yaml, to_yaml, training_settings

SETTINGS_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunFolder:
    """Where a run is kept: config.yaml, metrics.jsonl, curves.png, tensorboard/ and checkpoints/."""

    path: Path
    notes: tuple[str, ...] = ()  # what the user should know about the choice

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / METRICS_FILE

    @property
    def checkpoints(self) -> Path:
        """For CheckpointManager."""
        return self.path / CHECKPOINTS


def choose_run(settings: RunSettings, *, recipe: str) -> RunFolder:
    """The folder that these settings mean: to test the run in it, to go on with it, or to begin."""
    if settings.test_only:
        return newest_run(settings.output_dir, recipe=recipe)
    return open_run(settings.output_dir, training_settings(settings), recipe=recipe, resume=settings.resume)


def open_run(
    output_dir: str | None,
    settings: Mapping[str, Any],
    *,
    recipe: str,
    resume: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> RunFolder:
    """Choose the run's folder and note the settings in it. For rank 0, before any other rank writes.

    Without ``output_dir``: ``runs/<recipe>``, or ``runs/<recipe>-2``, -3, ... A run there that was cut
    short and has the same settings goes on; otherwise the next free name is taken, so that no run
    ever lands on another. With ``output_dir``, that very folder: the run in it goes on when its
    settings are the same (``epochs`` may grow: it is trained further), else it is refused.
    ``resume=False`` starts anew, and an earlier run in ``output_dir`` is renamed; a launcher's restart
    goes on all the same.

    Args:
        output_dir: The folder the user asked for.
        settings: What is trained, as plain values.
        recipe: Name for the default folder.
        resume: Whether to go on with what is there.
        environ: Variables in which launchers count restarts.

    Raises:
        SettingsError: ``output_dir`` holds a run with other settings, or something else.
    """
    restarts = [environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    resume = resume or any(count.isdigit() and int(count) > 0 for count in restarts)
    if output_dir is None:
        return _open_numbered(Path("runs"), recipe, settings, resume)
    return _open_named(Path(output_dir), settings, resume)


def newest_run(output_dir: str | None, *, recipe: str) -> RunFolder:
    """The folder whose newest checkpoint is to be tested.

    Raises:
        SettingsError: No run is there.
    """
    folders = [Path(output_dir)] if output_dir is not None else _numbered(Path("runs"), recipe)
    folders = [folder for folder in folders if (folder / CHECKPOINTS).is_dir()]
    if not folders:
        raise SettingsError(
            f"--test-only: there is no run with a checkpoint in {output_dir or f'runs/{recipe}'}.\n"
            "Fix: --output-dir FOLDER of the run to test, or train first, without --test-only"
        )
    return RunFolder(max(folders, key=lambda folder: (folder / CHECKPOINTS).stat().st_mtime))


def _numbered(parent: Path, recipe: str) -> list[Path]:
    """The runs with a default name, newest number first."""
    found = {}
    for path in parent.glob(f"{recipe}*"):
        number = path.name.removeprefix(recipe)
        if not number:
            found[1] = path
        elif number.startswith("-") and number[1:].isdigit():
            found[int(number[1:])] = path
    return [found[number] for number in sorted(found, reverse=True)]


def _open_numbered(parent: Path, recipe: str, settings: Mapping[str, Any], resume: bool) -> RunFolder:
    there = _numbered(parent, recipe)
    if resume:
        for folder in there:
            if (
                (folder / SETTINGS_FILE).is_file()
                and not is_finished(folder)
                and not differences(folder, settings)
            ):
                return RunFolder(folder, _going_on(folder))
    number = 1 + (int(there[0].name.removeprefix(recipe).lstrip("-") or 1) if there else 0)
    while True:
        folder = parent / (recipe if number == 1 else f"{recipe}-{number}")
        if _claim(folder, settings):
            return RunFolder(folder)
        number += 1


def _claim(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Make the folder with the settings in it, at one stroke: of two jobs that want it, one gets it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-run-") as outer:
        made = Path(outer) / "run"
        made.mkdir()
        (made / SETTINGS_FILE).write_text(to_yaml(settings), encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:  # there already, and not empty
            return False
    return True


def _open_named(folder: Path, settings: Mapping[str, Any], resume: bool) -> RunFolder:
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"--output-dir {folder} is a file, a folder is needed.\nFix: another name")
    notes: tuple[str, ...] = ()
    if (folder / SETTINGS_FILE).is_file():
        if resume:
            different = differences(folder, settings)
            if different.keys() - {"epochs"} or not _more(*different.get("epochs", (0, 1))):
                listed = ", ".join(
                    f"{name} ({was} there, {now} asked for)" for name, (was, now) in different.items()
                )
                raise SettingsError(
                    f"--output-dir {folder} holds a run with other settings: {listed}.\n"
                    "Going on with it would be neither the one nor the other run.\n"
                    f"Fix: another --output-dir, or --config {folder / SETTINGS_FILE} to go on with that run, "
                    "or --no-resume to start anew and keep it aside"
                )
            if different:
                was, now = different["epochs"]
                notes = (f"the run in {folder} was for {was} epochs and goes on to {now}",)
                write_whole(folder / SETTINGS_FILE, to_yaml(settings))
            return RunFolder(folder, notes or _going_on(folder))
        aside = _free_name(folder)
        folder.rename(aside)
        notes = (f"the earlier run was moved to {aside}",)
    elif (folder / CHECKPOINTS).exists():
        raise SettingsError(
            f"--output-dir {folder} holds {CHECKPOINTS}/ but no {SETTINGS_FILE}: whose they are is unknown, and they "
            "would be loaded or replaced.\nFix: another --output-dir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SETTINGS_FILE, to_yaml(settings))
    return RunFolder(folder, notes)


def _more(was: Any, now: Any) -> bool:
    return isinstance(was, int) and isinstance(now, int) and now > was


def _going_on(folder: Path) -> tuple[str, ...]:
    if is_finished(folder):
        return (f"the run in {folder} is finished; --no-resume trains anew",)
    return (f"going on with the run in {folder}",) if (folder / CHECKPOINTS).is_dir() else ()


def _free_name(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return aside


def differences(folder: Path, settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that are not the same in the folder and now: name -> (there, now)."""
    there = read_yaml(folder / SETTINGS_FILE)
    missing = object()
    return {
        name: (there.get(name), settings.get(name))
        for name in [*settings, *(name for name in there if name not in settings)]
        if there.get(name, missing) != settings.get(name, missing)
    }


def is_finished(folder: Path) -> bool:
    """Whether the run came to its end: the last line of its metrics is the test's."""
    lines = read_metrics(folder / METRICS_FILE)
    return bool(lines) and lines[-1]["split"] == "test"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; one that a kill cut short is left out."""
    lines = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return lines


def write_whole(path: Path, text: str) -> None:
    """Replace a small file at one stroke."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
