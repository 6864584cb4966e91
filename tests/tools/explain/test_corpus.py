"""Messages of torch, NCCL, DeepSpeed, Slurm .. each explained by the right cause; healthy logs by none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.tools.explain import explain_paths, explain_text
from phalanx.tools.explain.rules import BY_ID

CORPUS = Path(__file__).parent / "corpus"


def messages() -> Iterator[tuple[str, str, str]]:
    """Each message with its diagnosis and where its wording is from."""
    for block in (CORPUS / "messages.txt").read_text().split("\n=== ")[1:]:
        head, _, text = block.partition("\n")
        diagnosis, _, origin = head.partition(" | ")
        yield diagnosis, origin, text + "\n"


MESSAGES = list(messages())
STEPS = "".join(f"epoch 1 step {step} loss 0.{step}\n" for step in range(10, 40))


def first_of(text: str | bytes) -> str:
    explanation = explain_text(text)
    return explanation.diagnoses[0].id if explanation.diagnoses else explanation.outcome


def test_the_corpus_is_as_large_as_promised() -> None:
    assert len(MESSAGES) >= 150
    assert {diagnosis for diagnosis, _, _ in MESSAGES} <= {*BY_ID, "unknown"}


#: The least that must be known: the run logs' part of the shared vocabulary.
RUN_LOG_IDS = """cuda-oom cuda-oom-fragmentation cuda-oom-other-process cublas-oom-in-disguise cudnn-oom-in-disguise
nccl-cuda-oom host-oom-kill shm-too-small too-many-open-files disk-full checkpoint-corrupted torch-load-weights-only
state-dict-module-prefix state-dict-size-mismatch checkpoint-loaded-on-gpu0 ddp-unused-parameters ddp-param-ready-twice
ddp-inplace-buffer ddp-model-mismatch fsdp-mixed-params checkpointing-without-input-grads batchnorm-batch-of-one
collate-size-mismatch label-out-of-range index-out-of-bounds fp16-overflow cuda-illegal-memory-access
cuda-in-forked-worker worker-segfault main-guard-missing process-group-not-initialized launcher-env-missing
local-rank-argument invalid-device-ordinal fewer-gpus-than-requested nccl-duplicate-gpu port-in-use
every-process-is-rank0 launcher-started-many-times rendezvous-no-host rendezvous-timeout stale-rendezvous-file
sighup-terminal-closed collective-mismatch nccl-message-truncated nccl-timeout-slow-rank0 nccl-timeout-uneven-ranks
nccl-timeout-during-save nccl-timeout-unknown nccl-cpu-tensor nccl-peer-access nccl-socket-ifname-wrong
nccl-network-unreachable nccl-ib-timeout gpu-ecc-error cuda-home-missing deepspeed-cuda-mismatch
deepspeed-op-load-failed deepspeed-batch-size ninja-missing gcc-too-new-for-nvcc triton-libcuda-not-found
cudnn-library-not-found"""


@pytest.mark.parametrize("name", RUN_LOG_IDS.split())
def test_every_cause_of_the_vocabulary_is_known(name: str) -> None:
    rule = BY_ID[name]
    assert rule.cause
    assert rule.fix


@pytest.mark.parametrize(
    ("diagnosis", "text"), [(d, t) for d, _, t in MESSAGES], ids=[f"{d}: {o}" for d, o, _ in MESSAGES]
)
def test_a_message_is_explained(diagnosis: str, text: str) -> None:
    assert first_of(text) == diagnosis


def _quoted(text: str) -> str:
    return (
        "I get this:\n```\n" + "".join(f"> {line}\n" for line in text.splitlines()) + "```\nWhat can I do?\n"
    )


def _under_torchrun(text: str) -> str:
    if "[rank" in text or "[Rank" in text:
        pytest.skip("names its ranks itself")
    return "".join(f"[rank2]: {line}\n" for line in text.splitlines())


def _in_colour(text: str) -> str:
    return "".join(f"\x1b[31m{line}\x1b[0m\n" for line in text.splitlines())


DRESSES = {
    "after the steps of a run": lambda text: STEPS + text,
    "in Markdown, quoted": _quoted,
    "in colour": _in_colour,
    "with carriage returns": lambda text: "Epoch 0: 10%\r" + text.replace("\n", "\r\n"),
    "with time stamps": lambda text: "".join(
        f"2026-03-01 10:00:0{number % 10},123 - {line}\n" for number, line in enumerate(text.splitlines())
    ),
    "from rank 2": _under_torchrun,
    "in UTF-16": lambda text: text.encode("utf-16"),
}


@pytest.mark.parametrize("dress", DRESSES)
def test_messages_are_explained_in_any_dress(dress: str) -> None:
    """Not each message stands every dress (a shell's `Killed` behind a time stamp): nearly all do."""
    missed = []
    for diagnosis, _, text in MESSAGES:
        try:
            if first_of(DRESSES[dress](text)) != diagnosis:
                missed.append(diagnosis)
        except pytest.skip.Exception:
            continue
    assert len(missed) <= 0.05 * len(MESSAGES), missed


def test_the_first_of_two_failures_on_two_ranks_is_named() -> None:
    """The cause of one rank, then what its end looks like from the others."""
    chooser = random.Random(0)
    after = (
        "[rank0]: RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.1]:4321\n"
        "[rank0]:[E1130 10:00:00.120 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600031 milliseconds\n"
        "W0301 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 4 closing signal SIGTERM\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    )
    wrong = []
    for diagnosis, _, text in chooser.sample(MESSAGES, 120):
        if diagnosis == "unknown" or "[rank" in text or "timeout" in diagnosis or "no-host" in diagnosis:
            continue
        log = "".join(f"[rank1]: {line}\n" for line in text.splitlines()) + after
        explanation = explain_text(log)
        if not explanation.diagnoses or explanation.diagnoses[0].id not in (diagnosis, "ddp-inplace-buffer"):
            wrong.append((diagnosis, [d.id for d in explanation.diagnoses]))
    assert len(wrong) <= 5, wrong


@pytest.mark.parametrize("path", sorted((CORPUS / "healthy").iterdir()), ids=lambda path: path.stem)
def test_a_healthy_log_has_no_failure(path: Path) -> None:
    explanation = explain_paths([path])
    assert (explanation.outcome, explanation.diagnoses) == ("no-failure", ())


@pytest.mark.parametrize(
    "text", ["loss 0.5\n" * 10, "hello\n", "Error rate: 0.5\n", "the word error, and a failure\n"]
)
def test_words_alone_are_no_failure(text: str) -> None:
    assert explain_text(text).outcome == "no-failure"


def test_an_empty_log_is_not_called_healthy() -> None:
    assert explain_text("").outcome == "unknown"
