"""Which tensors of a checkpoint are the model's weights, and which of them fit another model's keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.dist.key_matches import Match, Mismatch
from phalanx.dist.key_rewrites import (
    AVERAGED_ENTRIES,
    LIVE_ENTRIES,
    AmbiguousKeysError,
    Pairing,
    Shape,
    StateDictError,
    fits,
    pair_keys,
    sample_names,
)
from phalanx.tools.ckpt.contents import Contents, Entry
from phalanx.tools.ckpt.pickle_values import Call
from phalanx.tools.ckpt.torch_values import mapping_of, module_entries, tensor_of
from phalanx.tools.ckpt.tree import name_of

_MAX_DEPTH = 3


@dataclass(frozen=True)
class Weights:
    """One entry of a checkpoint that holds weights.

    Attributes:
        container: Its path, such as ``state_dict``; "" for the top.
        entries: By the key within it.
        value: The pickle's description of it; None in formats without a pickle.
        others: Paths of other entries that hold tensors.
    """

    container: str
    entries: Mapping[str, Entry]
    value: Any = None
    others: tuple[str, ...] = field(default=())

    @property
    def shapes(self) -> dict[str, Shape | None]:
        return {key: entry.shape for key, entry in self.entries.items()}


def candidates(contents: Contents) -> list[Weights]:
    """Every entry that could be a model's weights."""
    by_key = {entry.key: entry for entry in contents.entries}
    if contents.root is None:
        return _by_prefix(contents)
    found = []
    for path, keys, value in _state_dicts(contents.root, (), _MAX_DEPTH):
        prefix = "".join(f"{part}." for part in path)
        entries = {key: by_key[prefix + key] for key in keys if prefix + key in by_key}
        if entries:
            found.append(Weights("/".join(path), entries, value))
    return found


def _state_dicts(
    value: Any, path: tuple[str, ...], depth: int
) -> Iterator[tuple[tuple[str, ...], list[str], Any]]:
    """Mappings that hold tensors (whole modules count as their state dict), outermost first."""
    entries = mapping_of(value)
    if entries is None:
        return
    if isinstance(value, Call) and module_entries(value) is not None:
        yield path, _module_keys(value), value
        return
    named = {name_of(key): entry for key, entry in entries}
    if "param_groups" in named:
        return
    tensors = [key for key, entry in named.items() if tensor_of(entry) is not None]
    if tensors:
        yield path, tensors, value
    if depth and (not path or not tensors):
        for key, entry in named.items():
            yield from _state_dicts(entry, (*path, key), depth - 1)


def _module_keys(value: Any) -> list[str]:
    from phalanx.tools.ckpt.tree import tensors_in

    return [key for key, _, _ in tensors_in(value)]


def _by_prefix(contents: Contents) -> list[Weights]:
    """Formats without a pickle: what stands before a slash is a part (an optimizer), not the weights.

    Folders of torch.distributed.checkpoint join the names of nested dicts with dots, so entries known by name
    (``model``, ``state_dict``) are told by their first component.
    """
    plain = {
        entry.key: entry
        for entry in contents.entries
        if "/" not in entry.key or contents.format in ("safetensors", "huggingface-sharded")
    }
    found = []
    if contents.format == "dcp" or contents.format == "lightning":
        for name in (*LIVE_ENTRIES, *AVERAGED_ENTRIES):
            prefix = f"{name}."
            inner = {
                key.removeprefix(prefix): entry for key, entry in plain.items() if key.startswith(prefix)
            }
            others = [key for key in plain if not key.startswith(prefix)]
            if inner and others and all(key.split(".")[0] in _PARTS or key in inner for key in others):
                found.append(Weights(name, inner))
    return found or [Weights("", plain)]


_PARTS = {"optim", "optimizer", "optimizers", "optimizer_state_dict", "optimizer_states", "opt", "scheduler",
          "lr_scheduler", "rng", "rng_state", "epoch", "step", *LIVE_ENTRIES, *AVERAGED_ENTRIES}  # fmt: skip


def _score(weights: Weights, target: Mapping[str, Shape | None]) -> int:
    try:
        return len(pair_keys(weights.shapes, target, (), same_tensor(weights)).pairs)
    except StateDictError:
        return 0


def _kind(container: str) -> int:
    last = container.rpartition("/")[2]
    return 0 if last in LIVE_ENTRIES else 2 if last in AVERAGED_ENTRIES else 1


