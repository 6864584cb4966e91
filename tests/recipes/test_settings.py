"""Settings: one door for the command line and the file, one message for what is wrong, rank 0 speaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.recipes.mnist import DEFAULTS, MnistSettings
from phalanx.recipes.settings import (
    RunSettings,
    SettingsError,
    is_rank_zero,
    parse,
    read_yaml,
    run_recipe,
    to_yaml,
    training_settings,
)


def _parse(*words: str) -> MnistSettings:
    return parse(MnistSettings, words, prog="mnist")


def test_flags_become_settings() -> None:
    settings = _parse("--data", "digits", "--epochs", "3", "--lr=0.5", "--download", "--no-resume")
    assert (settings.data, settings.epochs, settings.lr) == ("digits", 3, 0.5)
    assert (settings.download, settings.resume, settings.test_only) == (True, False, False)
    assert _parse() == MnistSettings()
    assert _parse("--resume", "--test-only").test_only


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my settings.yaml"
    file.write_text("epochs: 7\nglobal-batch-size: 96\nlr: 1e-3\ndownload: true\nmicro_batch_size: null\n")
    settings = _parse("--config", str(file), "--epochs", "2", "--no-download")
    assert (settings.epochs, settings.global_batch_size, settings.lr) == (2, 96, 1e-3)
    assert settings.download is False
    assert settings.micro_batch_size is None
    assert _parse(f"--config={file}").download is True


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    settings = MnistSettings(data="fashion", epochs=2, lr=3e-7).resolved("fashion")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(training_settings(settings)))
    again = _parse("--config", str(file))
    assert training_settings(again) == training_settings(settings)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("epoch: 3\n", ["'epoch'", "'epochs'"]),
        ("zzz: 3\n", ["'zzz'", "--help"]),
        ("- 1\n", ["list"]),
        ("epochs: [1]\n", ["epochs", "list"]),
        ("download: maybe\n", ["download", "true or false"]),
        ("epochs: {\n", ["cannot be read"]),
    ],
)
def test_a_bad_file_is_one_message(tmp_path: Path, content: str, words: list[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError) as caught:
        _parse("--config", str(file))
    for word in [*words, str(file)]:
        assert word in str(caught.value)


def test_a_missing_file_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml cannot be read"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--epochs", "0"], "--epochs 0"),
        (["--global-batch-size", "-5"], "--global-batch-size -5"),
        (["--micro-batch-size", "0"], "--micro-batch-size 0"),
        (["--num-workers", "-1"], "--num-workers -1"),
        (["--validation-fraction", "1"], "--validation-fraction 1.0"),
        (["--lr", "0"], "--lr 0.0"),
        (["--lr", "nan"], "--lr nan"),
        (["--dropout", "1.5"], "--dropout 1.5"),
        (["--checkpoint-every-steps", "0"], "--checkpoint-every-steps 0"),
    ],
)
def test_a_value_out_of_range_names_its_option(words: list[str], option: str) -> None:
    with pytest.raises(SettingsError) as caught:
        _parse(*words)
    assert str(caught.value).startswith(option)
    assert "Fix:" in str(caught.value)


@pytest.mark.parametrize("words", [["--epochs", "many"], ["--data", "cats"], ["--no-such-option"], ["extra"]])
def test_a_word_that_is_not_understood_ends_with_2(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _parse(*words)
    assert caught.value.code == 2
    out, err = capfd.readouterr()
    assert words[-1] in out + err
    with pytest.raises(SystemExit) as caught:
        parse(MnistSettings, words, prog="mnist", speaks=False)
    assert caught.value.code == 2
    assert capfd.readouterr() == ("", "")


def _fail(settings: RunSettings) -> None:
    raise SettingsError("no data.\nFix: some")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_says_what_is_wrong(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))
    assert is_rank_zero() == (rank == 0)
    for words in ([], ["--epochs", "0"]):
        with pytest.raises(SystemExit) as caught:
            run_recipe(MnistSettings, _fail, words, prog="mnist")
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert (err.count("Fix:") == 1) if rank == 0 else err == ""


def test_without_a_launcher_this_is_rank_0() -> None:
    assert is_rank_zero()


def test_a_partly_set_environment_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as caught:
        run_recipe(MnistSettings, _fail, [], prog="mnist")
    assert caught.value.code == 2
    assert "RANK=1" in capsys.readouterr().err


def test_print_config_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe(MnistSettings, _fail, ["--print-config", "--epochs", "4"], prog="mnist")
    out = capsys.readouterr().out
    assert "epochs: 4\n" in out
    assert "data: auto\n" in out


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from phalanx.recipes.mnist import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for option in (
        "--strategy",
        "--precision",
        "--global-batch-size",
        "--config",
        "--data-dir",
        "--output-dir",
    ):
        assert option in done.stdout


def test_defaults_by_data_set_fill_what_is_left_open() -> None:
    for data in DEFAULTS:
        settings = MnistSettings().resolved(data)
        assert None not in (settings.epochs, settings.global_batch_size, settings.lr, settings.augment)
    assert MnistSettings(epochs=9).resolved("digits").epochs == 9
