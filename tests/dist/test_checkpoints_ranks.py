"""Several ranks save together and go on as any other number of ranks."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from phalanx.dist import checkpoint_files as files
from phalanx.dist.checkpoints import CheckpointError
from phalanx.dist.world import all_reduce_sum, gather_objects
from tests.dist.checkpoint_runs import OPTIMIZERS, Run
from tests.ranks import RankRunner


def _go_on(folder: Path, optimizer: str) -> Any:
    run = Run(folder / optimizer, optimizer)
    step = run.checkpoints.restore().step
    run.train(9)
    return step, run.weights()


def _save_and_go_on(rank: int, world_size: int, folder: str) -> Any:
    straight, resumed = {}, {}
    for optimizer in OPTIMIZERS:
        straight[optimizer] = _go_on(Path(folder) / "straight", optimizer)
        run = Run(Path(folder) / "c" / optimizer, optimizer)
        run.train(5)
        run.checkpoints.save(rank=rank)
        resumed[optimizer] = _go_on(Path(folder) / "c", optimizer)
    return straight, resumed


def _only_go_on(rank: int, world_size: int, folder: str) -> Any:
    return {optimizer: _go_on(Path(folder) / "c", optimizer) for optimizer in OPTIMIZERS}


def test_a_run_saved_on_two_ranks_goes_on_on_one_two_and_three(run_ranks: RankRunner, tmp_path: Path) -> None:
    (straight, two), (_, two_again) = run_ranks(_save_and_go_on, str(tmp_path), world_size=2)
    others = [_only_go_on(0, 1, str(tmp_path)), *run_ranks(_only_go_on, str(tmp_path), world_size=3)]
    for optimizer, (_, expected) in straight.items():
        assert files.find_problems(tmp_path / "c" / optimizer / "step-5") == []
        assert two[optimizer] == two_again[optimizer] == (5, expected), "on as many ranks, to the bit"
        for results in others:
            step, weights = results[optimizer]
            assert step == 5
            for found, value in zip(weights, expected, strict=True):
                assert found == pytest.approx(value, abs=1e-12)


def _train_and_save(folder: Path, strategy: str) -> dict[str, list[float]]:
    """Five steps, a save, and the loss and weights after four more, for each optimizer."""
    found = {}
    for optimizer in OPTIMIZERS:
        run = Run(folder / f"{strategy}-{optimizer}", optimizer, strategy=strategy)
        found[f"{strategy}-{optimizer}"] = _losses(run, save_at=5)[5:]
        run.checkpoints.close()
    return found


def _losses(run: Run, save_at: int | None = None) -> list[float]:
    """Of the steps up to the ninth over all samples of each: weights, optimizer, scheduler and order have a part in them."""
    losses = []
    while run.loader.progress.step < 9:
        for x, y in run.loader:
            loss = nn.functional.cross_entropy(run.model(x), y)
            run.optimizer.zero_grad()
            loss.backward()
            run.optimizer.step()
            run.scheduler.step()
            total, count = all_reduce_sum(loss.item() * run.loader.local_count, run.loader.local_count)
            losses.append(total / count)
            if run.loader.progress.step == save_at:
                run.checkpoints.save()
            if run.loader.progress.step >= 9:
                break
    return losses


def _resume(folder: Path, name: str, strategy: str) -> list[float]:
    run = Run(folder / name, name.partition("-")[2], strategy=strategy)
    assert run.checkpoints.restore().step == 5
    losses = _losses(run)
    run.checkpoints.close()
    return losses


def _pairs_on_two(rank: int, world_size: int, folder: str) -> Any:
    saved = {**_train_and_save(Path(folder), "ddp"), **_train_and_save(Path(folder), "fsdp")}
    resumed = {
        f"{name}>{strategy}": _resume(Path(folder), name, strategy)
        for strategy in ("ddp", "fsdp")
        for name in (*saved, *(f"single-{optimizer}" for optimizer in OPTIMIZERS))
    }
    return saved, resumed


def test_what_one_strategy_saves_every_other_resumes(run_ranks: RankRunner, tmp_path: Path) -> None:
    """24 pairs: saved and resumed by single, ddp and fsdp (3 x 3 less single by itself), three optimizers each."""
    saved = _train_and_save(tmp_path, "single")
    (on_two, resumed), _ = run_ranks(_pairs_on_two, str(tmp_path), world_size=2, timeout_s=120)
    saved |= on_two
    resumed |= {f"{name}>single": _resume(tmp_path, name, "single") for name in on_two}
    assert len(resumed) == 24
    for pair, losses in resumed.items():
        assert losses == pytest.approx(saved[pair.partition(">")[0]], rel=1e-10), pair


def _fail_on_rank_zero(rank: int, world_size: int, folder: str) -> Any:
    run = Run(Path(folder))
    run.train(2, save_each=2)

    def full(path: Path, value: Any) -> files.FileRecord:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_json, files.write_json = files.write_json, full
    run.train(3)
    with pytest.raises(CheckpointError) as caught:
        run.checkpoints.save()
    files.write_json = write_json
    run.train(4)
    run.checkpoints.save()
    return str(caught.value)


def test_a_full_disk_on_rank_zero_is_an_error_on_every_rank_and_no_hang(two_ranks: Scenarios) -> None:
    for text in two_ranks["full disk"]:
        assert "No space left on device" in text
        assert "step-2" in text
    assert sorted(os.listdir(two_ranks.folder / "full disk")) == [".lock", "step-2", "step-4"]


def _private_folders(rank: int, world_size: int, folder: str) -> str:
    run = Run(Path(folder) / f"node-{rank}")
    with pytest.raises(CheckpointError) as caught:
        run.checkpoints.restore()
    return str(caught.value)


def test_a_folder_that_nodes_do_not_share_is_refused_naming_them(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    def node(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        }  # fmt: skip

    for text in run_ranks(_private_folders, str(tmp_path), world_size=2, environ=node):
        assert "what rank 0 writes on" in text
        assert "(rank 1)" in text
        assert "storage that all nodes share" in text
    assert not list((tmp_path / "node-0").glob(".probe*"))


def _different_steps(rank: int, world_size: int, folder: str) -> str:
    run = Run(Path(folder))
    run.train(2)
    if rank == 1:
        run.loader.progress = type(run.loader.progress)(epoch=0, step_in_epoch=1, step=1)
    with pytest.raises(CheckpointError) as caught:
        run.checkpoints.save()
    return str(caught.value)


def test_ranks_at_different_steps_save_nothing(two_ranks: Scenarios) -> None:
    for text in two_ranks["different steps"]:
        assert "rank 0: 2, rank 1: 1" in text
    assert os.listdir(two_ranks.folder / "different steps") == [".lock"]


def _stale_read(rank: int, world_size: int, folder: str) -> str:
    run = Run(Path(folder))
    run.train(2, save_each=2)
    if rank == 1:  # as if this rank's file system still showed it other bytes
        digests = run.checkpoints.state.digests
        run.checkpoints.state.digests = lambda: {**digests(), "weights": "stale"}  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        run.checkpoints.restore()
    return str(caught.value)


def test_ranks_that_read_different_weights_are_named(two_ranks: Scenarios) -> None:
    for text in two_ranks["stale read"]:
        assert "weights of rank 1 differ from rank 0's" in text


def _fail_to_load_on_one_rank(rank: int, world_size: int, folder: str) -> str:
    run = Run(Path(folder))
    run.train(2, save_each=2)
    if rank == 1:
        run.scheduler.load_state_dict = None  # type: ignore[assignment,method-assign]
    with pytest.raises((CheckpointError, TypeError)) as caught:
        run.checkpoints.restore()
    return str(caught.value)


def test_an_error_on_one_rank_while_restoring_is_an_error_on_all(two_ranks: Scenarios) -> None:
    texts = two_ranks["failing load"]
    assert texts[0].startswith("rank 1: ")
    assert texts[0].removeprefix("rank 1: ") == texts[1]


def _stop(rank: int, world_size: int, folder: str, number: int) -> Any:
    run = Run(Path(folder))
    exit_status = None
    try:
        for _ in range(500):  # the ranks ask one another a few times a second
            for batch in run.loader:
                run.step(batch)
                if rank == 1 and run.loader.progress.step == 2:
                    os.kill(os.getpid(), number)
                run.checkpoints.maybe_save(note="asked")
    except SystemExit as ending:
        exit_status = ending.code
    run.checkpoints.close()  # its handlers go with it
    resumed = Run(Path(folder))
    restored = resumed.checkpoints.restore()
    return (
        exit_status,
        run.loader.progress.step,
        restored.step,
        restored.values,
        resumed.weights() == run.weights(),
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_one_rank_lets_all_save_at_one_step_and_exit_75(
    two_ranks: Scenarios, number: int
) -> None:
    first, second = two_ranks[f"signal {int(number)}"]
    status, step, saved_step, values, same_weights = first
    assert first == second
    assert (status, values, same_weights) == (75, {"note": "asked"}, True)
    assert step == saved_step > 2


def _every(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> list[bool]:
    run = Run(Path(folder), **options)
    if rank == 1:  # a clock of its own, and one that would ask all the time
        run.checkpoints._saved_at = -1e9
    saved = []
    for batch in run.loader:
        run.step(batch)
        saved.append(run.checkpoints.maybe_save())
    run.checkpoints.close()
    return saved


def test_ranks_agree_when_it_is_time_and_only_rank_zeros_clock_counts(two_ranks: Scenarios) -> None:
    assert two_ranks["every 2 steps"] == [[False, True, False, True]] * 2
    assert two_ranks["every moment"] == [[False, True, True, True]] * 2


def _accumulate(rank: int, world_size: int, folder: str) -> list[tuple[int, bool]]:
    run = Run(Path(folder), every_steps=1, loader_options={"micro_batch_size": 2})
    saved = []
    for _ in run.loader:
        if run.loader.progress.step == 1 and not run.loader.is_last_micro:
            os.kill(os.getpid(), signal.SIGUSR1)
        try:
            saved.append((run.loader.is_last_micro, run.checkpoints.maybe_save()))
        except SystemExit:
            break
    run.checkpoints.close()
    return saved


def test_nothing_is_saved_between_the_micro_batches_of_a_step(two_ranks: Scenarios) -> None:
    for saved in two_ranks["accumulation"]:
        assert saved
        assert all(last for last, was_saved in saved if was_saved)


SCENARIOS: dict[str, Callable[[int, int, str], Any]] = {
    "full disk": _fail_on_rank_zero,
    "different steps": _different_steps,
    "stale read": _stale_read,
    "failing load": _fail_to_load_on_one_rank,
    "every 2 steps": partial(_every, options={"every_steps": 2, "every_s": 1e6}),
    "every moment": partial(_every, options={"every_s": 1e-9}),
    "accumulation": _accumulate,
    **{f"signal {int(n)}": partial(_stop, number=n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)},
}


def _all_scenarios(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {name: play(rank, world_size, str(Path(folder) / name)) for name, play in SCENARIOS.items()}


class Scenarios(dict[str, list[Any]]):
    """Each scenario's values, one per rank; its folder is named after it."""

    folder: Path


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    """All scenarios played by one pair of ranks: starting ranks takes longer than any of them."""
    folder = tmp_path_factory.mktemp("ranks")
    results = RankRunner(folder)(_all_scenarios, str(folder), world_size=2, timeout_s=120)
    played = Scenarios({name: [result[name] for result in results] for name in SCENARIOS})
    played.folder = folder
    return played


def _peer_dies(rank: int, world_size: int, folder: str) -> Any:
    run = Run(Path(folder), patience_s=2)
    run.train(2, save_each=2)
    gather_objects(None)
    run.train(3)
    gather_objects(None)
    if rank == 1:
        return "gone"  # its process ends here, without saving
    time.sleep(1)
    try:
        run.checkpoints.save()
    except (RuntimeError, dist.DistBackendError) as error:
        return f"raised {type(error).__name__}"
    return "saved"


def test_when_a_peer_is_gone_nothing_is_saved(run_ranks: RankRunner, tmp_path: Path) -> None:
    assert run_ranks(_peer_dies, str(tmp_path / "c"), world_size=2)[0].startswith("raised")
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-2"]
