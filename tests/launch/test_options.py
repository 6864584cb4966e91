"""torchrun's options are all there, in both spellings, from the command line and the environment."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from phalanx.launch.cli import CONTEXT_SETTINGS
from phalanx.launch.options import BY_KEY, OPTIONS, RunOption, notes_without_effect, values_given
from phalanx.launch.run_command import run_command

# A value of each option that has no plain one of its own: what its check would refuse is not asked here.
EVERY_OPTION = list(BY_KEY.values())


def torchrun_actions() -> Iterator[argparse.Action]:
    from torch.distributed.run import get_args_parser

    yield from (a for a in get_args_parser()._actions if a.option_strings and a.dest != "help")


def parse(*words: str) -> click.Context:
    return run_command.make_context("run", [*words], **{**CONTEXT_SETTINGS, "allow_interspersed_args": False})


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in EVERY_OPTION:
        for variable in option.variables:
            monkeypatch.delenv(variable, raising=False)


def test_every_spelling_of_every_torchrun_option_is_accepted() -> None:
    seen = set()
    for action in torchrun_actions():
        for spelling in action.option_strings:
            words = [spelling] if action.nargs == 0 else [spelling, "7"]
            given = values_given(parse(*words, "train.py", spelling))
            assert set(given) == {action.dest}, f"{spelling} was read as {set(given)}"
            assert BY_KEY[action.dest].torchrun
            seen.add(spelling)
    assert {"--nproc-per-node", "--nproc_per_node", "-m", "-r", "-t"} <= seen


def test_options_marked_as_torchruns_are_torchruns() -> None:
    """Those of a newer torch may be missing in an older one, but the ones of torch 2.6 are in all."""
    theirs = {action.dest for action in torchrun_actions()}
    marked = {key for key, option in BY_KEY.items() if option.torchrun}
    newer_than_2_6 = {
        *("numa_binding", "signals_to_handle", "duplicate_stdout_filters", "duplicate_stderr_filters"),
        *("virtual_local_rank", "shutdown_timeout", "event_log_handler", "print_completion"),
    }
    assert marked - theirs <= newer_than_2_6
    assert not {key for key, option in BY_KEY.items() if not option.torchrun} & theirs


def test_flags_are_flags_and_values_take_values_as_in_torchrun() -> None:
    for action in torchrun_actions():
        assert (BY_KEY[action.dest].metavar is None) == (action.nargs == 0), action.dest


@pytest.mark.parametrize("option", EVERY_OPTION, ids=lambda option: option.name)
def test_each_option_has_a_variable(option: RunOption, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in option.variables:
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            given = values_given(parse("train.py"))
        assert set(given) == {option.key}
        assert given[option.key].source == variable
    assert option.variables[0] == "PHALANX_RUN_" + option.name.upper().replace("-", "_")


def test_the_command_line_comes_before_our_variable_and_that_before_torchruns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    assert values_given(parse("x.py"))["max_restarts"].text == "3"
    monkeypatch.setenv("PHALANX_RUN_MAX_RESTARTS", "2")
    assert str(values_given(parse("x.py"))["max_restarts"]) == "PHALANX_RUN_MAX_RESTARTS=2"
    assert str(values_given(parse("--max_restarts=1", "x.py"))["max_restarts"]) == "--max-restarts 1"


def test_a_flag_set_to_0_in_the_environment_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_RUN_STANDALONE", "0")
    assert values_given(parse("x.py")) == {}


def test_the_last_of_two_wins_as_in_torchrun() -> None:
    assert values_given(parse("--nnodes", "1", "--nnodes", "2", "x.py"))["nnodes"].text == "2"


def test_what_follows_target_is_left_alone() -> None:
    ctx = parse("--nnodes", "1", "x.py", "--nnodes", "9", "--a_b", "--", "-m", "")
    assert ctx.params["target"] == "x.py"
    assert ctx.params["args"] == ("--nnodes", "9", "--a_b", "--", "-m", "")


def test_options_without_effect_are_named_with_the_reason() -> None:
    given = values_given(parse("-r", "3", "--tee", "1", "--log-dir", "logs", "x.py"))
    notes = notes_without_effect(given)
    assert [note.split(" has no effect: ")[0] for note in notes] == ["--redirects", "--tee"]
    assert notes[0] == "--redirects has no effect: every rank's output is in its own log."


def test_help_lists_each_option_once_in_one_spelling() -> None:
    text = run_command.get_help(click.Context(run_command, info_name="phalanx run", **CONTEXT_SETTINGS))  # type: ignore[arg-type]
    for option in EVERY_OPTION:
        lines = [
            line
            for line in text.splitlines()
            if line.strip().partition(", ")[2].startswith(f"--{option.name}")
        ]
        lines += [line for line in text.splitlines() if line.startswith(f"  --{option.name}")]
        assert any(f"--{option.name} " in line + " " for line in lines), option.name
    assert "_per_" not in text
    for title in OPTIONS:
        assert f"\n{title}:\n" in text


def test_help_texts_say_the_defaults_of_the_spec() -> None:
    from phalanx.launch.spec import RunSpec, Target

    spec = RunSpec(
        target=Target(kind="script", name="x.py", display="x"), nproc_per_node=1, log_dir=Path("x")
    )
    for key, value in {
        "role": spec.role,
        "max_restarts": spec.max_restarts,
        "monitor_interval": spec.monitor_interval_s,
        "grace_s": f"{spec.grace_s:g}",
        "rdzv_id": spec.rdzv_id,
        "nnodes": spec.nnodes_max,
        "signals_to_handle": ",".join(spec.signals_to_handle),
    }.items():
        assert f"[default: {value}]" in BY_KEY[key].help
