"""Resume in mid-epoch on another number of ranks: is every sample of the epoch seen once?

    python benchmarks/resume_ledger.py                     100 random points for each of 4 to 8, 4 to 2 and 2 to 3 ranks
    python benchmarks/resume_ledger.py --points 10 --real 1 --json

At each point (an epoch, and a step within it) the ranks stop, their state is taken, and the new ranks run the rest of the
epoch from it. The ledger notes every index delivered. Ours is ShardLoader: for most points with made-up worlds in one process (what
a rank is given depends on its number alone), for ``--real`` points of each kind with real ranks, killed and restored by CheckpointManager.
Beside it stands torchdata's StatefulDistributedSampler where it can be imported, else torch's DistributedSampler skipping as many
indices as each rank had taken.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as mp
from conditions import arguments, conditions, in_words, told_as_json
from torch import nn
from torch.optim import SGD
from torch.utils.data import DistributedSampler, TensorDataset

from phalanx.dist.checkpoints import CheckpointManager
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize
from phalanx.dist.world import World, gather_objects, init_world

KINDS = "4:8,4:2,2:3"
NUM_ITEMS, GLOBAL_BATCH, EPOCHS = 1000, 48, 3  # 21 steps an epoch, the last of 40 samples
STEPS = -(-NUM_ITEMS // GLOBAL_BATCH)


def dataset() -> TensorDataset:
    """Each sample is its own index."""
    return TensorDataset(torch.arange(NUM_ITEMS))


def loader_of(rank: int, world_size: int, **options: Any) -> ShardLoader:
    """The loader of a made-up rank."""
    world = World(
        rank=rank,
        local_rank=rank,
        node_rank=0,
        world_size=world_size,
        local_world_size=world_size,
        device=torch.device("cpu"),
        backend=None,
        source="single",
    )
    return ShardLoader(dataset(), global_batch_size=GLOBAL_BATCH, shuffle=True, world=world, **options)


def take(loader: ShardLoader, steps: int | None = None) -> list[list[int]]:
    """The indices of each step."""
    return [x[: loader.local_count].tolist() for (x,) in itertools.islice(loader, steps)]


def together(ranks: Sequence[list[list[int]]]) -> list[list[int]]:
    """The indices of each step over all ranks."""
    return [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


def phalanx_run(epoch: int, step: int, before: int, after: int, **options: Any) -> list[list[int]]:
    """The indices of each step of an epoch that stops after ``step`` steps and goes on with other ranks."""
    first = [loader_of(rank, before, **options) for rank in range(before)]
    for loader in first:
        loader.set_epoch(epoch)
    seen = together([take(loader, step) for loader in first]) if step else []
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert all(state == states[0] for state in states)
    rest = []
    for rank in range(after):
        loader = loader_of(rank, after, **options)
        loader.load_state_dict(states[0])
        rest.append(take(loader))
    return seen + together(rest)


def other_sampler() -> tuple[str, Any]:
    """Name and class of what is beside ours."""
    try:
        module = importlib.import_module("torchdata.stateful_dataloader.sampler")
        version = importlib.import_module("torchdata").__version__
    except ImportError:
        return "torch DistributedSampler with skip", DistributedSampler
    return f"torchdata {version} StatefulDistributedSampler", module.StatefulDistributedSampler


def other_run(kind: Any, epoch: int, step: int, before: int, after: int) -> list[int]:
    """The indices of an epoch with the other sampler, likewise."""
    each = step * GLOBAL_BATCH // before
    seen: list[int] = []
    states = []
    for rank in range(before):
        sampler = kind(dataset(), before, rank)
        sampler.set_epoch(epoch)
        seen += itertools.islice(sampler, each)
        states.append(sampler.state_dict() if hasattr(sampler, "state_dict") else each)
    for rank in range(after):
        sampler = kind(dataset(), after, rank)
        sampler.set_epoch(epoch)
        skip = 0
        if hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(states[0])
        else:
            skip = each
        seen += itertools.islice(sampler, skip, None)
    return seen


def faults(indices: Sequence[int]) -> tuple[int, int]:
    """Samples never seen, and samples seen more than once."""
    counts = torch.bincount(torch.as_tensor(indices, dtype=torch.int64), minlength=NUM_ITEMS)
    return int((counts == 0).sum()), int((counts > 1).sum())


def points(number: int, seed: int) -> Iterator[tuple[int, int]]:
    """Random epochs and steps within them; both ends of an epoch are among them."""
    chance = random.Random(seed)
    fixed = [(0, 0), (1, STEPS), (0, 1), (2, STEPS - 1)]
    for at in range(number):
        yield (
            fixed[at]
            if at < min(len(fixed), number // 4)
            else (
                chance.randrange(EPOCHS),
                chance.randint(0, STEPS),
            )
        )


def _real_rank(
    rank: int, world_size: int, port: int, folder: str, epoch: int, step: int | None, workers: int
) -> None:
    if world_size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    init_world(device="cpu")
    loader = ShardLoader(dataset(), global_batch_size=GLOBAL_BATCH, shuffle=True, num_workers=workers)
    torch.manual_seed(0)
    model, optimizer, _ = parallelize(nn.Linear(1, 1), lambda p: SGD(p, lr=1e-9), loader=loader)
    checkpoints = CheckpointManager(
        Path(folder) / "checkpoints", model=model, optimizer=optimizer, loader=loader, every_steps=1
    )
    checkpoints.restore()
    if step is not None:
        loader.set_epoch(epoch)
        checkpoints.save()
    taken: list[list[int]] = []
    if step != 0:
        for (x,) in loader:
            taken.append(x[: loader.local_count].tolist())
            loss = model(x[:, None].float()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step is not None and len(taken) >= step - 1:
                checkpoints.maybe_save()
            if len(taken) == step:
                break
    ranks = gather_objects(taken)
    if rank == 0:
        Path(folder, f"{'rest' if step is None else 'seen'}.json").write_text(json.dumps(together(ranks)))
    torch.distributed.barrier()
    os.kill(os.getpid(), 9)  # nothing gets a chance to tidy up


def real_run(epoch: int, step: int, before: int, after: int, workers: int) -> list[list[int]]:
    """The same with real ranks, which end by SIGKILL."""
    with tempfile.TemporaryDirectory() as folder:
        for world_size, stop in ((before, step), (after, None)):
            with socket.socket() as server:
                server.bind(("127.0.0.1", 0))
                port = server.getsockname()[1]
            context = mp.get_context("forkserver")  # torch is imported once, not by every rank
            context.set_forkserver_preload(["torch", "phalanx.dist.checkpoints", "phalanx.dist.parallel"])
            ranks = [
                context.Process(
                    target=_real_rank, args=(rank, world_size, port, folder, epoch, stop, workers)
                )
                for rank in range(world_size)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode != -9 for process in ranks):
                raise SystemExit(f"a rank failed: exit codes {[process.exitcode for process in ranks]}")
        seen, rest = (json.loads(Path(folder, f"{name}.json").read_text()) for name in ("seen", "rest"))
        return [*seen, *rest]


def measure(kinds: Sequence[tuple[int, int]], number: int, real: int, seed: int, say: Any) -> dict[str, Any]:
    """One row for each kind of resume."""
    name, kind = other_sampler()
    uninterrupted = {}
    for epoch in range(EPOCHS):
        loader = loader_of(0, 1)
        loader.set_epoch(epoch)
        uninterrupted[epoch] = [sorted(step) for step in take(loader)]
    rows = []
    for before, after in kinds:
        exact = real_exact = other_exact = lost_most = twice_most = lost = 0
        for at, (epoch, step) in enumerate(points(number, seed)):
            # Two loader workers now and then: they draw ahead of what was delivered.
            workers = {"num_workers": 1} if at % 50 == 5 else {}
            exact += phalanx_run(epoch, step, before, after, **workers) == uninterrupted[epoch]
            never, twice = faults(other_run(kind, epoch, step, before, after))
            other_exact += never == twice == 0
            lost += never
            lost_most, twice_most = max(lost_most, never), max(twice_most, twice)
        chance = random.Random(seed + before * after)
        for at in range(real):
            epoch, step = chance.randrange(EPOCHS), chance.randint(0, STEPS)
            real_exact += real_run(epoch, step, before, after, workers=at % 2) == uninterrupted[epoch]
        row = {
            "from": before,
            "to": after,
            "points": number,
            "exact": exact,
            "real_points": real,
            "real_exact": real_exact,
            "other_exact": other_exact,
            "other_mean_never_seen": lost / number,
            "other_most_never_seen": lost_most,
            "other_most_seen_twice": twice_most,
        }
        rows.append(row)
        say(
            f"{before} to {after} ranks: phalanx exact at {exact} of {number} points, with real ranks {real_exact} of {real}; "
            f"{name}: exact at {other_exact}, at worst {lost_most} of {NUM_ITEMS} never seen, {twice_most} seen twice"
        )
    return {"other": name, "rows": rows}


def _parts(kind: str) -> tuple[str, str, str]:
    return kind.partition(":")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--points", type=int, default=100, help="random points for each kind of resume")
    parser.add_argument("--real", type=int, default=2, help="points with real ranks for each kind")
    parser.add_argument("--kinds", default=KINDS, help="ranks before:after, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.perf_counter()
    kinds = [(int(before), int(after)) for before, _, after in map(_parts, options.kinds.split(","))]
    found = measure(
        kinds,
        options.points,
        options.real,
        options.seed,
        lambda text: print(text, file=sys.stderr if options.json else sys.stdout, flush=True),
    )
    result = {
        **found,
        "items": NUM_ITEMS,
        "global_batch_size": GLOBAL_BATCH,
        "elapsed_s": time.perf_counter() - begun,
        **conditions("torch", "python", "cores", "machine"),
    }
    if not told_as_json(result, options):
        print(f"{NUM_ITEMS} samples, {GLOBAL_BATCH} a step; {in_words(result)}, {result['elapsed_s']:.0f} s")
    return int(
        any(row["exact"] < row["points"] or row["real_exact"] < row["real_points"] for row in found["rows"])
    )


if __name__ == "__main__":
    sys.exit(main())
