"""What else a log tells: facts that decide between causes, signs of an end, and signs of health."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from phalanx.tools.explain.events import Line


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A line that decides something later. ``when`` is as in `Rule`."""

    name: str
    when: tuple[str, ...]
    pattern: str
    once: bool = False  # the first line tells all

    def search(self, text: str) -> re.Match[str] | None:
        """Where the pattern fits a line."""
        return _compiled(self.pattern).search(text)

    def may_fit(self, raw: str) -> bool:
        """Whether it can fit a line whose prefixes are still there."""
        return "^" in self.pattern or self.search(raw) is not None


_CACHE: dict[str, re.Pattern[str]] = {}


def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern not in _CACHE:
        _CACHE[pattern] = re.compile(pattern, re.IGNORECASE)
    return _CACHE[pattern]


FACTS = (
    Fact(
        name="distributed", once=True,
        when=("distributed", "nccl", "torchrun", "ddp", "local_rank", "childfailed", "world_size", "syncbatchnorm"),
        pattern=r"DistributedDataParallel|torch[./]distributed|torchrun|ProcessGroup|\bDDP\b|local_rank|ChildFailedError|WORLD_SIZE|SyncBatchNorm",
    ),
    Fact(
        name="work",
        when=("last enqueued",),
        pattern=r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)",
    ),
    Fact(
        name="first-failure",
        when=("first failure: rank",),
        pattern=r"First failure: rank (?P<rank>\d+) \(local rank (?P<local_rank>\S{1,6}), node (?P<node>\S{1,6})\)",
    ),
    Fact(name="root-cause", when=("root cause (first observed",), pattern=r"Root Cause \(first observed failure\)"),
    Fact(name="rank-row", when=("(local_rank:",), pattern=r"^\s{0,4}rank {0,8}: (?P<rank>\d+) \(local_rank: \d+\)"),
    Fact(
        name="rank-zero-of-one",
        when=("global_rank: ", "distributed init", "world size", "world_size", "process rank: ", "not using distributed", "member: "),
        pattern=r"GLOBAL_RANK: 0, MEMBER: 1/|distributed init \(rank 0\)|\brank ?[:=]? ?0\b[^\n]{0,30}(?:world[ _]size ?[:=]? ?|of |/)1\b|world[ _]size ?[:=] ?1\b|Process rank: (?:0|-1), [^\n]{0,60}distributed training: False|Not using distributed mode",
    ),
    Fact(
        name="gpu-process",
        when=("mib |", "mib|"),
        pattern=r"^\|\s{1,6}(?P<gpu>\d{1,2})\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(?P<pid>\d{2,8})\s+[CG+]{1,3}\s+\S[^|\n]{0,60}\d+MiB",
    ),
    Fact(name="slurm", once=True, when=("slurm", "srun"), pattern=r"\bslurm|\bsrun\b"),
    Fact(name="jetson", once=True, when=("jetson", "tegra"), pattern=r"jetson|tegra"),
    Fact(
        name="visible-devices",
        when=("cuda_visible_devices",),
        pattern=r"CUDA_VISIBLE_DEVICES['\"]?\]? ?[=:] ?['\"]?(?P<value>[\w,.-]{0,80})",
    ),
    Fact(
        name="no-oom-sign", once=True,
        when=("no sign of the oom killer",),
        pattern=r"no sign of the OOM killer",
    ),
    Fact(
        name="launcher-banner",
        when=("setting omp_num_threads environment variable",),
        pattern=r"Setting OMP_NUM_THREADS environment variable for each process",
    ),
    Fact(name="operand", when=("unsupported operand",), pattern=r"Unsupported operand (?P<code>\d{1,3})\b"),
    Fact(name="phalanx-report", when=("then rank",), pattern=r"^Then rank \d+ \([\d.]+ s (?:later|before)"),
)  # fmt: skip

