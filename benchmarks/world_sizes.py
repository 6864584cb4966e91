"""The same run on 1, 2, 3 and 4 ranks: samples and random keys of every step, and the weights at the end.

    python benchmarks/world_sizes.py
    python benchmarks/world_sizes.py --ranks 1 2 8 --json

A network without batch norm or dropout in fp64, Adam in a plain loop, 301 samples in steps of 50 (so that every rank's share
is uneven, and an epoch's last step has a single sample), 6 epochs. For each step the ranks' samples and the keys these
were fetched under are put together and compared with one rank's; of the weights the largest difference is shown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

from conditions import arguments, conditions, in_words, told_as_json

ITEMS, BATCH, EPOCHS, SEED = 301, 50, 6, 3
LIMIT = 1e-9


def train(out: Path) -> None:
    """What each rank runs; rank 0 writes the steps' samples and keys, and the weights."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from phalanx.dist import ShardLoader, gather_objects, init_world, parallelize, unwrap

    world = init_world()
    torch.manual_seed(SEED)
    inputs = torch.randn(ITEMS, 6, dtype=torch.float64)
    targets = inputs.square().sum(1, keepdim=True).sin()
    model: nn.Module = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    loader = ShardLoader(TensorDataset(inputs, targets), global_batch_size=BATCH, shuffle=True, seed=SEED)
    model, optimizer, _ = parallelize(model, torch.optim.Adam(model.parameters(), lr=1e-2), loader=loader)
    steps: list[list[tuple[int, int, int]]] = []
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            indices = loader.plan.order(epoch, loader.positions).tolist()
            positions = loader.positions.tolist()
            mine = [
                (position, index, loader.plan.sample_key(epoch, position))
                for position, index in zip(positions, indices, strict=True)
            ]
            steps.append(sorted(chain.from_iterable(gather_objects(mine))))
    if world.is_rank_zero:
        weights = torch.cat([param.detach().reshape(-1) for param in unwrap(model).parameters()])
        out.write_text(json.dumps({"steps": steps, "weights": weights.tolist()}))


def start(ranks: int, folder: Path) -> dict[str, Any]:
    out = folder / f"{ranks}.json"
    command = [sys.executable, "-m", "phalanx", "run", "--gpus", "none", "--nproc-per-node", str(ranks)]
    command += ["--log-dir", str(folder / f"logs-{ranks}"), __file__, "--as-rank", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        train(options.as_rank)
        return
    with tempfile.TemporaryDirectory() as name:
        runs = {ranks: start(ranks, Path(name)) for ranks in options.ranks}
    first = runs[options.ranks[0]]
    rows = []
    for ranks, run in runs.items():
        differences = [abs(a - b) for a, b in zip(run["weights"], first["weights"], strict=True)]
        rows.append(
            {
                "ranks": ranks,
                "steps": len(run["steps"]),
                "steps_alike": sum(a == b for a, b in zip(run["steps"], first["steps"], strict=True)),
                "largest_difference": max(differences),
            }
        )
    versions = f"{in_words(conditions('torch', 'python', 'cores', 'machine'))}, 1 run each"
    if told_as_json({"rows": rows, "limit": LIMIT, "versions": versions}, options):
        return
    for row in rows:
        print(
            f"{row['ranks']} ranks: {row['steps_alike']} of {row['steps']} steps with the same samples and keys, "
            f"weights within {row['largest_difference']:.1e} (limit {LIMIT:.0e})"
        )
    print(versions)


if __name__ == "__main__":
    main()
