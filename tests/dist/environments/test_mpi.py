"""MPI's variables: ranks, local ranks, where to meet; and a real mpirun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.dist.environments import InvalidRankEnvironment, detect, mpi

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "12",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "875560961",
    "MASTER_ADDR": "node1",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
INTEL = {
    "PMI_RANK": "2",
    "PMI_SIZE": "3",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "1",
    "MASTER_ADDR": "node1",
}
CRAY = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
}
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (OPEN_MPI, (5, 1, None, 12, 8)),  # device 1, not 5 % 8
        (MVAPICH, (3, 1, None, 4, 2)),
        (INTEL, (2, 0, None, 3, 1)),
        (CRAY, (1, 1, 0, 2, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 0, 0, 1, 1)),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            (1, 1, 0, 2, 2),
        ),
    ],
)
def test_places(environ: dict[str, str], place: tuple[int | None, ...]) -> None:
    found = detect(environ)
    assert found.source == "mpi"
    assert (found.rank, found.local_rank, found.node_rank, found.world_size, found.local_world_size) == place


def test_who_speaks_first() -> None:
    """torchrun, then MPI, then Slurm."""
    assert detect({**OPEN_MPI, **TORCHRUN}).source == "torchrun"
    assert detect({**CRAY, **STEP}).source == "mpi"
    # srun --mpi=pmi2 tells no local rank; Slurm does
    assert detect({"PMI_RANK": "1", "PMI_SIZE": "2", **STEP}).source == "slurm"


SEVERAL_NODES = {
    **STEP,
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[05-06]",
    "SLURM_JOB_NODELIST": "n[01-06]",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
}


def test_srun_that_speaks_pmi_tells_the_rest() -> None:
    """Cray's and Slurm's own PMI on several nodes: the step's first host, not the allocation's."""
    found = detect({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", **SEVERAL_NODES})
    assert (found.source, found.rank, found.local_rank, found.local_world_size) == ("mpi", 3, 1, 2)
    assert (found.node_rank, found.master_addr) == (1, "n05")
    found = detect({"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.0", **SEVERAL_NODES})
    assert (found.source, found.master_addr, found.rank) == ("slurm", "n05", 3)


def test_daemons_that_mpirun_starts_by_srun_are_no_ranks() -> None:
    """One task for each node, whose number says nothing about the ranks on it."""
    daemon = {**SEVERAL_NODES, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    hydra = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    found = detect({**hydra, **daemon})
    assert (found.source, found.rank, found.local_rank, found.local_world_size) == ("mpi", 5, 1, 4)
    assert found.master_addr == "n01"  # where mpirun runs, and rank 0
    with pytest.raises(InvalidRankEnvironment, match="none of MPI_LOCALRANKID"):
        detect({"PMI_RANK": "5", "PMI_SIZE": "8", **daemon})


def test_what_is_left_over_in_the_environment_is_told() -> None:
    """Processes that each take themselves for the only one."""
    by_hand = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for several in (CRAY, OPEN_MPI, STEP):
        with pytest.warns(UserWarning, match="each trains alone. Fix: unset RANK WORLD_SIZE LOCAL_RANK"):
            assert detect({**several, **by_hand}).world_size == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert detect({**several, **by_hand, "TORCHELASTIC_RUN_ID": "7"}).world_size == 1
    with pytest.warns(
        UserWarning, match="MASTER_ADDR=trainer-0.trainer is set, but neither RANK nor WORLD_SIZE"
    ):
        assert detect({"MASTER_ADDR": "trainer-0.trainer", "MASTER_PORT": "29500"}).source == "single"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert detect({"MASTER_ADDR": "127.0.0.1"}).source == "single"


def test_where_to_meet(tmp_path: Path) -> None:
    found = detect(OPEN_MPI)
    assert found.master_addr == "node1"
    assert found.master_port == mpi.master_port({"PMIX_NAMESPACE": "875560961"})
    assert found.master_port != mpi.master_port({"PMIX_NAMESPACE": "875560962"})
    assert 20000 <= found.master_port < 29000
    assert detect(MVAPICH).master_port == 1234
    assert detect(CRAY).master_addr == "127.0.0.1"
    several = {name: value for name, value in OPEN_MPI.items() if name != "MASTER_ADDR"}
    with pytest.raises(
        InvalidRankEnvironment,
        match=r"several nodes, and MASTER_ADDR is not set.*\n.*\nFix: mpirun -x MASTER_ADDR",
    ):
        detect(several)
    nodes = tmp_path / "nodes"
    nodes.write_text("pbs1\npbs1\npbs2\n")
    assert detect({**several, "PBS_NODEFILE": str(nodes)}).master_addr == "pbs1"
    assert detect({**several, "LSB_MCPU_HOSTS": "lsf1 8 lsf2 4"}).master_addr == "lsf1"
    assert detect({**several, "SLURM_JOB_NODELIST": "n[03-04]"}).master_addr == "n03"
    with pytest.raises(InvalidRankEnvironment, match="SLURM_JOB_NODELIST: Slurm node list"):
        detect({**several, "SLURM_JOB_NODELIST": "n[03-"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is missing"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_RANK is not set"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            "none of MPI_LOCALRANKID, PMI_LOCAL_RANK, PALS_LOCAL_RANKID is set",
        ),
        ({**CRAY, "PMI_RANK": "x"}, "PMI_RANK='x' is not a whole number"),
        ({**CRAY, "PMI_RANK": "2"}, "rank 2 is outside a world of 2"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "8"}, "local rank 8 is outside this node's 8 ranks"),
        ({**OPEN_MPI, "MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost, but MPI started 8 of 12 ranks"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "7"}, "PMIX_RANK=1, but nothing tells how many"),
        ({**OPEN_MPI, "WORLD_SIZE": "4"}, "WORLD_SIZE=4, but this Open MPI process's is 12"),
    ],
)
def test_what_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRankEnvironment, match=message):
        detect(environ)


SCRIPT = """
import json, os, sys
from phalanx.dist.world import all_reduce_sum, init_world
world = init_world(timeout_s=60)
total = all_reduce_sum(world.rank + 1)
line = {"rank": world.rank, "local_rank": world.local_rank, "size": world.world_size, "here": world.local_world_size,
        "source": world.source, "total": total, "exported": os.environ["LOCAL_RANK"], "node": world.node_rank}
