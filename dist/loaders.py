"""A DataLoader for one rank's share of every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from phalanx.dist.batches import BatchQueue, KeyedDataset, WorkerInit
from phalanx.dist.keys import generator_states, restore_generator_states
from phalanx.dist.loader_options import check_options
from phalanx.dist.plan import Tail
from phalanx.dist.steps import StepLoader
from phalanx.dist.worker_audit import watch_workers

if TYPE_CHECKING:
    from phalanx.dist.world import World


class ShardLoader(StepLoader):
    """This rank's share of every step, as batches on its device: a DataLoader that knows about ranks.

    Which samples a step sees depends on seed, epoch and step alone, never on the number of ranks, of
    workers, or of restarts. With ``shuffle=True`` every epoch has an order of its own; without, it is
    an exact evaluation: every item once, none repeated. ::

        loader = ShardLoader(dataset, global_batch_size=50, shuffle=True, num_workers=2)
        for epoch in range(epochs):
            for x, y in loader:            # 25 samples each on 2 ranks; 13, 13, 12, 12 on 4
                ...

    *Passes.* Each ``for`` is one epoch, the next one is the next epoch; no ``set_epoch`` is needed.
    Leaving a pass early makes the next one the next epoch too. After `load_state_dict` the first pass
    delivers the rest of the interrupted epoch (nothing, if its last step had been delivered).

    *Attributes* valid for the batch delivered last: ``progress`` (counts batches delivered, however
    far workers have drawn ahead), ``local_count`` (samples of this rank in the batch),
    ``step_local_count`` (in the whole step), ``global_count`` (in the step over all ranks),
    ``is_last_micro``, ``key`` (a random key for what the loop does), ``positions`` (within the epoch,
    of the samples), ``virtual_rank`` (whose batch it is; without virtual ranks the rank) and
    ``ends_virtual_rank`` (its last one in the step).

    *Uneven steps.* A rank without samples in a step of ``training`` gets a stand-in, the step's first
    sample, with ``local_count`` 0, so that it takes part in collectives; it must weigh nothing (the
    engines see to it; metrics take ``count=loader.local_count``). In evaluation it gets nothing.

    *Randomness.* Every sample is fetched under a key of (seed, epoch, position), in workers as in the
    main process: augmentation by the global generators of torch, random and numpy is the same for any
    ``num_workers`` and world size. A dataset with ``__getitems__`` gets one call for a batch, under
    the key of its first position. In training the global generators are reseeded with ``key`` before
    each batch is delivered; evaluation leaves them as they are.

    Collective when there are several ranks: making one compares the ranks' datasets and settings.

    Args:
        dataset: Map style, the same on every rank.
        global_batch_size: Samples of a step over all ranks.
        micro_batch_size: Samples of one batch on one rank. Alone it means ``global_batch_size =
            micro_batch_size * world_size``; with ``global_batch_size`` each rank's share of a step
            comes in batches of at most that size, equally many on every rank.
        shuffle: A new order each epoch; also what makes ``training`` true.
        seed: Any integer, the same on every rank.
        tail: The last step: "uneven" is short, "drop" leaves it out, "pad" repeats the first items.
        virtual_ranks: Share each step among so many virtual ranks rather than among the ranks; each rank
            gets the batches of its own ones in turn. ``parallelize(virtual_ranks=V, loader=loader)`` sets
            it as well. Batches, their sizes and keys then depend on V alone, never on the world size;
            ``micro_batch_size`` is of a virtual rank.
        sampler: A torch Sampler over the whole dataset, drawn once an epoch under a seed that all
            ranks share, then cut into shares; or a WeightedShardSampler or LengthBucketSampler, whose
            whole epoch is looked up under its own seed. Makes ``training`` true as well.
        world: Where this rank stands; by default the current world.
        options: Of torch's DataLoader: ``num_workers``, ``collate_fn``, ``worker_init_fn``,
            ``prefetch_factor``, ``timeout``, ``multiprocessing_context``, ``pin_memory`` (default: on
            CUDA) and ``persistent_workers`` (default: with workers, as their start is slow).

    Raises:
        ValueError: ``batch_size=`` (which of the two?), an IterableDataset, a sampler that is one
            rank's share already, ranks with different datasets or settings, a number out of range.
        TypeError: An option that DataLoader does not have.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail = "uneven",
        virtual_ranks: int | None = None,
        sampler: Sampler[Any] | None = None,
        world: World | None = None,
        **options: Any,
    ) -> None:
        check_options(options, owner=type(self).__name__)
        self._options = options
        self._generator = torch.Generator()
        self._inner: DataLoader[Any] | None = None
        super().__init__(
            dataset,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            virtual_ranks=virtual_ranks,
            sampler=sampler,
            world=world,
        )

    def _contents(self, queue: BatchQueue) -> Iterator[Any]:
        self._generator.manual_seed(self.plan.key(queue.epoch, 0, self.world.rank, "workers"))
        if self._inner is None:
            self._inner = self._make_inner(queue)
        keyed = self._inner.dataset
        assert isinstance(keyed, KeyedDataset)
        keyed.reseed_cuda = self.training
        contents = iter(self._inner)
        # Without workers the samples' keys go to this process's own generators, which the caller
        # of an evaluation expects untouched.
        keep = not self.training and self._inner.num_workers == 0 and keyed.draws
        return _leaving_generators(contents) if keep else contents

    def _make_inner(self, queue: BatchQueue) -> DataLoader[Any]:
        options = dict(self._options)
        options.setdefault("pin_memory", self.device.type == "cuda")
        if options.get("num_workers", 0):
            options.setdefault("persistent_workers", True)
        keyed = KeyedDataset(self.dataset, self.plan, own_collate=options.get("collate_fn") is not None)
        options["worker_init_fn"] = WorkerInit(options.get("worker_init_fn"))
        watch_workers()
        # A generator of its own: DataLoader would draw its workers' seed from the global one.
        return DataLoader(keyed, batch_sampler=queue, generator=self._generator, **options)  # type: ignore[arg-type]


def _leaving_generators(contents: Iterator[Any]) -> Iterator[Any]:
    """The same, with the global generators put back after each."""
    while True:
        states = generator_states()
        try:
            taken = next(contents)
        except StopIteration:
            return
        finally:
            restore_generator_states(states)
        yield taken
