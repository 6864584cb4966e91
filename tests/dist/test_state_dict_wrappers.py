"""Any wrapping loads into any other, wherever wrappers stand; a prefix is never paired wrongly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.dist.state_dict import (
    AmbiguousKeysError,
    load_state_dict,
    unwrap,
)
from tests.dist.state_dict_nets import Net, pairs, weights


@pytest.mark.parametrize("target", [Net(), nn.DataParallel(Net()), torch.compile(Net())])
@pytest.mark.parametrize("source", [Net(), nn.DataParallel(Net()), nn.DataParallel(torch.compile(Net()))])
def test_any_wrapping_loads_into_any_other(source: nn.Module, target: nn.Module) -> None:
    match = load_state_dict(target, source.state_dict())
    assert match.missing == match.unexpected == []
    expected = unwrap(source).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in unwrap(target).state_dict().items())


_NAMES = st.sampled_from(["a", "b", "conv", "module_list", "weight_g", "0", "1", "orig_mod", "emb"])
_KEYS = st.lists(st.lists(_NAMES, min_size=1, max_size=4).map(".".join), min_size=1, max_size=12, unique=True)
_WRAPPERS = st.sampled_from(["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])


def _wrapped(keys: list[str], places: set[str], wrapper: str) -> list[str]:
    """Keys of the same module tree with a wrapper put around the module at each path in `places`."""
    result = []
    for key in keys:
        parts = key.split(".")
        out = []
        for end, part in enumerate(parts):
            if ".".join(parts[:end]) in places:
                out.append(wrapper)
            out.append(part)
        result.append(".".join(out))
    return result


@settings(max_examples=200, deadline=None)
@given(data=st.data(), keys=_KEYS)
def test_wrappers_at_random_places_match_back_one_to_one(data: st.DataObject, keys: list[str]) -> None:
    keys = [f"{key}.w" for key in keys]
    paths = sorted({key[:dot] for key in keys for dot in range(len(key)) if dot == 0 or key[dot] == "."})

    def draw() -> list[str]:
        places = set(data.draw(st.lists(st.sampled_from(paths), max_size=4)))
        return _wrapped(keys, places, data.draw(_WRAPPERS))

    source, target = draw(), draw()
    order = data.draw(st.permutations(range(len(keys))))
    tensors = weights(*(source[number] for number in order))
    assert pairs(tensors, target) == dict(zip(target, source, strict=True))


@settings(max_examples=200, deadline=None)
@given(
    keys=_KEYS,
    prefix=st.lists(st.sampled_from(["a", "b", "conv", "net"]), min_size=1, max_size=2),
    added=st.booleans(),
)
def test_a_constant_prefix_is_found_or_refused_but_never_paired_wrongly(
    keys: list[str], prefix: list[str], added: bool
) -> None:
    plain = [f"{key}.w" for key in keys]
    long = [".".join([*prefix, key]) for key in plain]
    source, target = (plain, long) if added else (long, plain)
    try:
        found = pairs(weights(*source), target)
    except AmbiguousKeysError:
        return
    assert found == dict(zip(target, source, strict=True))
