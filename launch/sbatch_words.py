"""The words of ``--sbatch``, as sbatch would read them."""

from __future__ import annotations

import shlex

from phalanx.launch.options import Given
from phalanx.tools.usage import UsageMistake

#: sbatch's short options that take a value, by their long names.
LONG = {
    "-A": "account", "-a": "array", "-B": "extra-node-info", "-b": "begin", "-C": "constraint", "-c": "cpus-per-task",
    "-D": "chdir", "-d": "dependency", "-e": "error", "-F": "nodefile", "-G": "gpus", "-i": "input", "-J": "job-name",
    "-L": "licenses", "-M": "clusters", "-m": "distribution", "-N": "nodes", "-n": "ntasks", "-o": "output",
    "-p": "partition", "-q": "qos", "-S": "core-spec", "-t": "time", "-w": "nodelist", "-x": "exclude",
}  # fmt: skip
_FLAGS = frozenset({"-H", "-h", "-I", "-k", "-O", "-Q", "-s", "-v", "-W"})
#: Long options that need no value: a word after one is no value of it.
_LONG_FLAGS = frozenset(
    {
        "contiguous", "exclusive", "hold", "kill-on-invalid-dep", "no-kill", "overcommit", "oversubscribe", "parsable",
        "quiet", "reboot", "requeue", "no-requeue", "spread-job", "test-only", "use-min-nodes", "verbose", "wait",
        "get-user-env", "nice", "propagate", "export-file", "immediate", "ignore-pbs",
    }
)  # fmt: skip
#: What the script decides, and why.
_OURS = {
    "ntasks": "the script starts one agent per node",
    "ntasks-per-node": "the script starts one agent per node, and --nproc-per-node says how many ranks it has",
    "ntasks-per-gpu": "the script starts one agent per node",
    "wrap": "the script is what is run",
    "array": "the tasks of an array would be jobs of the same name that resume each other's checkpoints",
    "no-requeue": "the script goes back into the queue after it has saved",
    "open-mode": "a requeued job must not overwrite its output",
}


def options_of(given: Given | None) -> list[tuple[str, str | None]]:
    """Option and value, in their order: ``-A acct --exclusive`` is ``[("-A", "acct"), ("--exclusive", None)]``.

    Raises:
        UsageMistake: A word is no option of sbatch's, lacks its value, or is decided by the script.
    """
    if given is None:
        return []
    try:
        words = shlex.split(given.text)
    except ValueError as error:
        raise UsageMistake(f"{given}: {error}.", fix="--sbatch '-A account -p gpu -t 4:00:00'") from None
    found: list[tuple[str, str | None]] = []
    while words:
        found.append(_next_option(given, words))
    for name in given_by(found):
        if name in _OURS:
            raise UsageMistake(
                f"--sbatch: --{name} does not go with --emit slurm: {_OURS[name]}.",
                fix=f"leave {name} out of --sbatch",
            )
    _check_signal(found)
    return found


def _next_option(given: Given, words: list[str]) -> tuple[str, str | None]:
    word = words.pop(0)
    if "\n" in word or not word.startswith("-") or word in ("-", "--"):
        raise UsageMistake(
            f"--sbatch: {word!r} is no option of sbatch's; it would take it for the name of a script.",
            fix="--sbatch '-A account -p gpu -t 4:00:00', options alone",
        )
    if not word.startswith("--"):
        short = word[:2]
        if short in _FLAGS:
            return word, None
        if short not in LONG:
            raise UsageMistake(f"--sbatch: sbatch has no option {short}.", fix="sbatch --help lists them")
        return short, word[2:] or _value(short, words)
    name, equals, value = word.partition("=")
    if equals:
        return name, value
    if name[2:] in _LONG_FLAGS or not words or words[0].startswith("-"):
        return name, None
    return name, words.pop(0)


def _value(option: str, words: list[str]) -> str:
    if not words or "\n" in words[0]:
        raise UsageMistake(f"--sbatch: {option} has no value.", fix=f"{option} VALUE")
    return words.pop(0)


def given_by(words: list[tuple[str, str | None]]) -> dict[str, str]:
    """Values by long name, the last one where an option comes twice, as for sbatch."""
    return {LONG.get(name, name.removeprefix("--")): value or "" for name, value in words}


def _check_signal(words: list[tuple[str, str | None]]) -> None:
    value = given_by(words).get("signal")
    if value is not None and not value.upper().replace("SIGUSR1", "USR1").startswith("B:USR1@"):
        raise UsageMistake(
            f"--sbatch: --signal={value}: the script saves and requeues itself on USR1 to the batch shell, and would "
            "not hear of the time limit.",
            fix="--signal=B:USR1@300, or leave it out",
        )


def seconds_of(text: str) -> int | None:
    """A time limit in seconds, in sbatch's forms; None for one without a limit, or another form.

    >>> [seconds_of(text) for text in ("90", "10:30", "4:00:00", "1-12", "2-0:30", "UNLIMITED")]
    [5400, 630, 14400, 129600, 174600, None]
    """
    days, dash, rest = text.strip().rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in parts) or (dash and not days.isdecimal()) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(numbers) == 3:
        return numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)
