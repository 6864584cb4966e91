"""Derived keys: equal everywhere, different for what differs."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dist.keys import derive_key, generator_states, reseed, restore_generator_states

GOLDEN = (0x34B2797457A0A6E4, 0x3AD345D4D468B7C5, 0x23CCEA87774456E8)
PARTS = st.lists(st.integers() | st.text(max_size=8), max_size=5)


def _draws() -> list[list[float]]:
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]]


def test_keys_are_the_same_on_every_machine() -> None:
    # Written down: a change here changes the order and the augmentation of every run there is.
    assert derive_key() == GOLDEN[0]
    assert derive_key(0, 3, 17, "loop") == GOLDEN[1]
    assert derive_key(-1, 1 << 80, "é") == GOLDEN[2]


@given(PARTS, PARTS)
def test_different_parts_have_different_keys(one: list[int | str], other: list[int | str]) -> None:
    assert (derive_key(*one) == derive_key(*other)) == (one == other)


@given(PARTS)
def test_a_key_fits_every_generator(parts: list[int | str]) -> None:
    key = derive_key(*parts)
    assert 0 <= key < 1 << 63
    reseed(key)


@pytest.mark.parametrize(
    ("one", "other"), [((1, 23), (12, 3)), (("a", "bc"), ("ab", "c")), ((1,), ("1",)), ((0,), (0, 0))]
)
def test_the_border_between_parts_counts(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> None:
    assert derive_key(*one) != derive_key(*other)


def test_numpy_integers_are_integers() -> None:
    assert derive_key(np.int64(5), 7) == derive_key(5, 7)


def test_low_bits_of_keys_are_uniform() -> None:
    counts = np.bincount(
        [derive_key(0, 0, position, "sample") % 64 for position in range(64_000)], minlength=64
    )
    chi_square = ((counts - 1000.0) ** 2 / 1000).sum()
    # 63 degrees of freedom: mean 63, deviation 11.2; five deviations.
    assert 7 < chi_square < 119


def test_reseed_repeats_the_draws_of_all_three_generators() -> None:
    reseed(derive_key(1))
    first = _draws()
    reseed(derive_key(2))
    other = _draws()
    reseed(derive_key(1))
    assert _draws() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_the_three_generators_do_not_share_a_stream() -> None:
    reseed(derive_key(1))
    raw = [
        {int(word) for word in torch.randint(0, 1 << 32, (200,))},
        {int(word) for word in np.random.randint(0, 1 << 32, 200, dtype=np.uint64)},
        {random.getrandbits(32) for _ in range(200)},
    ]
    assert len(raw[0] | raw[1] | raw[2]) == sum(map(len, raw))


def test_neighbouring_keys_give_unlike_numbers() -> None:
    firsts = []
    for key in range(2000):
        reseed((key << 31) + key)
        firsts.append([torch.rand(()).item(), np.random.rand(), random.random()])
    assert np.abs(np.corrcoef(np.array(firsts)[:-1].T, np.array(firsts)[1:].T)[:3, 3:]).max() < 5 / 2000**0.5


def test_reseed_never_initialises_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", fail)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    reseed(5)


def test_reseed_reaches_every_cuda_generator_once_cuda_is_initialised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generators = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    reseed(7)
    assert [generator.initial_seed() for generator in generators] == [7, 7]
    reseed(8, cuda=False)
    assert [generator.initial_seed() for generator in generators] == [7, 7]


def test_states_are_put_back() -> None:
    reseed(1)
    states = generator_states()
    first = _draws()
    reseed(2)
    restore_generator_states(states)
    assert _draws() == first


@pytest.mark.parametrize("module", ["keys", "permutation", "plan"])
def test_importing_needs_no_torch(module: str) -> None:
    code = f"import sys, phalanx.dist.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
