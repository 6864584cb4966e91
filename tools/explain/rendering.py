"""An explanation as a few lines of text."""

from __future__ import annotations

from phalanx.tools.explain.explanation import Diagnosis, Explanation


def render(explanation: Explanation) -> str:
    """What `phalanx explain` prints: the cause, where, what to do, and what else it may be."""
    if explanation.outcome == "no-failure":
        count = explanation.line_count
        return f"No failure in {count} line{'' if count == 1 else 's'}."
    if not explanation.diagnoses:
        return "\n".join(_unknown(explanation))
    best, *others = explanation.diagnoses
    lines = [f"Cause: {best.id}{_of_rank(best)}: {best.cause}."]
    if best.where:
        lines.append(f"At: {best.where}")
    lines += [f"Fix: {fix}" for fix in best.fix]
    lines += [f"Look also at: {look}" for look in best.look]
    lines += [f"Seen: {evidence}" for evidence in best.evidence]
    lines += [f"Or: {other.id}{_of_rank(other)}: {other.cause}." for other in others]
    return "\n".join(lines)


def _of_rank(diagnosis: Diagnosis) -> str:
    return "" if diagnosis.rank is None else f" (rank {diagnosis.rank})"


def _unknown(explanation: Explanation) -> list[str]:
    first = explanation.first_failure
    if explanation.line_count == 0:
        return [
            "Nothing to explain: the log is empty.",
            "Fix: name the log of the ranks, or pipe it in: phalanx explain -",
        ]
    if first is None:
        return [
            "The run failed, and the log does not say why.",
            "Fix: look at the logs of the other ranks: phalanx explain FOLDER; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL say more",
        ]
    rank = "" if first.rank is None else f" on rank {first.rank}"
    lines = [
        f"Unknown cause. The first exception{rank} is {first.exception}: {first.message or 'without a message'}"
    ]
    if first.where:
        lines.append(f"At: {first.where}")
    lines.append(f"Seen: {first.place}")
    return lines
