"""How many ranks on which GPUs, on nodes that are tables of facts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.launch.node_gpus import NodeGpu, NodeGpus
from phalanx.launch.options import Given
from phalanx.launch.placement import Placement, available_cores, choose
from phalanx.tools.usage import UsageMistake

FOUR = [NodeGpu(i, f"GPU-{i}{i}{i}{i}", "H100") for i in range(4)]
BUSY = [NodeGpu(0, "GPU-0000", "H100", ("python (pid 7, ann)",)), *FOUR[1:]]


def placed(
    gpus: str | None = None,
    nproc: str | None = None,
    *,
    every: list[NodeGpu] = FOUR,
    visible: list[NodeGpu] | None = None,
    cores: int = 8,
    environ: dict[str, str] | None = None,
    order_known: bool = True,
    one_per_process: bool = False,
) -> Placement:
    values = {}
    if gpus is not None:
        values["gpus"] = Given(gpus, "--gpus")
    if nproc is not None:
        values["nproc_per_node"] = Given(nproc, "--nproc-per-node")
    node = NodeGpus(
        every=tuple(every),
        visible=tuple(every if visible is None else visible),
        order_known=order_known,
        one_per_process=one_per_process,
    )
    found, used = choose(values, node, cores=cores, environ=environ or {})
    assert [gpu.label for gpu in used] == list(found.devices)
    return found


@pytest.mark.parametrize(
    ("gpus", "nproc", "ranks", "entries"),
    [
        (None, None, 4, None),
        (None, "2", 2, None),
        (None, "gpu", 4, None),
        (None, "auto", 4, None),
        (None, "cpu", 8, ()),
        ("all", None, 4, ("GPU-0000", "GPU-1111", "GPU-2222", "GPU-3333")),
        ("2,0", None, 2, ("GPU-2222", "GPU-0000")),
        ("GPU-33, 1", None, 2, ("GPU-3333", "GPU-1111")),
        ("auto", None, 4, ("GPU-0000", "GPU-1111", "GPU-2222", "GPU-3333")),
        ("auto:3", None, 3, ("GPU-0000", "GPU-1111", "GPU-2222")),
        ("auto:3", "1", 1, ("GPU-0000", "GPU-1111", "GPU-2222")),
        ("none", None, 1, ()),
        ("none", "6", 6, ()),
        ("none", "auto", 8, ()),
    ],
)
def test_four_idle_gpus(
    gpus: str | None, nproc: str | None, ranks: int, entries: tuple[str, ...] | None
) -> None:
    found = placed(gpus, nproc)
    assert (found.nproc_per_node, found.gpus) == (ranks, entries)
    assert len(found.devices) == (0 if entries == () else ranks)


@pytest.mark.parametrize(
    ("gpus", "nproc", "ranks"),
    [(None, None, 1), (None, "3", 3), (None, "auto", 8), ("auto", None, 1), ("none", "2", 2)],
)
def test_without_a_gpu_the_ranks_run_on_the_cpu(gpus: str | None, nproc: str | None, ranks: int) -> None:
    found = placed(gpus, nproc, every=[])
    assert (found.nproc_per_node, found.devices) == (ranks, ())


def test_gpus_in_use_are_left_out_and_their_users_named() -> None:
    found = placed(every=BUSY)
    assert found.gpus == ("GPU-1111", "GPU-2222", "GPU-3333")
    assert found.notes == ("left out, in use: GPU 0 by python (pid 7, ann).",)
    assert placed("auto:2", every=BUSY).gpus == ("GPU-1111", "GPU-2222")
    assert placed("all", every=BUSY).nproc_per_node == 4
    assert (
        placed(nproc="4", every=BUSY).gpus is None
    )  # asked for by number: torchrun's rule, all visible ones


def test_devices_follow_cudas_order() -> None:
    found = placed(visible=[FOUR[3], FOUR[1]])
    assert found.nproc_per_node == 2
    assert found.devices == ("GPU 3 (H100, GPU-3333)", "GPU 1 (H100, GPU-1111)")


@pytest.mark.parametrize(
    ("gpus", "nproc", "message"),
    [
        (None, "5", r"--nproc-per-node 5: 5 ranks, but 4 GPUs .*\nFix: --nproc-per-node 4, or --gpus none"),
        ("0,1", "3", r"3 ranks, but 2 GPUs \(0, 1\)"),
        (None, "0", "a node needs at least one rank"),
        (None, "-1", "a node needs at least one rank"),
        (None, "abc", "not a number, nor auto, gpu or cpu"),
        (None, "2.0", "not a number"),
        ("0,9", None, r"--gpus 0,9: '9' is not one of this node's GPUs \(0, 1, 2, 3\)"),
        ("0,", None, "'' is not one of"),
        ("", None, "'' is not one of"),
        ("atuo", None, r"\nFix: --gpus auto$"),
        ("GPU-", None, "'GPU-' fits 4 GPUs"),
        ("1,1", None, "GPU 1 is there twice"),
        ("1,GPU-11", None, "GPU 1 is there twice"),
        ("auto:5", None, r"4 of 4 visible GPUs are free.\nFix: --gpus auto:4"),
        ("auto:0", None, "auto:N takes a number of GPUs, 1 or more"),
        ("auto:x", None, "auto:N takes a number"),
    ],
)
def test_what_cannot_be_done_is_refused(gpus: str | None, nproc: str | None, message: str) -> None:
    with pytest.raises(UsageMistake, match=message):
        placed(gpus, nproc)


def test_an_inherited_list_is_an_upper_bound() -> None:
    with pytest.raises(
        UsageMistake, match=r"GPU 0 exists, but CUDA_VISIBLE_DEVICES hides it \(visible: 2, 3\)"
    ):
        placed("0", visible=FOUR[2:])
    with pytest.raises(UsageMistake, match="3 ranks, but 2 GPUs"):
        placed(nproc="3", visible=FOUR[2:])


def test_no_gpu_at_all() -> None:
    for gpus in ("all", "auto:1"):
        with pytest.raises(UsageMistake, match="--gpus none to run on the CPU"):
            placed(gpus, every=[])
    with pytest.raises(UsageMistake, match="no GPU is visible"):
        placed(nproc="gpu", every=[])


def test_when_every_gpu_is_in_use_nothing_starts() -> None:
    with pytest.raises(UsageMistake, match=r"Every visible GPU is in use: GPU 0 by python \(pid 7, ann\)"):
        placed(every=BUSY[:1])
    with pytest.raises(UsageMistake, match=r"0 of 1 visible GPUs are free. In use: GPU 0 by python"):
        placed("auto", every=BUSY[:1])


def test_where_cudas_order_is_unknown_no_rank_is_said_to_run_on_a_gpu() -> None:
    assert placed(order_known=False).devices == ()
    assert placed("all", order_known=False).devices == tuple(gpu.label for gpu in FOUR)  # by UUID: certain


def test_mig_instances_go_one_to_a_rank() -> None:
    instances = [NodeGpu(0, "MIG-a"), NodeGpu(0, "MIG-b")]
    found = placed(visible=instances, one_per_process=True)
    assert (found.nproc_per_node, found.gpus, found.virtual_local_rank) == (2, ("MIG-a", "MIG-b"), True)


def test_threads_are_the_cores_shared_among_the_ranks() -> None:
    assert placed(nproc="4", cores=64).omp_num_threads == 16
    assert placed(nproc="3", cores=2).omp_num_threads == 1
    assert placed(nproc="2", cores=2).threads == "OMP_NUM_THREADS=1 (2 cores for 2 ranks)"


def test_the_users_thread_count_is_left_alone() -> None:
    found = placed(nproc="2", environ={"OMP_NUM_THREADS": "5"})
    assert found.omp_num_threads is None
    assert found.threads == "OMP_NUM_THREADS=5, set by you"


def test_cores_are_those_of_the_affinity_within_the_containers_limit(tmp_path: Path) -> None:
    everything = len(os.sched_getaffinity(0))
    limit = tmp_path / "cpu.max"
    assert available_cores(limit) == everything
    limit.write_text("max 100000\n")
    assert available_cores(limit) == everything
    limit.write_text("50000 100000\n")
    assert available_cores(limit) == 1
    old = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(old)})
    try:
        assert available_cores(tmp_path / "absent") == 1
    finally:
        os.sched_setaffinity(0, old)
