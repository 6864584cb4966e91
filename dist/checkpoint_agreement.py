"""What ranks agree on around a save and a restore: that all of them came, and that all hold the same."""

from __future__ import annotations

from phalanx.dist.checkpoint_errors import CheckpointError
from phalanx.dist.run_state import Restored, RunState
from phalanx.dist.world import RanksMissing, barrier, gather_objects, world_or_single


def meet(what: str, patience_s: float) -> None:
    """Wait for every rank to call ``what``; under `if rank == 0` the others never would.

    Raises:
        CheckpointError: Ranks did not come.
    """
    try:
        barrier(patience_s)
    except RanksMissing as error:
        late = ", ".join(map(str, error.ranks))
        raise CheckpointError(
            f"{what}() waits for every rank, and rank{'s' if error.ranks[1:] else ''} {late} did not call it within "
            f"{patience_s:g} s. Nothing was done.\n"
            f"Fix: call {what}() on every rank, outside any `if rank == 0`; rank 0 writes by itself. If ranks are merely "
            "late, CheckpointManager(..., patience_s=...)"
        ) from error


def refuse_different_steps(steps: list[int]) -> None:
    """Ranks that save at different steps save nothing.

    Raises:
        CheckpointError: They differ.
    """
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"ranks save at different steps: {', '.join(f'rank {r}: {s}' for r, s in enumerate(steps))}. "
            "Nothing was saved.\nFix: let every rank do the same number of steps before it saves"
        )


def compare_ranks(state: RunState, restored: Restored) -> None:
    """Every rank must now hold the same weights, progress and plan: a stale file cache would show here.

    Collective: every rank must call it.

    Raises:
        CheckpointError: They differ; the ranks are named.
    """
    if world_or_single().world_size == 1:
        return
    facts = gather_objects(state.digests())
    for what in ("weights", "progress", "plan"):
        found = [fact[what] for fact in facts]
        if any(value != found[0] for value in found):
            others = [rank for rank, value in enumerate(found) if value != found[0]]
            raise CheckpointError(
                f"after restoring {restored.path or 'the starting point'}, {what} of rank{'s' if others[1:] else ''} "
                f"{', '.join(map(str, others))} differ from rank 0's.\n"
                "Fix: do all ranks read the same file, on storage that is shared and consistent?"
            )
