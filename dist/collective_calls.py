"""What a rank is about to do with the others, as plain values, and whether several ranks' calls belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.dist.rendezvous import name_ranks

CallOfRank = dict[str, Any]

#: Functions of torch.distributed that every rank of a group has to call.
KINDS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
_INPUTS = ("tensor", "input_tensor", "input", "input_tensor_list")
_PER_RANK_OUTPUTS = ("tensor_list", "gather_list", "output_tensor_list")
_PER_RANK_INPUTS = ("input_list", "scatter_list", "input_tensor_list")
_SAME = ("kind", "op", "root", "dtype")


def describe_call(kind: str, arguments: Mapping[str, Any], ranks: Sequence[int]) -> CallOfRank:
    """One rank's call: kind, reduction, root, and the shapes that others have to match.

    Args:
        kind: One of `KINDS`.
        arguments: By the function's own names, defaults filled in.
        ranks: Of the group, as global ranks.
    """
    call: CallOfRank = {"kind": kind}
    if "op" in arguments:
        call["op"] = str(getattr(arguments["op"], "name", "custom"))
    root = _root(arguments, ranks)
    if root is not None:
        call["root"] = root
    if "object" in kind or kind == "barrier":
        return call
    if kind == "all_to_all":
        _describe_exchange(call, arguments["input_tensor_list"], arguments["output_tensor_list"])
        return call
    tensor = next((arguments[name] for name in _INPUTS if torch.is_tensor(arguments.get(name))), None)
    if kind == "reduce_scatter":
        tensor = arguments.get("output")
    if torch.is_tensor(tensor):
        call["dtype"], call["shape"] = _dtype(tensor), list(tensor.shape)
    if kind == "all_to_all_single":
        _describe_splits(call, arguments, len(ranks))
    for field, names in (("takes", _PER_RANK_OUTPUTS), ("gives", _PER_RANK_INPUTS)):
        for name in names:
            parts = arguments.get(name)
            if isinstance(parts, (list, tuple)) and parts and all(torch.is_tensor(part) for part in parts):
                call[field] = [list(part.shape) for part in parts]
    return call


def _root(arguments: Mapping[str, Any], ranks: Sequence[int]) -> int | None:
    for by_rank, by_group in (("src", "group_src"), ("dst", "group_dst")):
        if arguments.get(by_group) is not None:
            return int(ranks[arguments[by_group]])
        if arguments.get(by_rank) is not None:
            return int(arguments[by_rank])
    if {"src", "dst"} & set(arguments):
        return ranks[0]
    return None


def _describe_exchange(call: CallOfRank, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    call["dtype"] = _dtype(inputs[0]) if inputs else None
    call["gives"] = [list(tensor.shape) for tensor in inputs]
    call["takes"] = [list(tensor.shape) for tensor in outputs]


def _describe_splits(call: CallOfRank, arguments: Mapping[str, Any], size: int) -> None:
    """As lists of shapes, whose first dimension each rank gives to, and takes from, the others."""
    for field, name, splits in (
        ("gives", "input", "input_split_sizes"),
        ("takes", "output", "output_split_sizes"),
    ):
        tensor = arguments[name]
        rows = tensor.shape[0] if tensor.dim() else 1
        counts = arguments.get(splits) or [rows // size] * size
        call[field] = [[int(count), *tensor.shape[1:]] for count in counts]
    del call["shape"]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def explain_mismatch(calls: Mapping[int, CallOfRank], ranks: Sequence[int], backend: str) -> str | None:
    """In words, how the ranks' calls differ; None when they belong together.

    >>> same = {"kind": "all_reduce", "op": "SUM", "dtype": "float32"}
    >>> calls = {0: {**same, "shape": [4], "at": "a.py:1"}, 1: {**same, "shape": [3], "at": "a.py:1"}}
    >>> print(explain_mismatch(calls, [0, 1], "gloo").splitlines()[2])
      rank 1: all_reduce(SUM) of float32 [3], at a.py:1
    >>> explain_mismatch({0: calls[0], 1: calls[0]}, [0, 1], "gloo") is None
    True

    Args:
        calls: By global rank, as `describe_call` gives them, each with ``at``, its place in the code.
        ranks: All of the group.
        backend: Of the group, for what would have happened.
    """
    first = next(iter(calls.values()))
    differ = [name for name in _SAME if any(call.get(name) != first.get(name) for call in calls.values())]
    if not differ and _fits(calls, ranks):
        return None
    kinds = {call["kind"] for call in calls.values()}
    what = kinds.pop() if len(kinds) == 1 else "The next collective"
    groups: dict[str, list[int]] = {}
    for rank, call in calls.items():
        groups.setdefault(f"{_words(call)}, at {call.get('at', '?')}", []).append(rank)
    listed = "".join(f"\n  {name_ranks(members)}: {words}" for words, members in groups.items())
    then = (
        "gloo returns wrong values without an error on some ranks, and others wait or fail"
        if backend == "gloo"
        else "the ranks would hang, or fail"
    )
    return f"{what} differs between ranks:{listed}\nHere {then}.\nFix: {_fix(differ)}"


def _fix(differ: Sequence[str]) -> str:
    if "kind" in differ:
        return "let every rank of the group call the same collectives in the same order, outside of `if rank == 0:`"
    if "dtype" in differ:
        return "convert to one dtype on every rank, as in tensor.float()"
    if differ:
        return "pass the same op, src and dst on every rank"
    return (
        "give it tensors of the same shape on every rank: a sum over the batch rather than one value per sample, padding to "
        "the longest, or gather_objects()"
    )


def _fits(calls: Mapping[int, CallOfRank], ranks: Sequence[int]) -> bool:
    first = next(iter(calls.values()))
    kind = first["kind"]
    if kind in ("all_gather", "gather", "scatter", "all_to_all", "all_to_all_single"):
        return _parts_fit(calls, ranks)
    # A dimension of length 1 more or less changes nothing.
    shapes = {tuple(size for size in call.get("shape", ()) if size != 1) for call in calls.values()}
    return len(shapes) == 1 and len({str(call.get("gives")) for call in calls.values()}) == 1


def _parts_fit(calls: Mapping[int, CallOfRank], ranks: Sequence[int]) -> bool:
    """Whether what each rank makes room for is what the rank on the other side sends."""
    place = {rank: index for index, rank in enumerate(ranks)}
    for taker, call in calls.items():
        for giver, other in calls.items():
            takes, gives = call.get("takes"), other.get("gives")
            if call["kind"] == "scatter":
                takes = None if gives is None else call["shape"]
            elif takes is not None:
                takes = takes[place[giver]] if len(takes) == len(ranks) else None
                if takes is None:
                    return False
            if call["kind"] in ("all_gather", "gather"):
                gives = other.get("shape")
            elif gives is not None:
                if len(gives) != len(ranks):
                    return False
                gives = gives[place[taker]]
            if takes is not None and gives is not None and takes != gives:
                return False
    return True


def _words(call: CallOfRank) -> str:
    text = str(call["kind"])
    if "op" in call:
        text += f"({call['op']})"
    if "shape" in call:
        text += f" of {call['dtype']} {call['shape']}"
    elif call.get("dtype"):
        text += f" of {call['dtype']}"
    if "gives" in call:
        text += f", giving {call['gives']}"
    if "takes" in call:
        text += f", taking {call['takes']}"
    if "root" in call:
        text += f", root {call['root']}"
    return text
