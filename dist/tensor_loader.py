"""Data that fits in memory, gathered and augmented a whole batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler, TensorDataset

from phalanx.dist.augment import Transform, augment_batch, check_transforms
from phalanx.dist.batches import BatchQueue
from phalanx.dist.keys import derive_key
from phalanx.dist.loader_options import refuse_options
from phalanx.dist.membership import check_world
from phalanx.dist.permutation import Indices
from phalanx.dist.plan import Tail
from phalanx.dist.rank_device import named_device
from phalanx.dist.steps import StepLoader

if TYPE_CHECKING:
    from phalanx.dist.world import World

# Batches are gathered and augmented several at a time, up to so many samples and so many pixels: an operation on a
# few images costs its start. Rows do not depend on what stands beside them, so the batches are the same.
_SAMPLES_TOGETHER = 2048
_VALUES_TOGETHER = 1 << 22


class TensorLoader(StepLoader):
    """This rank's share of every step from tensors in memory: a `ShardLoader` without workers, much faster.

    The tensors are moved to ``device`` once; a batch is a gather there, and ``augment`` transforms the batch at
    once. Batches, order, passes, attributes and progress are those of `ShardLoader`.

    >>> from phalanx.dist.augment import HorizontalFlip, Normalize, RandomCrop
    >>> images, labels = torch.zeros(1000, 1, 28, 28, dtype=torch.uint8), torch.arange(1000)
    >>> augment = [RandomCrop(4), HorizontalFlip(), Normalize(0.2860, 0.3530)]
    >>> loader = TensorLoader(images, labels, global_batch_size=512, shuffle=True, augment=augment)
    >>> for x, y in loader:  # on 2 ranks 256 and 244 samples each
    ...     print(x.dtype, tuple(x.shape))
    torch.float32 (512, 1, 28, 28)
    torch.float32 (488, 1, 28, 28)

    *Randomness.* A sample's augmentation depends on (seed, epoch, position) and on its transform's place in the
    sequence alone, to the bit: not on the world size, the micro batch size, the device, or how often the run was
    killed. No generator is used. Transforms run in evaluation too: give an evaluation loader `Normalize` only.

    *Speed.* On the CPU one operation after the other runs on torch's threads (``OMP_NUM_THREADS``). Where other processes
    want the same cores, OpenMP's threads spin while they wait for each other, and one is faster than several; with
    ``OMP_WAIT_POLICY=passive`` in the environment several are. ``benchmarks/tensor_loader.py`` compares with a DataLoader.

    Collective when there are several ranks: making one compares the ranks' tensors (shapes, types, a sample of their
    values) and settings.

    Args:
        tensors: One or more, all of the same length; dim 0 counts samples. Batches are tuples of as many.
        global_batch_size: Samples of a step over all ranks.
        micro_batch_size: Samples of one batch on one rank; see `ShardLoader`.
        shuffle: A new order each epoch; also what makes ``training`` true.
        seed: Any integer, the same on every rank.
        tail: The last step: "uneven" is short, "drop" leaves it out, "pad" repeats the first items.
        virtual_ranks: As for `ShardLoader`.
        sampler: As for `ShardLoader`.
        augment: Transforms of `phalanx.dist.augment` for the first tensor, images of shape (n, C, H, W), uint8 or
            floating point.
        device: Where the tensors live and the batches are made; by default the world's.
        world: Where this rank stands; by default the current world.

    Raises:
        ValueError: No tensors, lengths that differ, something else than transforms, images of another shape; and
            whatever `ShardLoader` refuses.
        TypeError: An option of DataLoader's: there are no workers and no collation here.
    """

    def __init__(
        self,
        *tensors: Tensor,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail = "uneven",
        virtual_ranks: int | None = None,
        sampler: Sampler[Any] | None = None,
        augment: Sequence[Transform] | None = None,
        device: torch.device | str | None = None,
        world: World | None = None,
        **refused: Any,
    ) -> None:
        refuse_options(refused, owner=type(self).__name__)
        _check_tensors(tensors)
        self.augment = check_transforms(augment) if augment is not None else ()
        if self.augment:  # tried on one sample, so that what does not fit is known before the first step
            augment_batch(tensors[0][:1], self.augment, key=0, positions=np.arange(min(1, len(tensors[0]))))
        check_world(world)
        if world is None:
            from phalanx.dist.world import world_or_single

            world = world_or_single()
        place = named_device(device, world.device)
        self.tensors = tuple(tensor.detach().to(place) for tensor in tensors)
        super().__init__(
            TensorDataset(*self.tensors),
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            virtual_ranks=virtual_ranks,
            sampler=sampler,
            world=world,
        )
        self.device = self.tensors[0].device

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "augment": [_words(transform) for transform in self.augment]}

    def _contents(self, queue: BatchQueue) -> Iterator[Any]:
        # The queue makes its list of pending batches when it is iterated, not when it is first drawn from.
        return self._batches(iter(queue), queue)

    def _batches(self, orders: Iterator[Any], queue: BatchQueue) -> Iterator[tuple[Tensor, ...]]:
        pending = queue.pending
        sizes: list[int] = []
        positions: list[Indices] = []
        indices: list[Any] = []
        epoch = queue.epoch
        limit = min(_SAMPLES_TOGETHER, _VALUES_TOGETHER // max(1, self.tensors[0][:1].numel()))
        for _, _, found in orders:
            fetched = pending[-1].fetched
            if sizes and sum(sizes) + len(fetched) > limit:
                yield from self._together(epoch, positions, indices, sizes)
                sizes, positions, indices = [], [], []
            sizes.append(len(fetched))
            positions.append(fetched)
            indices.append(found)
        if sizes:
            yield from self._together(epoch, positions, indices, sizes)

    def _together(
        self, epoch: int, positions: list[Indices], indices: list[Any], sizes: list[int]
    ) -> Iterator[tuple[Tensor, ...]]:
        gathered = self._gather(epoch, np.concatenate(positions), np.concatenate(indices))
        start = 0
        # With virtual ranks in memory of their own: how many batches are gathered together, and with it where in
        # memory a slice begins, depends on the world size, and kernels may sum in another order for that.
        own = self.virtual_ranks is not None
        for size in sizes:
            batch = tuple(tensor[start : start + size] for tensor in gathered)
            yield tuple(tensor.clone() for tensor in batch) if own else batch
            start += size

    def _gather(self, epoch: int, positions: Indices, indices: Any) -> tuple[Tensor, ...]:
        """The samples at these dataset indices, augmented for these positions."""
        rows = torch.as_tensor(indices, dtype=torch.int64).to(self.tensors[0].device, non_blocking=True)
        first, *others = (tensor.index_select(0, rows) for tensor in self.tensors)
        if self.augment:
            key = derive_key(self.plan.seed or 0, epoch, "augment")
            first = augment_batch(first, self.augment, key=key, positions=positions)
        return first, *others


def _words(transform: Transform) -> str:
    """A transform as text that is equal on all ranks: the default ``repr`` names an address."""
    kind = type(transform)
    plain = kind.__repr__ is object.__repr__
    return f"{kind.__module__}.{kind.__qualname__}" if plain else repr(transform)


def _check_tensors(tensors: Sequence[Any]) -> None:
    if not tensors:
        raise ValueError(
            "TensorLoader got no tensors: there is nothing to load.\nFix: TensorLoader(images, labels, ...)"
        )
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.ndim == 0:
            raise ValueError(
                f"TensorLoader's argument {place} is {type(tensor).__name__}"
                + (" without dims" if isinstance(tensor, Tensor) else "")
                + ": samples are counted along dim 0 of tensors.\n"
                "Fix: torch.as_tensor(...) for arrays and lists, ShardLoader for datasets"
            )
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"TensorLoader got tensors of lengths {lengths}: images and labels would not belong together.\n"
            "Fix: tensors with one row per sample each"
        )
