"""Drawing items by weight, alike on every rank, for data sets of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.dist.arguments import require_flag, require_int, short
from phalanx.dist.epoch_sampler import PositionSampler
from phalanx.dist.keys import derive_key
from phalanx.dist.permutation import Indices, Words, mix_words
from phalanx.dist.plan import Tail

Floats = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1 << 15  # stays in the cache of one core
_TOTAL_BITS = 61  # of the sum of the weights as integers: far from overflow
_FIRST_DRAWN = 1 << 16  # items drawn without replacement at first; 16 times more whenever that is passed
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class WeightedShardSampler(PositionSampler):
    """This rank's share of draws by weight, which all ranks agree on.

    The draws depend on ``(seed, epoch)`` alone, never on the global generators or on the number of
    ranks: rank r takes draws r, r + world_size, ... of what one process would draw. It goes into a
    plain DataLoader, or into a ShardLoader as ``sampler=``, which then cuts its steps from the whole
    draw. torch's ``WeightedRandomSampler`` knows nothing of ranks and stops at 2**24 items. ::

        weights = class_weights(targets)[targets]
        loader = DataLoader(dataset, batch_size=64, sampler=WeightedShardSampler(weights))

    >>> ranks = [WeightedShardSampler([1, 1, 8], 6, rank, 2, seed=3) for rank in range(2)]
    >>> first, second = map(list, ranks)
    >>> alone = list(WeightedShardSampler([1, 1, 8], 6, 0, 1, seed=3))
    >>> alone[0::2] == first and alone[1::2] == second
    True

    With replacement a draw is one search in the cumulative weights, kept as exact integers, under a
    random number that is a hash of (seed, epoch, position): draws are made when they are asked for,
    and a resumed run goes straight to its place. Without replacement items come in the order of an
    exponential race, as if each draw removed its item (Efraimidis and Spirakis, "Weighted random
    sampling with a reservoir", Information Processing Letters 97(5), 2006); only as many as were asked
    for are selected and sorted.

    Passes, epochs and `load_state_dict` are those of `ShardSampler`. The weights are copied; they are
    no part of the state.

    Args:
        weights: One number of at least 0 for each item, in any scale: a sequence, an array or a
            tensor. Weights below 2**-60 of their sum count as 0 with replacement.
        num_samples: Draws of an epoch over all ranks; by default as many as there are weights (without
            replacement: that are not 0).
        rank: Position in the data-parallel group, ``0 <= rank < world_size``. By default this
            process's, as is ``world_size``.
        world_size: Number of ranks in that group.
        replacement: Whether an item may be drawn again in the same epoch.
        seed: Any integer, the same on every rank.
        tail: When ``num_samples`` is not a multiple of ``world_size``: "uneven" makes lengths differ
            by one, "drop" leaves draws out, "pad" repeats the first draws.

    Raises:
        ValueError: A weight is negative, infinite or no number, all are 0, there are none, they have
            more than one dim; more draws than items without replacement; ``rank`` is outside the group.
    """

    def __init__(
        self,
        weights: Any,
        num_samples: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        replacement: bool = True,
        seed: int = 0,
        tail: Tail = "uneven",
    ) -> None:
        values = read_weights(weights)
        replacement = require_flag("replacement", replacement)
        if num_samples is None:
            num_samples = values.size if replacement else int(np.count_nonzero(values))
        num_samples = require_int("num_samples", num_samples, at_least=1)
        if seed is None:
            raise ValueError("seed=None: draws need a seed, the same on every rank.\nFix: seed=0")
        super().__init__(num_samples, rank, world_size, seed=seed, tail=tail)
        self.num_samples = num_samples
        self.replacement = replacement
        self.num_items = values.size
        self._draws: _Draws
        if replacement:
            self._draws = _WithReplacement(values)
        else:
            _check_enough(values, self.num_samples)
            self._draws = _WithoutReplacement(values, self.num_samples)

    @property
    def epoch_length(self) -> int:
        """Draws of an epoch over all ranks; ``len`` counts this rank's."""
        return self.num_samples

    def indices_at(self, epoch: int, positions: Indices) -> Indices:
        """The items drawn at these positions of an epoch, whichever rank they belong to."""
        return self._draws.take(derive_key(self.seed or 0, epoch, "weighted"), positions)


class _Draws:
    def take(self, key: int, positions: Indices) -> Indices:
        """The items drawn at ``positions`` under ``key``."""
        raise NotImplementedError


class _WithReplacement(_Draws):
    """A search in cumulative weights. Integers, so that sums are exact and the same on any machine."""

    def __init__(self, weights: Floats) -> None:
        exponent = _TOTAL_BITS - _sum_exponent(weights)
        # Times a power of two, which is exact where it is no more than a number can hold.
        scale = 2.0**exponent if abs(exponent) < 1000 else None
        self._cumulative = np.empty(weights.size, dtype=np.int64)
        total = 0
        for start in range(0, weights.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            units = weights[block] * scale if scale is not None else np.ldexp(weights[block], exponent)
            sums = np.cumsum(units.astype(np.int64), out=self._cumulative[block])
            sums += total
            total = int(sums[-1])
        self._total = np.uint64(total)

    def take(self, key: int, positions: Indices) -> Indices:
        drawn = np.empty(positions.size, dtype=np.int64)
        for start in range(0, positions.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            wanted = _scaled(_words(key, positions[block]), self._total).astype(np.int64)
            # Neighbouring searches in order read neighbouring memory: several times faster.
            order = np.argsort(wanted)
            drawn[start + order] = np.searchsorted(self._cumulative, wanted[order], side="right")
        return drawn


class _WithoutReplacement(_Draws):
    """Item i arrives after a time E_i / weight_i, E_i exponential: the order of arrival is the draw."""

    def __init__(self, weights: Floats, num_samples: int) -> None:
        self._weights = weights.copy()
        self._num_samples = num_samples
        self._nonzero = int(np.count_nonzero(weights))
        sample = weights[:: max(1, weights.size // _FIRST_DRAWN)]
        self._sample = sample[sample > 0].copy()
        self._fraction = self._sample.size / max(1, sample.size)
        self._key: int | None = None
        self._drawn: Indices = np.empty(0, dtype=np.int64)

    def take(self, key: int, positions: Indices) -> Indices:
        if positions.size == 0:
            return np.empty(0, dtype=np.int64)
        needed = int(positions.max()) + 1
        if key != self._key:
            self._key, self._drawn = key, np.empty(0, dtype=np.int64)
        if needed > self._drawn.size:
            count = _FIRST_DRAWN
            while count < needed:
                count *= 16
            self._drawn = self._first(key, min(count, self._num_samples))
        return self._drawn[positions]

    def _first(self, key: int, count: int) -> Indices:
        """The first ``count`` items to arrive, in order."""
        deadline = self._deadline(count)
        while True:
            items, times = self._arrived(key, deadline)
            if items.size >= count or deadline == np.inf:
                break
            deadline = deadline * 2 if deadline < 1e300 and items.size > count // 4 else np.inf
        if items.size > count:
            early = np.argpartition(times, count - 1)[:count]
            # Equal times go by item: a partition alone would choose among them as it likes.
            latest = times[early].max()
            early = np.flatnonzero(times <= latest)
            items, times = items[early], times[early]
        return items[np.argsort(times, kind="stable")[:count]]

    def _deadline(self, count: int) -> float:
        """A time by which at least ``count`` items have arrived, most likely, and not many more."""
        wanted = count * 1.02 + 6 * count**0.5
        scale = self._weights.size * self._fraction / max(1, self._sample.size)
        if self._sample.size == 0 or wanted >= 0.4 * self._nonzero:
            return float("inf")
        low, high = 0.0, 1.0 / float(self._sample.max())
        while scale * float(-np.expm1(-high * self._sample).sum()) < wanted:
            low, high = high, high * 4
            if not high < 1e300:
                return float("inf")
        for _ in range(30):
            middle = (low + high) / 2
            if scale * float(-np.expm1(-middle * self._sample).sum()) < wanted:
                low = middle
            else:
                high = middle
        return high

    def _arrived(self, key: int, deadline: float) -> tuple[Indices, Floats]:
        """The items that arrive by ``deadline``, ascending, with their times."""
        found, when = [], []
        for start in range(0, self._weights.size, _BLOCK):
            weights = self._weights[start : start + _BLOCK]
            uniform = _words(key, np.arange(start, start + weights.size, dtype=np.int64)).astype(np.float64)
            uniform *= 2.0**-64
            near = weights > 0
            if deadline < np.inf:
                # -log(1 - u) is at least u: most items need no logarithm.
                near &= uniform <= weights * (deadline * (1 + 1e-9))
            chosen = np.flatnonzero(near)
            with np.errstate(over="ignore"):
                times = _exponential(uniform[chosen]) / weights[chosen]
            in_time = times <= deadline
            found.append(chosen[in_time] + start)
            when.append(times[in_time])
        return np.concatenate(found), np.concatenate(when)


def read_weights(weights: Any) -> Floats:
    """The weights as an array of float64, each at least 0 and finite, their sum above 0.

    Raises:
        ValueError: They are not; the first bad one is named.
    """
    if hasattr(weights, "detach"):
        weights = weights.detach().cpu()
        weights = (weights.double() if weights.is_floating_point() else weights).numpy()
    try:
        if isinstance(weights, str | bytes):
            raise TypeError("text")
        array = np.asarray(weights)
        if array.dtype.kind not in "fiub":
            array = np.asarray(list(weights))
        if array.dtype.kind not in "fiub":
            raise TypeError(f"{array.dtype} is no real number")
        values = array.astype(np.float64, copy=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"weights={short(weights)} are no numbers ({error}): how often to draw each item would be unknown.\n"
            "Fix: one number of at least 0 for each item"
        ) from None
    if values.ndim != 1:
        raise ValueError(
            f"weights have the shape {values.shape}: one dim is needed, an item's weight at its index.\n"
            "Fix: weights.flatten(), or the weights of one data set"
        )
    if values.size == 0:
        raise ValueError("weights are empty: there is nothing to draw.\nFix: one weight for each item")
    least, largest = float(values.min()), float(values.max())  # NaN comes through both
    if not (least >= 0 and largest < np.inf):
        bad = int(np.flatnonzero(~((values >= 0) & (values < np.inf)))[0])
        raise ValueError(
            f"weights[{bad}]={float(values[bad])!r}: a weight is a finite number of at least 0, chances would make no "
            "sense.\nFix: weights without NaN, infinity and negative numbers; 0 for items never to be drawn"
        )
    if largest == 0:
        raise ValueError(
            f"weights: all {values.size} are 0, nothing could be drawn.\nFix: a weight above 0 for what is to be seen"
        )
    return values


def _check_enough(weights: Floats, num_samples: int) -> None:
    nonzero = int(np.count_nonzero(weights))
    if num_samples > nonzero:
        raise ValueError(
            f"num_samples={num_samples} without replacement: only {nonzero} of {weights.size} weights are above 0, "
            f"each of those items is drawn once at most.\nFix: num_samples={nonzero}, or replacement=True"
        )


def _sum_exponent(weights: Floats) -> int:
    """An exponent e with sum(weights) < 2**e, of finite weights however large."""
    largest = int(np.frexp(weights.max())[1])
    if abs(largest) < 900:
        largest, scaled = 0, float(weights.sum())
    else:
        scaled = float(np.ldexp(weights, -largest).sum())
    # Weights often sum to 1. Machines that add in another order must not see 0.99... there.
    _, rest = np.frexp(scaled * (1 + 1e-6))
    return largest + int(rest)


def _words(key: int, positions: Indices) -> Words:
    """A random 64-bit word for each position."""
    words = positions.astype(np.uint64)
    words *= _GOLDEN
    words += np.uint64(derive_key(key, "first"))
    mix_words(words)
    words ^= np.uint64(derive_key(key, "second"))
    return mix_words(words)


def _scaled(words: Words, total: np.uint64) -> Words:
    """``words * total >> 64``: uniform below ``total``, by halves as numpy has no 128-bit integers."""
    high, low = words >> _HALF, words & _LOW
    total_high, total_low = total >> _HALF, total & _LOW
    middle = high * total_low + (low * total_low >> _HALF)
    carry = (middle & _LOW) + low * total_high
    scaled: Words = high * total_high + (middle >> _HALF) + (carry >> _HALF)
    return scaled


def _exponential(uniform: Floats) -> Floats:
    """``-log(1 - uniform)`` by basic operations alone, whose last bit is the same on every machine.

    ``log m = 2 atanh((m - 1) / (m + 1))`` for m within [sqrt(1/2), sqrt(2)); near 0 nothing is lost.
    """
    uniform = np.minimum(uniform, 1 - 2.0**-53)
    mantissa, exponent = np.frexp(1 - uniform)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, mantissa * 2, mantissa)
    exponent = exponent - small
    above_one = np.where(exponent == 0, -uniform, mantissa - 1)
    slope = above_one / (above_one + 2)
    square = slope * slope
    series = np.full_like(square, 1 / 25)
    for power in range(23, 0, -2):
        series = series * square + 1 / power
    result: Floats = -2 * slope * series - exponent * 0.6931471805599453
    return result
