"""The `phalanx` command and its subcommands; nothing here imports torch, and each loads only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module

import click

from phalanx import __version__

#: `--log_dir` is `--log-dir`, for every command and option.
CONTEXT_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "max_content_width": 110,
}

#: In the order of `phalanx --help`: command `x` is `x_command` in phalanx.launch.x_command.
COMMANDS = ("run", "doctor", "explain", "gpus", "fit", "bench", "ckpt", "bisect", "recipes", "completion")


class _OnDemand(MutableMapping[str, click.Command]):
    """Commands by name, each imported at its first use: `phalanx run` pays for no other's imports."""

    def __init__(self) -> None:
        self._loaded: dict[str, click.Command] = {}
        self._names = dict.fromkeys(COMMANDS)

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._loaded:
            module = import_module(f"phalanx.launch.{name}_command")
            self._loaded[name] = getattr(module, f"{name}_command")
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._names[name] = None
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._names[name]
        self._loaded.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Commands, context_settings=CONTEXT_SETTINGS)
@click.version_option(__version__, prog_name="phalanx", message="%(prog)s %(version)s")
def phalanx() -> None:
    """Train with PyTorch on many GPUs and many nodes, and be told what is wrong when that fails."""


phalanx.commands = _OnDemand()
