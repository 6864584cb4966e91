"""What DeepSpeed's ZeRO shares out is saved and resumed as any other strategy's state, on any number of ranks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets a variable in the environment
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.dist import checkpoint_files as files
from phalanx.dist.checkpoint_shards import consolidate_weights
from phalanx.dist.checkpoints import CheckpointError, CheckpointManager, OptimizerMismatchError, Restored
from phalanx.dist.key_matches import KeysDifferError
from phalanx.dist.key_rewrites import NothingMatchedError
from phalanx.dist.loaders import ShardLoader
from phalanx.dist.parallel import parallelize
from phalanx.dist.state_dict import load_state_dict
from phalanx.dist.world import all_reduce_sum, barrier
from tests.ranks import RankRunner

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install 'phalanx[deepspeed]')"
)
SAVED_AT, UNTIL = 3, 6
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.02, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.02),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.02, momentum=0.5),
}
SAVERS = ("zero1 adam", "zero2 sgd", "zero3 adamw", "zero3 sgd", "accelerate adamw", "ddp adam")
RESUMERS = ("zero0", "zero1", "zero2", "zero3", "ddp", "fsdp", "accelerate")
# Every second of all pairs; benchmarks/resume_pairs.py plays the others.
PAIRS = [(n, s) for i, s in enumerate(RESUMERS) for j, n in enumerate(SAVERS) if (i + j) % 2 == 0]


class Net(nn.Module):
    """Sizes that no world divides, a tied weight, a frozen layer and a buffer."""

    def __init__(self, gain: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.inner.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.gain = nn.Parameter(torch.full(gain, 1.5))
        self.register_buffer("shift", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.head(self.outer(torch.tanh(self.inner(x))))
        return self.frozen(hidden) * self.gain + self.shift


class Job:
    """A user's script; its fresh weights are others than those that are saved."""

    def __init__(
        self, folder: Path, strategy: str, kind: str, net: nn.Module | None = None, **more: Any
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(40, 5, generator=generator)
        self.loader = ShardLoader(TensorDataset(x, x.argmax(1)), global_batch_size=10, shuffle=True, seed=3)
        if net is None:
            torch.manual_seed(len(str(folder)))
            net = Net()
        options: dict[str, Any] = {"precision": more.pop("precision", "fp32")}
        if strategy.startswith("zero"):
            # Some weights are small enough to be kept whole by each rank in stage 3, others are not.
            zero = {"stage": int(strategy[-1]), "stage3_param_persistence_threshold": 20}
            options["config"] = {"zero_optimization": zero, **more.pop("config", {})}
        trained = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
        groups = [
            {"params": [param for name, param in trained if "bias" not in name]},
            {"params": [param for name, param in trained if "bias" in name], "lr": 0.01},
        ]
        self.model, self.optimizer, self.engine = parallelize(
            net,
            OPTIMIZERS[kind](groups),
            "deepspeed" if strategy.startswith("zero") else strategy,
            loader=self.loader,
            device="cpu",
            **options,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.checkpoints = CheckpointManager(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            scheduler=self.scheduler,
            **more,
        )
        self._batches = self._forever()

    def step(self, batch: list[torch.Tensor]) -> float:
        x, y = batch
        with self.engine.micro_step():
            loss = nn.functional.cross_entropy(self.model(x).double(), y, reduction="sum")
            self.engine.backward(loss, self.loader.global_count)
        self.engine.step()
        self.scheduler.step()
        return float(all_reduce_sum(loss.item() if self.loader.local_count else 0.0))

    def train(self, until: int = UNTIL) -> list[float]:
        """Steps up to this number, and the loss of each over all ranks; it goes on within the epoch where it was."""
        losses: list[float] = []
        while self.loader.progress.step < until:
            losses.append(self.step(next(self._batches)))
        return losses

    def _forever(self) -> Iterator[list[torch.Tensor]]:
        while True:
            yield from self.loader

    def restore(self, **options: Any) -> Restored:
        self._batches = self._forever()
        return self.checkpoints.restore(**options)

    def export(self) -> dict[str, list[float]]:
        """All weights, whole. Collective."""
        return {
            key: value.float().reshape(-1).tolist() for key, value in self.engine.export()["model"].items()
        }


def _save(folder: Path, name: str, **more: Any) -> list[float]:
    """Train, save, train on: the losses after the save."""
    strategy, kind = name.split()
    torch.manual_seed(7)
    net = Net()
    net.shift.fill_(0.25)
    job = Job(folder / name, strategy, kind, net, **more)
    job.train(SAVED_AT)
    job.checkpoints.save(by=name)
    losses = job.train()
    job.checkpoints.close()
    return losses


def _resume(folder: Path, name: str, strategy: str, **more: Any) -> list[float]:
    job = Job(folder / name, strategy, name.split()[1], **more)
    restored = job.restore()
    assert (restored.step, restored.values) == (SAVED_AT, {"by": name})
    losses = job.train()
    job.checkpoints.close()
    return losses


def _save_all(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    return {name: _save(Path(folder), name, asynchronous="zero" in name) for name in SAVERS}


def _resume_all(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    return {f"{name} > {other}": _resume(Path(folder), name, other) for name, other in PAIRS}


def test_saved_on_four_ranks_by_any_stage_and_resumed_on_two_and_one_by_any_strategy(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    saved, *others = run_ranks(_save_all, str(tmp_path), world_size=4, timeout_s=170)
    assert all(other == saved for other in others)
    resumed, again = run_ranks(_resume_all, str(tmp_path), world_size=2, timeout_s=170)
    assert resumed == again
    resumed |= {f"{name} > single": _resume(tmp_path, name, "single") for name in SAVERS}
    assert len(resumed) == len(PAIRS) + len(SAVERS) == 27
    for pair, losses in resumed.items():
        expected = saved[pair.partition(" > ")[0]]
        assert losses[0] == pytest.approx(expected[0], rel=1e-6), pair
        assert losses == pytest.approx(expected, rel=1e-4), pair
    for name in SAVERS:
        _check_files(tmp_path / name / f"step-{SAVED_AT}", sharded="zero3" in name)


def _check_files(path: Path, *, sharded: bool) -> None:
    """Names and weights as a tool that knows nothing of phalanx sees them."""
    found = sorted(os.listdir(path))
    shards = [f"shard-{rank}.safetensors" for rank in range(4)]
    whole = ["model.safetensors", "optimizer.safetensors"]
    assert found == sorted(
        ["manifest.json", "state.json", *([*shards, "shards.json"] if sharded else whole)]
    ), path
    assert json.loads((path / "state.json").read_text())["world_size"] == 4
    assert files.find_problems(path) == []
    file = consolidate_weights(path, path.parent / "weights.safetensors") if sharded else path / whole[0]
    weights = load_file(file)
    assert set(weights) | {"head.weight"} == set(Net().state_dict())
    assert all(
        weights[key].shape == value.shape for key, value in Net().state_dict().items() if key in weights
    )
    assert weights["shift"].tolist() == [0.25] * 7
    model = Net()
    load_state_dict(model, path)
    assert torch.equal(model.inner.weight, weights["inner.weight"])


# ---- one pair of ranks for what takes them less time than to start


def _sixteen_bits(folder: Path) -> dict[str, Any]:
    """The fp32 weights are what is saved, and the loss scale with fp16."""
    from deepspeed.accelerator import get_accelerator

    found: dict[str, Any] = {}
    precisions = ["bf16"] + ["fp16"] * bool(get_accelerator().is_fp16_supported())
    for precision in precisions:
        scale = {"fp16": {"initial_scale_power": 4, "loss_scale_window": 2}} if precision == "fp16" else {}
        for stage in (1, 3) if precision == "bf16" else (2,):
            name, where = f"zero{stage} adam", folder / precision
            job = Job(where / name, name[:5], "adam", precision=precision, config=scale)
            job.train(SAVED_AT)
            job.checkpoints.save(by=name)
            masters = job.export()
            scaler = job.engine.scaler.state_dict() if precision == "fp16" else None
            losses = job.train()
            for other in {stage, 3 if stage == 1 else 1}:
                again = Job(where / name, f"zero{other}", "adam", precision=precision, config=scale)
                again.restore()
                same = again.export() == masters
                found[f"{precision} {stage} > {other}"] = (same, again.train() == losses)
            plain = Job(where / name, "ddp", "adam", precision="fp32")
            plain.restore()
            found[f"{precision} {stage} > fp32"] = plain.export() == masters
            if scaler is not None:
                for other in ("zero2", "ddp"):  # torch's scaler keeps more than DeepSpeed's
                    fresh = Job(where / name, other, "adam", precision=precision)
                    fresh.restore()
                    found[f"scaler {other}"] = (fresh.engine.scaler.state_dict()["scale"], scaler["scale"])
    return found


def _odd(folder: Path) -> dict[str, Any]:
    """An optimizer that keeps something else, a fresh state, and a second restore in one run."""
    found: dict[str, Any] = {}
    for kind in ("adamw", "rmsprop"):
        job = Job(folder / kind, "ddp", kind)
        job.train(SAVED_AT)
        job.checkpoints.save()
        expected = job.train()
        for stage in (1, 3):
            zero = Job(folder / kind, f"zero{stage}", kind)
            zero.restore()
            first = zero.train()
            zero.restore()
            assert zero.train() == first
            found[f"{kind} {stage}"] = (first, expected)
    fresh = Job(folder / "fresh", "zero2", "adam")
    fresh.checkpoints.save()
    before = fresh.train(2)
    fresh.restore()
    assert fresh.train(2) == before
    return found


def _else_from(folder: Path) -> dict[str, Any]:
    """A tutorial's dict goes into the fp32 weights, not only where the next step would overwrite it."""
    torch.manual_seed(5)
    wanted = {key: value.reshape(-1).tolist() for key, value in Net().state_dict().items()}
    torch.manual_seed(5)
    theirs = {"model": Net().state_dict(), "epoch": 1}
    found = {}
    for stage in (1, 2, 3):
        job = Job(folder / f"zero{stage}", f"zero{stage}", "sgd", precision="bf16" if stage == 2 else "fp32")
        assert job.restore(else_from=theirs).epoch == 1
        mine = job.export()
        # Of what is not trained DeepSpeed keeps the 16-bit weights alone.
        found[stage] = all(mine[key] == wanted[key] for key in wanted if stage != 2 or "frozen" not in key)
        alone = Job(folder / f"alone{stage}", f"zero{stage}", "sgd")
        load_state_dict(alone.model, theirs)
        assert alone.export() == wanted
    return found


def _refused(folder: Path) -> dict[str, str]:
    found = {}
    job = Job(folder / "one", "zero3", "adam")
    job.train(2)
    job.checkpoints.save()
    for saver, other in (("zero2", "ddp"), ("ddp", "zero2")):
        rows = Job(folder / saver, saver, "adafactor")
        rows.train(1)
        rows.checkpoints.save()
        assert Job(folder / saver, saver, "adafactor").restore().step == 1
        with pytest.raises(OptimizerMismatchError) as strategy:
            Job(folder / saver, other, "adafactor").restore()
        found[saver] = str(strategy.value)
    for name, net, kind, error in (
        ("model", nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 7)), "adam", NothingMatchedError),
        ("optimizer", Net(), "sgd", OptimizerMismatchError),
    ):
        other = Job(folder / "one", "zero3", kind, net)
        before = other.export()
        with pytest.raises(error) as caught:
            other.restore()
        assert other.export() == before
        found[name] = str(caught.value)
    wide = Net()
    wide.outer = nn.Linear(7, 6, bias=False)
    with pytest.raises(KeysDifferError) as differ:
        Job(folder / "one", "zero3", "adam", wide).restore()
    found["shapes"] = str(differ.value)
    with pytest.raises(ValueError, match="does not train this model"):
        CheckpointManager(
            folder / "x", model=job.model, optimizer=torch.optim.SGD(Net().parameters(), lr=0.1)
        )
    with pytest.raises(ValueError, match=r"parameters without dims \(gain\)"):
        Job(folder / "scalar", "zero1", "sgd", Net(gain=()))
    import deepspeed

    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    net = Net()
    theirs, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        config=config,
        dist_init_required=False,
    )
    with pytest.raises(ValueError, match=r"comes from deepspeed.initialize"):
        CheckpointManager(folder / "x", model=theirs, optimizer=theirs.basic_optimizer)
    with job.engine.micro_step():
        job.engine.backward(job.model(torch.ones(1, 5)).sum(), 2)
    with pytest.raises(CheckpointError, match="inside a step"):
        job.checkpoints.save()
    job.engine.step()
    return found


def _full(path: Path, *_: Any) -> files.FileRecord:
    raise OSError(28, os.strerror(28))


def _save_to_disk(checkpoints: CheckpointManager) -> None:
    checkpoints.save()
    checkpoints.wait()


def _disk_full(folder: Path, rank: int) -> dict[str, Any]:
    """Stage 2 is written by rank 0, stage 3 by every rank."""
    found: dict[str, Any] = {}
    for stage, failing, asynchronous in ((2, 0, True), (3, 1, False)):
        where = folder / str(stage)
        job = Job(where, f"zero{stage}", "adam", asynchronous=asynchronous)
        job.train(1)
        job.checkpoints.save()
        job.train(2)
        job.checkpoints.wait()
        write = files.write_tensors
        if rank == failing:
            files.write_tensors = _full  # type: ignore[assignment]
        with pytest.raises(CheckpointError) as caught:
            _save_to_disk(job.checkpoints)
        files.write_tensors = write
        barrier()  # rank 0 tidies up
        found[str(stage)] = (str(caught.value), sorted(os.listdir(where)))
        _save_to_disk(job.checkpoints)
        assert job.checkpoints.verify() == []
    return found


def _signal(folder: Path, rank: int) -> dict[str, Any]:
    found = {}
    for stage in (1, 3):
        job = Job(folder / str(stage), f"zero{stage}", "adam")
        status = None
        try:
            while True:  # the ranks ask one another a few times a second
                for batch in job.loader:
                    job.step(batch)
                    if rank == 1 and job.loader.progress.step == 2:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    job.checkpoints.maybe_save()
        except SystemExit as ending:
            status = ending.code
        job.checkpoints.close()
        again = Job(folder / str(stage), f"zero{stage}", "adam")
        restored = again.restore()
        found[stage] = (status, restored.step == job.loader.progress.step, again.export() == job.export())
    return found


def _scenarios(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    base = Path(folder)
    return {
        "16 bits": _sixteen_bits(base / "bits"),
        "odd": _odd(base / "odd"),
        "else_from": _else_from(base / "else"),
        "refused": _refused(base / "refused"),
        "disk full": _disk_full(base / "full", rank),
        "signal": _signal(base / "signal", rank),
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All scenarios played by one pair of ranks: starting them takes longer than any of them."""
    folder = tmp_path_factory.mktemp("zero")
    return RankRunner(folder)(_scenarios, str(folder), world_size=2, timeout_s=170)


def test_masters_of_16_bit_weights_and_the_loss_scale_come_back_to_the_bit(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        for what, same in found["16 bits"].items():
            if what.startswith("scaler"):
                assert same[0] == same[1] != 16.0
            else:
                assert same in (True, (True, True)), what


def test_other_optimizers_fresh_states_and_restoring_twice(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        for what, (losses, expected) in found["odd"].items():
            assert losses == pytest.approx(expected, rel=1e-4), what


def test_a_run_starts_from_a_tutorials_dict(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["else_from"] == {1: True, 2: True, 3: True}


def test_what_does_not_fit_is_named_and_nothing_changed(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        refused = found["refused"]
        assert "'inner.weight'" in refused["model"]
        assert "optimizer is Adam, this run's is SGD" in refused["optimizer"]
        assert "parameters joined and cut by ZeRO" in refused["zero2"]
        assert "parameters as they are: unlike SGD's and Adam's" in refused["ddp"]
        assert "outer.weight [5, 7] -> [6, 7]" in refused["shapes"]


def test_a_full_disk_is_told_to_all_and_what_was_saved_stays(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        for text, names in found["disk full"].values():
            assert "No space left on device" in text
            assert names == [".lock", "step-1"]


def test_a_signal_saves_and_ends_with_75(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["signal"] == {1: (75, True, True), 3: (75, True, True)}
