"""Starting a run from what another script saved: a tutorial's dict, or bare weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from phalanx.dist.arguments import require_path
from phalanx.dist.checkpoint_errors import OptimizerMismatchError
from phalanx.dist.checkpoint_sources import Source, read_source
from phalanx.dist.key_rewrites import AVERAGED_ENTRIES, LIVE_ENTRIES
from phalanx.dist.named_optimizer import NamedOptimizer
from phalanx.dist.plain_values import NotPlainError, encode

OPTIMIZER_ENTRIES = ("optimizer", "optimizer_state_dict", "optim", "opt", "optimizer_states")
SCHEDULER_ENTRIES = (
    "scheduler",
    "lr_scheduler",
    "scheduler_state_dict",
    "lr_scheduler_state_dict",
    "lr_schedulers",
)
# Optimizers whose saved state is recognised by an entry of its own.
_TELLING_ENTRY = {"Adam": "exp_avg", "AdamW": "exp_avg", "SGD": "momentum_buffer"}


@dataclass(frozen=True)
class StartingPoint:
    """What a foreign checkpoint holds.

    Attributes:
        name: How to call it in a message.
        content: All of it; the weights are found in there by `load_state_dict`.
        optimizer: The optimizer's own state dict, by parameter number; None if there is none.
        scheduler: The scheduler's state dict; None if there is none.
        epoch: Number of finished epochs.
        values: Everything else that is plain.
    """

    name: str
    content: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    scheduler: Mapping[str, Any] | None
    epoch: int
    values: dict[str, Any]


def is_there(source: Source) -> bool:
    """False for a path at which there is nothing."""
    return isinstance(source, Mapping) or require_path("else_from", source).exists()


def read_starting_point(source: Source) -> StartingPoint:
    """Read a tutorial's dict (``{"model": ..., "optimizer": ..., "epoch": ...}``) or bare weights.

    Raises:
        StateDictError: The file cannot be read; see `load_state_dict`.
    """
    content, name = read_source(source)
    optimizer = _first_mapping(content, OPTIMIZER_ENTRIES)
    epoch = content.get("epoch", 0)
    if isinstance(epoch, Tensor) and epoch.numel() == 1:
        epoch = epoch.item()
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
        epoch = 0
    known = {*LIVE_ENTRIES, *AVERAGED_ENTRIES, *OPTIMIZER_ENTRIES, *SCHEDULER_ENTRIES, "epoch"}
    values = {}
    for key, value in content.items():
        if key in known or isinstance(value, Tensor | nn.Module):
            continue
        try:
            encode(value, key)
        except NotPlainError:
            continue
        values[key] = value
    return StartingPoint(
        name=name,
        content=content,
        optimizer=optimizer if optimizer is not None and "param_groups" in optimizer else None,
        scheduler=_first_mapping(content, SCHEDULER_ENTRIES),
        epoch=epoch,
        values=values,
    )


def _first_mapping(content: Mapping[str, Any], entries: Sequence[str]) -> Mapping[str, Any] | None:
    for entry in entries:
        value = content.get(entry)
        if isinstance(value, list) and len(value) == 1:  # Lightning keeps a list, of one as a rule
            value = value[0]
        if isinstance(value, Mapping):
            return value
    return None


def named_optimizer_state(
    state: Mapping[str, Any], optimizer: NamedOptimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State that goes by parameter numbers, by names: as `export_optimizer` would have written it.

    Raises:
        OptimizerMismatchError: Another number of parameters, or other shapes, or another optimizer's.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    ours = [name for group in optimizer.groups for name in group]
    if len(numbers) != len(ours):
        raise OptimizerMismatchError(
            f"the optimizer was saved with {len(numbers)} parameters in {len(state['param_groups'])} groups, this run's "
            f"has {len(ours)} in {len(optimizer.groups)}: {', '.join(ours[:5])}{', ...' if ours[5:] else ''}.\n"
            "State saved by number cannot be told apart. Fix: optimize the same parameters, or start from the weights "
            "alone: restore(else_from=saved['model'])"
        )
    name_of = dict(zip(numbers, ours, strict=True))
    shapes = optimizer.shapes
    tensors: dict[str, Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        name = name_of[number]
        for entry, value in entries.items():
            if not isinstance(value, Tensor):
                rest.setdefault(name, {})[entry] = encode(value, f"{name}/{entry}")
                continue
            if entry in set(_TELLING_ENTRY.values()) and tuple(value.shape) != shapes[name]:
                raise OptimizerMismatchError(
                    f"the saved optimizer's parameter {number} has {entry} of shape {list(value.shape)}, {name} has "
                    f"{list(shapes[name])}: the order of the parameters is another one.\n"
                    "Fix: build the optimizer from the parameters in the order they were saved in"
                )
            tensors[f"{name}/{entry}"] = value
    kind = optimizer.kind
    found = {key.rpartition("/")[2] for key in tensors}
    wanted = _TELLING_ENTRY.get(kind)
    if wanted is not None and wanted not in found and found & {*_TELLING_ENTRY.values()}:
        raise OptimizerMismatchError(
            f"the saved optimizer's state holds {', '.join(sorted(found))}, which {kind} cannot use.\n"
            "Fix: use the optimizer it was saved from, or start from the weights alone: restore(else_from=saved['model'])"
        )
    groups = [
        {
            "params": [name_of[number] for number in group["params"]],
            "options": {
                key: encode(value, f"param_groups[{position}][{key!r}]")
                for key, value in group.items()
                if key not in {"params", "param_names"}
            },
        }
        for position, group in enumerate(state["param_groups"])
    ]
    return tensors, {"class": kind, "groups": groups, "state": rest, "shared": {}}
