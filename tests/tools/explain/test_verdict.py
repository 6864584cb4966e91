"""Who failed first, what is a cause and what a consequence, and what is left unsaid."""

from __future__ import annotations

import pytest

from phalanx.tools.explain import explain_text, render
from phalanx.tools.explain.lines import make_line, split_prefix
from phalanx.tools.explain.memory_words import memory_of
from phalanx.tools.explain.tracebacks import Tracebacks, user_frame

TRACE = 'Traceback (most recent call last):\n  File "/h/train.py", line 12, in main\n    loss.backward()\n'
SITE = '  File "/opt/env/lib/python3.11/site-packages/torch/_tensor.py", line 5, in backward\n    run()\n'
TIMEOUT = (
    "[rank{rank}]:[E1130 10:00:00.120 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600031 milliseconds.\n"
)


def from_rank(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def found(text: str) -> list[tuple[str, int | None]]:
    return [(diagnosis.id, diagnosis.rank) for diagnosis in explain_text(text).diagnoses]


# --------------------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("text", "rank", "label", "rest"),
    [
        ("[rank3]:   File 'a'", 3, "", "  File 'a'"),
        ("[rank 3] text", 3, "", "text"),
        ("[rank 3] [rank3]: text", 3, "", "text"),
        ("[default2]:text", 2, "", "text"),
        ("[1,5]<stderr>:text", 5, "1,5", "text"),
        ("3: text", 3, "", "text"),
        ("worker-0: text", None, "worker-0", "text"),
        ("10.0.0.7: text", None, "10.0.0.7", "text"),
        ("(RayTrainWorker pid=77, ip=10.0.0.7) text", None, "RayTrainWorker pid=77, ip=10.0.0.7", "text"),
        ("2026-03-01T10:00:00.123456789Z stderr F text", None, "", "text"),
        ("[2026-03-01 10:00:00,123] [ERROR] text", None, "", "text"),
        ("E1130 10:00:00.123456 77 torch/x/api.py:12] text", None, "", "text"),
        ("> > text", None, "", "text"),
        ("Epoch 0: 10%|##   | 1/10 [00:01<00:09, 1.0it/s]text", None, "", "text"),
        ("plain text: 3", None, "", "plain text: 3"),
    ],
)
def test_prefixes(text: str, rank: int | None, label: str, rest: str) -> None:
    assert split_prefix(text) == (rest, rank, label)


def test_a_rank_inside_the_line_counts() -> None:
    data = b"[E ProcessGroupNCCL.cpp:828] [Rank 6] Watchdog caught"
    assert make_line(data, source="", number=1, order=1, rank=None, time=None).rank == 6


def test_interleaved_tracebacks_are_put_together() -> None:
    one = from_rank(1, TRACE + SITE + "KeyError: 'one'").splitlines()
    two = from_rank(2, TRACE.replace("12", "99") + "KeyError: 'two'").splitlines()
    mixed = [line for pair in zip(one, two + [""] * len(one), strict=False) for line in pair if line]
    assembled = Tracebacks()
    for number, text in enumerate(mixed):
        assembled.feed(make_line(text.encode(), source="", number=number, order=number, rank=None, time=None))
    by_rank = {traceback.head.rank: traceback for traceback in assembled.closed}
    assert {rank: t.message for rank, t in by_rank.items()} == {1: ["'one'"], 2: ["'two'"]}
    frames = {rank: user_frame(t) for rank, t in by_rank.items()}
    assert {rank: frame and frame.line for rank, frame in frames.items()} == {1: 12, 2: 99}


# --------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.10 GiB is free. "
            "Process 77 has 9.00 GiB memory in use. Including non-PyTorch memory, this process has 13.90 GiB memory in use.",
            "cuda-oom-other-process",
            "GPU 0: asked for 2.5 GiB with 1.1 GiB free of 24 GiB; 9 GiB held by another process (77)",
        ),
        (
            "CUDA out of memory. Tried to allocate 256.00 MiB (GPU 1; 11.17 GiB total capacity; 5.10 GiB already allocated; "
            "90.81 MiB free; 10.62 GiB reserved in total by PyTorch)",
            "cuda-oom-fragmentation",
            "GPU 1: asked for 256 MiB with 90.8 MiB free of 11.2 GiB; torch uses 5.1 GiB; it holds 5.5 GiB more in free pieces",
        ),
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.92 GiB total capacity; 9.93 GiB already allocated; "
            "10.06 MiB free; 4.50 MiB cached)",
            "cuda-oom",
            "GPU 0: asked for 20 MiB with 10.1 MiB free of 10.9 GiB; torch uses 9.9 GiB; it holds 4.5 MiB more in free pieces",
        ),
        ("CUDA error: out of memory", "cuda-oom", ""),
        (
            "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 0 bytes is free. "
            "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use.",
            "cuda-oom",
            "GPU 0: asked for 1 GiB with 0 bytes free of 16 GiB",
        ),
    ],
)  # fmt: skip
def test_memory_in_words(text: str, kind: str, words: str) -> None:
    memory = memory_of(text)
    assert (memory.kind, memory.words) == (kind, words)


