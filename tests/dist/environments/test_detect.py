"""detect: which launcher speaks, and what it must say."""

from __future__ import annotations

import doctest
import importlib
import warnings

import pytest

from phalanx.dist.environments import InvalidRankEnvironment, detect

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "linux[1,2],big[07-08]",
    "SLURM_NTASKS": "7",
}


def without(environ: dict[str, str], *names: str, **changed: str) -> dict[str, str]:
    return {**{name: value for name, value in environ.items() if name not in names}, **changed}


def place(environ: dict[str, str]) -> tuple[object, ...]:
    found = detect(environ)
    return (
        found.rank,
        found.local_rank,
        found.node_rank,
        found.world_size,
        found.local_world_size,
        found.source,
    )


def test_torchrun() -> None:
    found = detect(TORCHRUN)
    assert place(TORCHRUN) == (3, 1, 1, 4, 2, "torchrun")
    assert (found.master_addr, found.master_port) == ("node1", 29500)


def test_nothing_set_is_one_process() -> None:
    assert place({}) == (0, 0, 0, 1, 1, "single")
    assert place({"MASTER_ADDR": "node1", "MASTER_PORT": "1", "RANK": "", "OMPI": "1"}) == (
        0,
        0,
        0,
        1,
        1,
        "single",
    )


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("RANK",), "RANK is missing"),
        (("WORLD_SIZE",), "WORLD_SIZE is missing"),
        (("LOCAL_RANK",), "LOCAL_RANK is missing"),
        (("MASTER_PORT",), "MASTER_PORT is missing"),
        (("MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR, MASTER_PORT are missing"),
        (("RANK", "LOCAL_RANK", "MASTER_ADDR"), "RANK, LOCAL_RANK, MASTER_ADDR are missing"),
    ],
)
def test_partly_set_names_what_is_missing(names: tuple[str, ...], missing: str) -> None:
    with pytest.raises(InvalidRankEnvironment, match=missing) as error:
        detect(without(TORCHRUN, *names))
    assert "\nFix: " in str(error.value)
    assert isinstance(error.value, ValueError)


def test_local_rank_where_only_one_answer_is_possible() -> None:
    bare = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    with pytest.raises(InvalidRankEnvironment, match="LOCAL_WORLD_SIZE=1 when every node has one rank"):
        detect(bare)
    assert place({**bare, "MASTER_ADDR": "127.0.0.1"}) == (3, 3, 0, 4, 4, "torchrun")
    assert place({**bare, "LOCAL_WORLD_SIZE": "4"}) == (3, 3, 0, 4, 4, "torchrun")
    assert place({**bare, "LOCAL_WORLD_SIZE": "1"}) == (3, 0, 3, 4, 1, "torchrun")
    assert place({"RANK": "0", "WORLD_SIZE": "1"}) == (0, 0, 0, 1, 1, "torchrun")


def test_ranks_per_node_may_be_unknown() -> None:
    found = detect(without(TORCHRUN, "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    assert (found.local_world_size, found.node_rank) == (None, None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "4"}, r"rank 4 is outside a world of 4 \(ranks 0 to 3\)"),
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"RANK": "1.0"}, r"RANK='1\.0' is not a whole number"),
        ({"RANK": "-1"}, "RANK=-1: it must be 0 or more"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: it must be 1 or more"),
        ({"LOCAL_RANK": "2"}, "local rank 2 is outside this node's 2 ranks"),
        ({"LOCAL_WORLD_SIZE": "5"}, "5 ranks on this node, but 4 in the whole world"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: it must be between 1 and 65535"),
    ],
)
def test_values_that_cannot_be(changed: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRankEnvironment, match=message):
        detect({**TORCHRUN, **changed})


def test_slurm_step() -> None:
    found = detect(STEP)
    assert place(STEP) == (6, 0, 3, 7, 1, "slurm")
    assert found.master_addr == "linux1"
    assert found.master_port is not None
    assert 20000 <= found.master_port < 29000
    first = without(STEP, SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_NODEID="0")
    assert place(first) == (1, 1, 0, 7, 2, "slurm")
    assert detect(first).master_port == found.master_port
    assert detect({**STEP, "SLURM_STEP_ID": "1"}).master_port != found.master_port