open(f"{sys.argv[1]}/{world.rank}.json", "w").write(json.dumps(line))
"""


@pytest.fixture
def short_folders() -> Iterator[Callable[[], str]]:
    made: list[str] = []

    def make() -> str:
        made.append(tempfile.mkdtemp(prefix="mpi-"))
        return made[-1]

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (Debian: apt install openmpi-bin)")
def test_a_real_mpirun(tmp_path: Path, short_folders: Callable[[], str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["mpirun", "--oversubscribe", "-n", "2"]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    # Wide open when two runs start together: the port follows from the job, not from a constant.
    folders = [tmp_path / "one", tmp_path / "two"]
    jobs = []
    for folder in folders:
        folder.mkdir()
        # Open MPI's own folder, one for each job: two that start together trip over a shared one. Its path
        # holds sockets, so it must be short.
        own = short_folders()
        jobs.append(
            subprocess.Popen(
                [*command, sys.executable, str(script), str(folder)],
                env={**os.environ, "OMPI_MCA_orte_tmpdir_base": own},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        for job in jobs:
            output, _ = job.communicate(timeout=120)
            assert job.returncode == 0, output
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()
    for folder in folders:
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
        for rank, line in enumerate(found):
            assert line == {
                "rank": rank, "local_rank": rank, "size": 2, "here": 2, "source": "mpi", "total": 3, "exported": str(rank),
                "node": 0,
            }  # fmt: skip


def test_accelerate_launch_with_one_process_for_two() -> None:
    from phalanx.dist.environments.accelerate_launch import refuse_lone_process

    alone = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(
        InvalidRankEnvironment, match=r"(?s)asked for several processes.*Fix: accelerate launch --multi_gpu"
    ):
        detect(alone)
    with pytest.raises(InvalidRankEnvironment, match="asked for 4 processes"):
        refuse_lone_process(alone, "accelerate launch --num_processes 4 --cpu train.py")
    refuse_lone_process(alone, "accelerate launch --num-processes=1 train.py")
    assert detect({**alone, **TORCHRUN}).source == "torchrun"
    assert detect({"ACCELERATE_MIXED_PRECISION": "no"}).source == "single"
