"""Kill a training run at random instants, resume it each time, and compare it with one that was left alone.

    python benchmarks/kill_resume.py                    50 kills, digits on 2 ranks, 0 and 2 loader workers
    python benchmarks/kill_resume.py --kills 5 --json

Each kill is a SIGKILL of a random rank (the launcher restarts the ranks) or of everything, launcher included (the
command is typed again), at a random instant: while ranks start, read, step, or write a checkpoint. After a few kills
a run is left to finish. Then: its weights are those of the undisturbed run, bit for bit; its metrics.jsonl is the
same; every sample came once per epoch; and no checkpoint on disk is damaged.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
from conditions import arguments, conditions, in_words, told_as_json

EPOCHS, STEPS_PER_EPOCH, SAMPLES = 4, 21, 1293
KILLS_PER_RUN = 5


class Run:
    """One digits run on 2 ranks in a folder of its own, started as often as it is killed."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
        folder.mkdir(parents=True)
        self.log = (folder / "output.txt").open("a")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Type the command (again)."""
        words = [
            *(sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "--max-restarts", "100"),
            *("mnist", "--data", "digits", "--epochs", str(EPOCHS), "--num-workers", str(self.workers)),
            *(
                "--checkpoint-every-steps",
                "4",
                "--log-every-steps",
                "5",
                "--output-dir",
                "run",
                "--ledger",
                "ledger",
            ),
        ]
        self.process = subprocess.Popen(
            words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT
        )

    def kill(self, chance: random.Random) -> str | None:
        """Kill a random rank, or everything and type the command again; None when the run has ended already."""
        assert self.process is not None
        if self.process.poll() is not None:
            return None
        launcher = psutil.Process(self.process.pid)
        try:
            guardians = launcher.children()
            ranks = [rank for guardian in guardians for rank in guardian.children()]
            if ranks and chance.random() < 0.7:
                chance.choice(ranks).kill()
                return "rank"
            everything = [launcher, *launcher.children(recursive=True)]
            chance.shuffle(everything)
            for process in everything:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
        except psutil.NoSuchProcess:
            return None
        self.process.wait()
        psutil.wait_procs(everything, timeout=10)
        damaged = self.damaged()
        if damaged:
            raise SystemExit(f"damaged right after a kill: {damaged}")
        self.start()
        return "all"

    def finish(self) -> None:
        """Let it end by itself."""
        assert self.process is not None
        if self.process.wait(timeout=300) != 0:
            raise SystemExit(
                f"a run that was left alone failed, see {self.log.name}:\n{self.output()[-3000:]}"
            )

    def output(self) -> str:
        """What all its starts have printed."""
        return (self.folder / "output.txt").read_text()

    def damaged(self) -> list[str]:
        """What is wrong with the checkpoints on disk."""
        from torch.optim import Adam

        from phalanx.dist import CheckpointManager
        from phalanx.recipes.mnist import network

        model = network(side=8, classes=10, dropout=0.1)
        folder = self.folder / "run" / "checkpoints"
        if not folder.is_dir():
            return []
        return CheckpointManager(folder, model=model, optimizer=Adam(model.parameters())).verify()

    def weights(self) -> dict[str, Any]:
        """Of the last step."""
        from safetensors.torch import load_file

        last = self.folder / "run" / "checkpoints" / f"step-{EPOCHS * STEPS_PER_EPOCH}"
        return load_file(last / "model.safetensors")

    def metrics(self) -> list[str]:
        """The lines of metrics.jsonl."""
        return (self.folder / "run" / "metrics.jsonl").read_text().splitlines()

    def ledger_problems(self) -> list[str]:
        """Epochs in which a sample came twice or never; the last note of a step counts."""
        steps: dict[tuple[int, int], dict[str, list[int]]] = {}
        for path in (self.folder / "ledger").glob("rank-*.jsonl"):
            for text in path.read_text().splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    continue  # cut short by a kill
                steps.setdefault((line["epoch"], line["step"]), {})[path.name] = line["positions"]
        problems = []
        for epoch in range(EPOCHS):
            noted = [ranks for key, ranks in steps.items() if key[0] == epoch]
            taken = sorted(chain.from_iterable(chain.from_iterable(ranks.values()) for ranks in noted))
            if len(noted) != STEPS_PER_EPOCH or taken != list(range(SAMPLES)):
                problems.append(
                    f"epoch {epoch}: {len(noted)} steps, {len(taken)} samples, {len(set(taken))} different"
                )
        return problems


def compare(run: Run, undisturbed: Run) -> list[str]:
    """What differs from the run that was left alone."""
    import torch

    ours, theirs = run.weights(), undisturbed.weights()
    problems = [f"{name} differs" for name in theirs if not torch.equal(ours[name], theirs[name])]
    if run.metrics() != undisturbed.metrics():
        problems.append("metrics.jsonl differs")
    if "damaged" in run.output():
        problems.append("a damaged checkpoint was met")
    return problems + run.ledger_problems() + run.damaged()


def measure(kills: int, seed: int, workers_in_turn: list[int], folder: Path, say: Any) -> dict[str, Any]:
    """Undisturbed runs first, then killed ones until there were ``kills`` kills."""
    undisturbed, lasts_s = {}, 0.0
    for workers in workers_in_turn:
        run = Run(folder / f"undisturbed-{workers}", workers)
        begun = time.monotonic()
        run.start()
        run.finish()
        lasts_s = time.monotonic() - begun
        undisturbed[workers] = run
        say(f"undisturbed with {workers} workers: {lasts_s:.1f} s")
    first = undisturbed[workers_in_turn[0]]
    problems = [problem for run in undisturbed.values() for problem in compare(run, first)]
    chance, done, runs = random.Random(seed), {"rank": 0, "all": 0}, 0
    while sum(done.values()) < kills:
        workers = workers_in_turn[runs % len(workers_in_turn)]
        run = Run(folder / f"killed-{runs}", workers)
        run.start()
        for _ in range(min(KILLS_PER_RUN, kills - sum(done.values()))):
            time.sleep(chance.uniform(0.0, lasts_s))
            killed = run.kill(chance)
            if killed is None:
                break
            done[killed] += 1
        run.finish()
        found = compare(run, undisturbed[workers])
        say(f"run {runs}, {workers} workers: {sum(done.values())} kills so far, {found or 'equal'}")
        problems += [f"run {runs}: {problem}" for problem in found]
        runs += 1
    return {"kills": sum(done.values()), **done, "runs": runs, "problems": problems}


def main() -> None:
    parser = arguments(__doc__, whole=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the instants and the victims")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0, 2], help="loader workers, run after run"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        found = measure(
            args.kills, args.seed, args.workers, Path(folder), (lambda text: None) if args.json else print
        )
    found |= {
        "took_s": round(time.monotonic() - begun, 1),
        **conditions("torch", "python", "cpus"),
    }
    if not told_as_json(found, args):
        print(
            f"{found['kills']} kills ({found['rank']} of a rank, {found['all']} of everything) in {found['runs']} runs: ",
            end="",
        )
        print("each ended as the undisturbed run, to the bit" if not found["problems"] else found["problems"])
        print(f"{in_words(found)}, {found['took_s']} s")
    raise SystemExit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
