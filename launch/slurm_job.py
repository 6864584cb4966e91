"""A bare `phalanx run` inside `sbatch` or `salloc`: on all nodes of the job, started by srun."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.dist.environments import slurm
from phalanx.dist.environments.hostfile import Host
from phalanx.launch.remote_programs import BySlurm, allocation
from phalanx.launch.several_nodes import NodesChosen
from phalanx.launch.values import Values

#: Whoever gives one of these says himself which nodes there are.
_OWN_NODES = (
    "nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "standalone", "local_addr", "hosts", "hostfile", "local_nodes",
)  # fmt: skip


def nodes_of_job(given: Values, environ: Mapping[str, str]) -> NodesChosen | None:
    """The nodes of the Slurm job that this process is in, where they are several and no step runs here.

    One rank per GPU of a node, or as many as ``--ntasks-per-node`` of sbatch says where it says more than one.
    """
    if (
        any(key in given for key in _OWN_NODES)
        or slurm.is_step(environ)
        or environ.get("TORCHELASTIC_RUN_ID")
    ):
        return None
    names = allocation(environ)
    if len(names) < 2:
        return None
    tasks = environ.get("SLURM_NTASKS_PER_NODE", "")
    slots = int(tasks) if tasks.isdecimal() and int(tasks) > 1 else None
    if "nproc_per_node" in given or "gpus" in given:
        slots = None
    hosts = [Host(name=name, slots=slots) for name in names]
    option = f"Slurm job {environ['SLURM_JOB_ID']}"
    return NodesChosen(hosts=hosts, start=BySlurm(environ), option=option, by="srun")