def test_the_step_comes_before_the_job() -> None:
    task = without(
        STEP,
        SLURM_NTASKS="8",
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_NUM_NODES="1",
        SLURM_PROCID="1",
        SLURM_LOCALID="1",
    )
    assert detect(task).world_size == 2
    assert detect(without(task, "SLURM_STEP_NUM_TASKS")).world_size == 8
    assert detect(task).master_addr == "127.0.0.1"


def test_torchrun_inside_a_step_is_torchruns() -> None:
    for rank in ("0", "1"):
        child = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }
        task = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
        assert place({**task, **child}) == (int(rank), int(rank), 0, 2, 2, "torchrun")


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"},  # salloc's shell
        {
            "SLURM_JOB_ID": "1",
            "SLURM_NTASKS": "8",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },  # sbatch's script
        {
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_TASKS": "1",
        },
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "batch", "SLURM_NTASKS": "8"},
    ],
)
def test_outside_a_step_is_one_process(environ: dict[str, str]) -> None:
    assert place(environ) == (0, 0, 0, 1, 1, "single")


def test_visible_gpus_play_no_part() -> None:
    task = without(
        STEP,
        SLURM_STEP_NUM_NODES="1",
        SLURM_STEP_NUM_TASKS="4",
        SLURM_PROCID="2",
        SLURM_LOCALID="2",
        CUDA_VISIBLE_DEVICES="0",
    )
    assert detect(task).world_size == 4


def test_one_task_for_two_asked_warns() -> None:
    task = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    with pytest.warns(UserWarning, match="SLURM_NTASKS_PER_NODE=2, but SLURM_NTASKS=1"):
        assert detect(task).world_size == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert detect({**STEP, "SLURM_NTASKS_PER_NODE": "2"}).world_size == 7


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_several_nodes_that_each_reach_only_themselves(address: str) -> None:
    with pytest.raises(InvalidRankEnvironment, match="4 separate runs of one node each"):
        detect({**STEP, "MASTER_ADDR": address})
    lone = {**TORCHRUN, "SLURM_NNODES": "4", "MASTER_ADDR": address, "WORLD_SIZE": "4"}
    with pytest.raises(InvalidRankEnvironment, match="SLURM_NNODES=4 nodes"):
        detect(lone)
    assert detect({**lone, "SLURM_STEP_NUM_NODES": "1"}).world_size == 4


def test_a_masters_address_that_is_set_stays() -> None:
    found = detect({**STEP, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"})
    assert (found.master_addr, found.master_port) == ("10.0.0.9", 4000)


def test_variables_by_hand_must_agree_with_the_step() -> None:
    assert detect({**STEP, "WORLD_SIZE": "7"}).source == "slurm"
    with pytest.raises(InvalidRankEnvironment, match="WORLD_SIZE=8, but this Slurm task's is 7"):
        detect({**STEP, "WORLD_SIZE": "8"})


def test_a_step_without_its_variables() -> None:
    with pytest.raises(InvalidRankEnvironment, match="SLURM_LOCALID not set"):
        detect(without(STEP, "SLURM_LOCALID"))
    with pytest.raises(InvalidRankEnvironment, match="neither SLURM_STEP_NODELIST nor MASTER_ADDR"):
        detect(without(STEP, "SLURM_STEP_NODELIST"))
    with pytest.raises(InvalidRankEnvironment, match="SLURM_STEP_NODELIST: Slurm node list 'linux\\[1'"):
        detect({**STEP, "SLURM_STEP_NODELIST": "linux[1"})


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_mpis_processes_do_not_run_alone(name: str) -> None:
    with pytest.raises(InvalidRankEnvironment, match=f"{name}=4, but .*_RANK is not set"):
        detect({name: "4"})
    assert detect({name: "1"}).source == "single"
    assert detect({**TORCHRUN, name: "4"}).source == "torchrun"


@pytest.mark.parametrize(
    "name",
    [
        "environments",
        "environments.accelerate_launch",
        "environments.mpi",
        "environments.slurm",
        "environments.torchrun",
        "environments.hostfile",
        "environments.single",
        "visibility",
        "rendezvous",
    ],
)
def test_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"phalanx.dist.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
