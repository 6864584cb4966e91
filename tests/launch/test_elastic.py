"""`--nnodes MIN:MAX`: nodes come and go, and every sample of every epoch is still taken once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lab as labs
from tests.lab import Lab, Node
from tests.launch.node_jobs import NodeJob

pytestmark = pytest.mark.skipif(labs.missing() is not None, reason=f"no lab: {labs.missing()}")

ITEMS, STEPS = 240, 20  # a global batch of 12
EPOCHS = 3
#: Trains until it is done; the steps of the last epoch wait for a file, so that the test sets the pace.
SCRIPT = f"""
import json, os, sys, time
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
from phalanx.dist import CheckpointManager, ShardLoader, init_world, parallelize

folder = Path(sys.argv[1])
world = init_world()
data = TensorDataset(torch.arange({ITEMS}))
loader = ShardLoader(data, global_batch_size=12, shuffle=True)
torch.manual_seed(0)
model, optimizer, _ = parallelize(torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=1e-9), loader=loader)
checkpoints = CheckpointManager(folder / "checkpoints", model=model, optimizer=optimizer, loader=loader, every_steps=1)
begun = checkpoints.restore()
print(f"world of {{world.world_size}} goes on at step {{begun.step}}, restarts {{os.environ['TORCHELASTIC_RESTART_COUNT']}}", flush=True)
with open(folder / f"ledger-{{world.rank}}.jsonl", "a") as ledger:
    for epoch in range(begun.epoch, {EPOCHS}):
        for (x,) in loader:
            step = loader.progress.step
            print(json.dumps({{"epoch": epoch, "step": step, "items": x[: loader.local_count].tolist(), "of": os.environ["MASTER_PORT"]}}), file=ledger, flush=True)
            loss = model(x[:, None].float()).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            checkpoints.maybe_save()
            if not (folder / f"past-epoch-{{epoch}}").exists():
                time.sleep(0.3)
        checkpoints.save()
print("trained", flush=True)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with labs.lab(("n1", "n2", "n3")) as made:
        yield made


@pytest.fixture
def job(lab: Lab, tmp_path: Path) -> Iterator[NodeJob]:
    made = NodeJob(lab, tmp_path)
    made.script.write_text(SCRIPT)
    yield made
    made.clean_up()


def _start(job: NodeJob, node: Node) -> None:
    meet = ["--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{job.lab['n1'].address}:29400"]
    job.start(node, job.folder, options=meet)


def _items_by_step(folder: Path) -> dict[tuple[int, int], list[int]]:
    """What the ledger says: a step that was run again counts as run by the ranks that met last (at their own port)."""
    notes = []
    for rank in range(3):
        path = folder / f"ledger-{rank}.jsonl"
        notes += [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if rank == 0:
            last = {(note["epoch"], note["step"]): note["of"] for note in notes}
    steps: dict[tuple[int, int], list[int]] = {step: [] for step in last}
    for note in notes:
        step = note["epoch"], note["step"]
        if note["of"] == last.get(step):
            steps[step] += note["items"]
    return steps


def test_nodes_come_and_go_and_every_sample_is_taken_once(job: NodeJob, lab: Lab) -> None:
    """Two nodes start, a third joins, its agent is killed: no restart is used up, no sample lost or taken twice."""
    _start(job, lab["n1"])
    _start(job, lab["n2"])
    job.wait_for("n1", "world of 2 goes on at step 0, restarts 0")
    _start(job, lab["n3"])
    job.wait_for("n1", "world of 3 goes on")
    job.kill_agent("n3")
    job.wait_for("n1", "world of 2 goes on", times=2)
    assert "node 2 (n3) is lost" in job.text("n1") or "lost its agent" in job.text("n1")
    for epoch in range(EPOCHS):
        (job.folder / f"past-epoch-{epoch}").touch()
    codes = job.end()
    assert (codes["n1"], codes["n2"]) == (0, 0)
    assert "restarts 1" not in job.text("n1")
    steps = _items_by_step(job.folder)
    for epoch in range(EPOCHS):
        taken = [item for (of, _), items in steps.items() if of == epoch for item in items]
        assert sorted(taken) == list(range(ITEMS)), f"epoch {epoch}"