def pick(
    contents: Contents, target: Mapping[str, Shape | None] | None = None, entry: str | None = None
) -> Weights:
    """The weights, by the same rules as `phalanx.dist.match_state_dict`: live ones before averages, never a guess.

    Args:
        contents: The checkpoint.
        target: What they should fit; None takes the likeliest entry by name.
        entry: Take this one.

    Raises:
        AmbiguousKeysError: Two entries are equally good.
        StateDictError: There is none.
    """
    found = candidates(contents)
    if entry is not None:
        found = [weights for weights in found if weights.container == entry.replace(".", "/")]
    if not found:
        what = (
            f"no entry {entry!r} with tensors" if entry is not None else "no weights: not one dict of tensors"
        )
        raise StateDictError(f"{contents.path}: holds {what}")
    names = sorted(weights.container or "(top)" for weights in found)

    def chosen(weights: Weights) -> Weights:
        others = tuple(name for name in names if name != (weights.container or "(top)"))
        return Weights(weights.container, weights.entries, weights.value, others)

    if target is None:
        return chosen(_by_name(found))
    scores = {weights.container: _score(weights, target) for weights in found}
    top = [weights for weights in found if not weights.container]
    if top and scores[""] and scores[""] >= max(scores.values()):
        return chosen(top[0])
    for kind in (0, 1, 2):
        some = [
            weights for weights in found if _kind(weights.container) == kind and scores[weights.container]
        ]
        most = max((scores[weights.container] for weights in some), default=0)
        best = [weights for weights in some if scores[weights.container] == most]
        if len(best) > 1 and any(_places(weights) != _places(best[0]) for weights in best):
            raise AmbiguousKeysError(
                f"{contents.path}: the entries {sample_names([weights.container for weights in best])} fit equally "
                f"well; taking one would be a guess.\nFix: --entry {best[0].container}"
            )
        if best:
            return chosen(best[0])
    return chosen(min(found, key=lambda weights: _kind(weights.container)))


def _by_name(found: Sequence[Weights]) -> Weights:
    live = [weights for weights in found if _kind(weights.container) == 0 and weights.container]
    if live:
        return live[0]
    top = [weights for weights in found if not weights.container]
    if top or len(found) == 1:
        return (top or list(found))[0]
    best = [weights for weights in found if _kind(weights.container) == 1] or list(found)
    if len(best) > 1:
        raise AmbiguousKeysError(
            f"the entries {sample_names([weights.container for weights in best])} all hold tensors; taking one would "
            f"be a guess.\nFix: --entry {best[0].container}"
        )
    return best[0]


def _places(weights: Weights) -> dict[str, Any]:
    return {key: entry.pieces for key, entry in weights.entries.items()}


def same_tensor(weights: Weights) -> Any:
    """A function that tells whether two keys are names of one tensor in the file."""

    def same(first: str, second: str) -> bool:
        one, two = weights.entries[first], weights.entries[second]
        return bool(one.pieces) and one.pieces == two.pieces and one.shape == two.shape

    return same


def match_weights(
    weights: Weights, target: Mapping[str, Shape | None], rules: Sequence[tuple[str, str]] = ()
) -> tuple[Match, Pairing]:
    """What `phalanx.dist.match_state_dict` finds, over descriptions: `.state_dict` holds entries.

    Raises:
        StateDictError: Two answers fit, or the file holds flattened shards.
    """
    try:
        pairing = pair_keys(weights.shapes, target, rules, same_tensor(weights))
    except AmbiguousKeysError as error:
        problem = str(error).partition("\nFix:")[0]
        raise AmbiguousKeysError(
            f"{problem}\nFix: --rule PATTERN=NEW that tells them apart, or --entry NAME"
        ) from None
    by_target = {found: key for key, found in pairing.pairs.items()}
    loaded: OrderedDict[str, Any] = OrderedDict()
    mismatched = []
    for key, want in target.items():
        if key not in by_target:
            continue
        entry = weights.entries[by_target[key]]
        if not fits(entry.shape, want):
            assert want is not None
            mismatched.append(Mismatch(key, entry.shape, want))
        loaded[key] = entry
    used = {*pairing.pairs, *pairing.averaged, *pairing.duplicates}
    match = Match(
        state_dict=loaded,
        renamed={key: found for key, found in pairing.pairs.items() if key != found},
        missing=[key for key in target if key not in by_target],
        unexpected=[key for key in weights.entries if key not in used],
        mismatched=mismatched,
        rewrites=pairing.rewrites,
        averaged=pairing.averaged,
        container=weights.container or None,
        other_containers=list(weights.others),
        unused_rules=pairing.unused_rules,
        matched=len(by_target),
    )
    return match, pairing