# --------------------------------------------------------------------------- causes and consequences


def test_a_cause_beats_a_timeout_before_it() -> None:
    log = TIMEOUT.format(rank=0, seq=7) + from_rank(1, TRACE + "IndexError: Target 9 is out of bounds.")
    assert found(log) == [("label-out-of-range", 1)]


def test_an_unknown_error_of_another_rank_is_no_timeout() -> None:
    log = from_rank(1, TRACE + "ValueError: odd") + TIMEOUT.format(rank=0, seq=7)
    explanation = explain_text(log)
    assert explanation.outcome == "unknown"
    assert explanation.first_failure is not None
    assert (explanation.first_failure.rank, explanation.first_failure.exception) == (1, "ValueError")
    assert explanation.first_failure.where == "/h/train.py:12 in main: loss.backward()"


def test_the_first_of_two_causes_is_named_first() -> None:
    one = from_rank(2, TRACE + "IndexError: Target 9 is out of bounds.")
    two = from_rank(0, TRACE + "FileNotFoundError: [Errno 2] No such file or directory: 'x.pt'")
    assert found(one + two) == [("label-out-of-range", 2), ("file-not-found", 0)]
    assert found(two + one) == [("file-not-found", 0), ("label-out-of-range", 2)]


def test_the_launchers_own_report_decides() -> None:
    one = from_rank(2, TRACE + "IndexError: Target 9 is out of bounds.")
    two = from_rank(0, TRACE + "FileNotFoundError: [Errno 2] No such file or directory: 'x.pt'")
    report = "First failure: rank 0 (local rank 0, node 0): FileNotFoundError: x\n"
    assert found(one + two + report)[0] == ("file-not-found", 0)


def test_a_chain_of_exceptions_ends_with_the_user_frame() -> None:
    log = (
        TRACE + "KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n" + TRACE.replace("12", "15")
        + "RuntimeError: Ninja is required to load C++ extensions\n"
    )  # fmt: skip
    (best,) = explain_text(log).diagnoses
    assert (best.id, best.where) == ("ninja-missing", "/h/train.py:15 in main: loss.backward()")


def test_positions_of_uneven_ranks_are_told() -> None:
    log = TIMEOUT.format(rank=0, seq=901) + TIMEOUT.format(rank=1, seq=901) + TIMEOUT.format(rank=2, seq=897)
    best = explain_text(log).diagnoses[0]
    assert best.id == "nccl-timeout-uneven-ranks"
    assert "rank 2 at number 897; ranks 0, 1 at number 901" in best.cause


def test_processes_that_all_are_rank_0() -> None:
    log = "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/1\n" * 4 + "epoch 1 step 1 loss 0.5\n"
    (best,) = explain_text(log).diagnoses
    assert best.id == "every-process-is-rank0"
    assert best.cause.startswith("4 processes")


def test_processes_on_gpu_0_beside_their_own() -> None:
    rows = [(0, 100), (0, 101), (0, 102), (1, 101), (2, 102)]
    log = "".join(f"|    {gpu}   N/A  N/A     {pid}      C   python    725MiB |\n" for gpu, pid in rows)
    (best,) = explain_text(log).diagnoses
    assert best.id == "checkpoint-loaded-on-gpu0"
    assert "101, 102" in best.cause


def test_a_wrapped_message_is_put_together() -> None:
    log = "RuntimeError: stack expects each tensor to be\nequal size, but got [3] at entry 0 and [4] at entry 1\n"
    assert found(log) == [("collate-size-mismatch", None)]


# --------------------------------------------------------------------------- text


def test_the_text_is_short_and_ordered() -> None:
    text = render(explain_text(from_rank(1, TRACE + "IndexError: Target 9 is out of bounds."), name="a.log"))
    heads = [line.partition(":")[0] for line in text.splitlines()]
    assert heads == ["Cause", "At", "Fix", "Fix", "Seen"]
    assert render(explain_text(TRACE + "ValueError: odd", name="a.log")) == (
        "Unknown cause. The first exception is ValueError: odd\nAt: /h/train.py:12 in main: loss.backward()\nSeen: a.log:4"
    )
    assert render(explain_text("loss 1\n")) == "No failure in 1 line."
    assert render(explain_text("")).startswith("Nothing to explain: the log is empty.\nFix: ")
