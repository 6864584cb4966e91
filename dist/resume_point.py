"""Where a run goes on: the progress in a loader's saved state, under the plan that the run has now."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.dist.arguments import require_mapping, short
from phalanx.dist.plan import Plan, Progress

_logger = logging.getLogger(__name__)


def resume_point(state: Mapping[str, Any], plan: Plan, *, owner: str) -> Progress:
    """The progress to go on from, counted in steps of ``plan``.

    Args:
        state: What the loader's ``state_dict()`` returned.
        plan: Of the loader that goes on.
        owner: Its class, for messages.

    Raises:
        ValueError: The state was taken within an epoch of another plan, and its rest would be that of other data.
    """
    require_mapping("state", state, f"what {owner}.state_dict() returned")
    if "progress" not in state:
        raise ValueError(f"state={short(state)} has no progress.\nFix: what {owner}.state_dict() returned")
    progress, then = Progress.from_dict(state["progress"]), dict(state.get("plan", {}))
    now = plan.to_dict()
    differ = [name for name in now if name in then and then[name] != now[name]]
    if progress.step_in_epoch == 0:
        if differ:
            _logger.warning("the run goes on with another %s", _differences(differ, then, now))
    elif differ == ["global_batch_size"]:
        progress = replace(progress, step_in_epoch=_steps_of(plan, progress, then["global_batch_size"]))
    elif differ:
        raise ValueError(
            f"the run stopped within epoch {progress.epoch} with another {_differences(differ, then, now)}: "
            "the rest of its order would be that of other data.\n"
            "Fix: the same settings until that epoch ends, or start from a checkpoint of an epoch's end"
        )
    if progress.step_in_epoch > plan.steps_per_epoch:
        raise ValueError(
            f"the state stands at step {progress.step_in_epoch} of an epoch of {plan.steps_per_epoch}."
        )
    return progress


def _steps_of(plan: Plan, progress: Progress, then: int) -> int:
    """How many of the plan's steps were seen, in steps of ``then`` samples."""
    consumed = min(progress.step_in_epoch * then, plan.num_items)
    if consumed == plan.num_items:
        return plan.steps_per_epoch
    step_in_epoch, rest = divmod(consumed, plan.global_batch_size)
    if rest:
        raise ValueError(
            f"the run stopped {consumed} samples into epoch {progress.epoch} with global_batch_size={then}: that is no "
            f"whole number of steps of {plan.global_batch_size}, samples would be repeated or left out.\n"
            f"Fix: global_batch_size={then} until that epoch ends"
        )
    return step_in_epoch


def _differences(names: list[str], then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({then[name]!r} then, {now[name]!r} now)" for name in names)