#: Lines with which a launcher, a scheduler, the shell or the interpreter says that it is over.
SIGNS = Fact(
    name="end",
    when=(
        "childfailederror", ".py failed", "failed (exitcode", "first failure", "srun: error", "slurmstepd: error", "non-zero exit status",
        "core dumped", "terminate called", "fatal python error", "exitcode", "exits with return code", "aborted", "killed",
        "segmentation fault", "bus error", "exit code", "killing subprocess",
    ),
    pattern=r"ChildFailedError|First failure: rank|srun: error:|slurmstepd: error: \*\*\*|returned non-zero exit status [1-9-]"
    r"|\(core dumped\)|terminate called|^Fatal Python error|exitcode ?: ?-?[1-9]|exits with return code = -?[1-9]"
    r"|^(?:Killed|Aborted|Segmentation fault|Bus error|Illegal instruction)\b|\bexit(?:ed with)? (?:exit )?code:? -?[1-9]"
    r"|^\S{1,80}\.py FAILED|failed \(exitcode|Killing subprocess",
)  # fmt: skip

#: Training that goes on. Only numbers beside such a word count: prose has the words alone.
_PROGRESS = re.compile(
    r"\b(?:epochs?|steps?|global_step|iter(?:ation)?s?|batch|round)\b[\]\[ :=#/]{0,4}\d|\b(?:train_|val_|eval_)?loss\b[\"' :=]{1,4}-?\d"
    r"|\b(?:acc(?:uracy)?|lr|ppl|samples/s|throughput|tokens/s)\b[\"' :=]{1,4}-?\d|\d+%\|.{0,60}\||\d(?:it/s|s/it)\b",
    re.IGNORECASE,
)
_SUCCESS = re.compile(
    r"\b(?:training|run|job|fine-?tuning|evaluation|experiment|pipeline|script)\b.{0,40}\b(?:complete|completed|finished|done|succeeded|successful(?:ly)?)\b"
    r"|^(?:done|finished|completed|success)[.! ]{0,3}(?:in [\d.:]+ ?\w*)?$|\b(?:best|final) (?:model|accuracy|checkpoint|loss)\b.{0,40}(?:saved|\d)"
    r"|max_steps=\d+` reached|max_epochs=\d+` reached|All \d+ ranks finished|exited? with (?:exit )?code:? 0\b|State: COMPLETED",
    re.IGNORECASE,
)
_NEGATED = re.compile(r"\b(?:not|never|un|fail|error|exception|abort)", re.IGNORECASE)
#: One of these is in each text that the expressions above fit; looking for them costs much less.
_STEP_WORDS = (
    "epoch",
    "step",
    "iter",
    "batch",
    "round",
    "loss",
    "acc",
    "lr",
    "ppl",
    "/s",
    "throughput",
    "%|",
    "s/it",
)
_SUCCESS_WORDS = ("complete", "finish", "done", "succe", "best", "final", "reached", "code 0", "code: 0")
MANY_STEPS = 1000  # a sentence about success counts as much as this


def health_of(text: str) -> int:
    """How far a line speaks for a run that goes on: 0, 1 (a step), or `MANY_STEPS` (it says that all is well).

    >>> health_of("epoch 3 step 17 loss 0.5"), health_of("Training finished."), health_of("KeyError: 'epoch 3'")
    (1, 1000, 0)
    """
    text = text[:400]
    lower = text.lower()
    if any(word in lower for word in _SUCCESS_WORDS) and _SUCCESS.search(text) and not _NEGATED.search(text):
        return MANY_STEPS
    if not any(word in lower for word in _STEP_WORDS) or "Error" in text[:120] or "Traceback" in text:
        return 0
    return 1 if _PROGRESS.search(text) else 0


@dataclass
class Facts:
    """The facts of a log, with the first lines that tell each."""

    lines: dict[str, list[tuple[Line, dict[str, str]]]] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)

    def add(self, name: str, line: Line, groups: dict[str, str]) -> None:
        known = self.lines.setdefault(name, [])
        if len(known) < 4096:
            known.append((line, groups))

    def has(self, name: str) -> bool:
        return name in self.lines

    def of(self, name: str) -> list[tuple[Line, dict[str, str]]]:
        return self.lines.get(name, [])

    @property
    def is_distributed(self) -> bool:
        return self.has("distributed") or len(self.ranks) > 1

    @property
    def first_rank(self) -> int | None:
        """The rank that a launcher's own report names as the first to fail."""
        for _, groups in self.of("first-failure"):
            return int(groups["rank"])
        causes = self.of("root-cause")
        if causes:
            after = [groups for line, groups in self.of("rank-row") if line.order > causes[-1][0].order]
            if after:
                return int(after[0]["rank"])
        return None
