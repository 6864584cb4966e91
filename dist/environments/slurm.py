"""Slurm: host lists, task lists, and the rank of a task that ``srun`` started."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator, Mapping

from phalanx.dist.environments.rank_environment import (
    InvalidRankEnvironment,
    RankEnvironment,
    read_int,
    refuse_contradictions,
)
from phalanx.dist.environments.torchrun import is_set, refuse_loopback_across_nodes

MAX_HOSTS = 65536  # Slurm's own limit; a slip like node[1-10000000000] must not fill the memory
# Below Linux's ephemeral ports (32768 and up) and Kubernetes' node ports, off torch's 29500.
FIRST_PORT, NUM_PORTS = 20000, 9000
# Step ids from here up are no srun steps: the batch script, the interactive shell, `extern`.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def expand_hostlist(text: str) -> list[str]:
    """Host names of a Slurm node list, in its order.

    >>> expand_hostlist("nodeA,nodeB[001,003],nodeC")
    ['nodeA', 'nodeB001', 'nodeB003', 'nodeC']
    >>> expand_hostlist("rack[0-1]_blade[0-1]")
    ['rack0_blade0', 'rack0_blade1', 'rack1_blade0', 'rack1_blade1']

    Zero padding is kept: ``n[08-10]`` is n08, n09, n10.

    Raises:
        ValueError: A bracket is not closed, a range is empty, reversed or no number, or the list names
            more than 65536 hosts. The message has the part that is wrong.
    """
    names: list[str] = []
    for part in _split_outside_brackets(text):
        for name in _expand_part(part, text):
            names.append(name)
            if len(names) > MAX_HOSTS:
                raise _bad_hostlist(text, part, f"it names more than {MAX_HOSTS} hosts")
    return names


def _split_outside_brackets(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for position, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        if depth not in (0, 1):
            raise _bad_hostlist(text, text[: position + 1], "its brackets do not match")
        if letter == "," and depth == 0:
            yield _host_part(text, text[start:position])
            start = position + 1
    if depth:
        raise _bad_hostlist(text, text[start:], "a bracket is not closed")
    yield _host_part(text, text[start:])


def _host_part(text: str, part: str) -> str:
    part = part.strip()
    if not part:
        raise _bad_hostlist(text, part, "there is an empty name")
    if any(letter.isspace() for letter in part):
        raise _bad_hostlist(text, part, "a name has a space in it")
    return part


def _expand_part(part: str, text: str) -> Iterator[str]:
    pieces = _BRACKET.split(part)  # plain, ranges, plain, ranges, ..., plain
    choices = [
        list(_expand_ranges(piece, part, text)) if odd else [piece]
        for piece, odd in zip(pieces, itertools.cycle((False, True)), strict=False)
    ]
    return map("".join, itertools.product(*choices))


def _expand_ranges(ranges: str, part: str, text: str) -> Iterator[str]:
    for item in ranges.split(","):
        first, dash, last = item.strip().partition("-")
        last = last if dash else first
        if not all(end.isascii() and end.isdigit() for end in (first, last)):
            raise _bad_hostlist(text, part, f"{item!r} is no number and no range like 1-4")
        if int(last) < int(first):
            raise _bad_hostlist(text, part, f"the range {item!r} runs backwards")
        if int(last) - int(first) >= MAX_HOSTS:
            raise _bad_hostlist(text, part, f"it names more than {MAX_HOSTS} hosts")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _bad_hostlist(text: str, part: str, what: str) -> ValueError:
    return ValueError(
        f"Slurm node list {text!r}: {what}" + (f" (at {part!r})" if part and part != text else "") + ".\n"
        "The nodes of the job cannot be told from it.\n"
        "Fix: pass it as Slurm prints it, for example node[01-04,07],login1"
    )


def expand_tasks_per_node(text: str) -> list[int]:
    """Tasks of each node, from Slurm's short form.

    >>> expand_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]

    Raises:
        ValueError: The text has another form.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item.strip(), re.ASCII)
        if match is None or len(counts) > MAX_HOSTS:
            raise ValueError(
                f"Slurm tasks per node {text!r}: {item.strip()!r} is not a count like 2 or 2(x3).\n"
                "Fix: pass SLURM_STEP_TASKS_PER_NODE as srun sets it"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process as one task of a step.

    The batch script itself and the shell that ``salloc`` opens have Slurm's variables too, also SLURM_NTASKS, but are one
    process: taking the job's task count there waits for ranks that nobody starts.
    """
    step_id = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "")).strip()
    if not is_set(environ, "SLURM_PROCID"):
        return False
    if step_id:
        return step_id.isdigit() and int(step_id) < _FIRST_SPECIAL_STEP
    return is_set(environ, "SLURM_STEP_NUM_TASKS")  # only srun sets it


def from_environ(environ: Mapping[str, str]) -> RankEnvironment | None:
    """The rank of a task in a Slurm step, None outside one.

    The step's own numbers come before the job's: after ``salloc -n 8`` and ``srun -n 2`` the world has 2 ranks.
    ``MASTER_ADDR`` is the first host of the step's node list (127.0.0.1 on one node) and ``MASTER_PORT`` follows from job
    and step id, unless they are set.

    >>> task = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
    ...         "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2",
    ...         "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node[01-02]"}
    >>> found = from_environ(task)
    >>> found.rank, found.world_size, found.local_world_size, found.master_addr
    (1, 2, 1, 'node01')

    Raises:
        InvalidRankEnvironment: A variable is missing, is no number, or contradicts another.
    """
    if not is_step(environ):
        return None
    world_size = read_int(environ, "SLURM_STEP_NUM_TASKS", minimum=1)
    if world_size is None:
        world_size = read_int(environ, "SLURM_NTASKS", minimum=1)
    rank, local_rank = read_int(environ, "SLURM_PROCID"), read_int(environ, "SLURM_LOCALID")
    if world_size is None or rank is None or local_rank is None:
        missing = [
            name
            for name, value in (("SLURM_STEP_NUM_TASKS", world_size), ("SLURM_LOCALID", local_rank))
            if value is None
        ]
        raise InvalidRankEnvironment(
            f"Slurm step {environ.get('SLURM_STEP_ID', '?')}: {' and '.join(missing)} not set.\n"
            "This task cannot tell its place among the ranks.\n"
            "Fix: start the ranks with srun and pass its variables on (srun --export=ALL)"
        )
    _warn_of_fewer_tasks(environ, world_size)
    node_rank = read_int(environ, "SLURM_NODEID")
    nodes = _num_nodes(environ, world_size)
    ranks_here = _ranks_here(environ, world_size, node_rank, nodes)
    found = RankEnvironment(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank if node_rank is not None else (0 if ranks_here == world_size else None),
        world_size=world_size,
        local_world_size=ranks_here,
        master_addr=_master_addr(environ, nodes, ranks_here == world_size),
        master_port=read_int(environ, "MASTER_PORT", minimum=1, maximum=65535) or master_port(environ),
        source="slurm",
    )
    refuse_contradictions(environ, found, "this Slurm task's")
    return found


def master_port(environ: Mapping[str, str]) -> int:
    """A port that all tasks of a step agree on, and that other steps and jobs on the node rarely share."""
    job = read_int(environ, "SLURM_JOB_ID") or read_int(environ, "SLURM_JOBID") or 0
    step = read_int(environ, "SLURM_STEP_ID") or read_int(environ, "SLURM_STEPID") or 0
    return FIRST_PORT + (job * 131 + step) % NUM_PORTS


def _num_nodes(environ: Mapping[str, str], world_size: int) -> int | None:
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        nodes = read_int(environ, name, minimum=1)
        if nodes is not None:
            return nodes
    return 1 if world_size == 1 else None


def _ranks_here(
    environ: Mapping[str, str], world_size: int, node_rank: int | None, nodes: int | None
) -> int | None:
    if nodes == 1:
        return world_size
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if node_rank is None or not is_set(environ, name):
            continue
        try:
            counts = expand_tasks_per_node(environ[name])
        except ValueError as error:
            raise InvalidRankEnvironment(str(error)) from None
        # The job's list says nothing about a step that uses a part of the job.
        if sum(counts) == world_size and node_rank < len(counts):
            return counts[node_rank]
    return None


def _master_addr(environ: Mapping[str, str], nodes: int | None, one_node: bool) -> str:
    given = environ.get("MASTER_ADDR", "").strip()
    if given:
        refuse_loopback_across_nodes(environ, given)
        return given
    if nodes == 1 or one_node:
        return "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if is_set(environ, name):
            try:
                return expand_hostlist(environ[name])[0]
            except ValueError as error:
                raise InvalidRankEnvironment(f"{name}: {error}") from None
    raise InvalidRankEnvironment(
        "Slurm step on several nodes, but neither SLURM_STEP_NODELIST nor MASTER_ADDR is set.\n"
        "The ranks would not know where to meet.\n"
        "Fix: start them with srun --export=ALL, or export MASTER_ADDR=<first node>"
    )


def _warn_of_fewer_tasks(environ: Mapping[str, str], world_size: int) -> None:
    per_node = read_int(environ, "SLURM_NTASKS_PER_NODE")
    if per_node is not None and per_node > world_size:
        count = "SLURM_STEP_NUM_TASKS" if is_set(environ, "SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        warnings.warn(
            f"SLURM_NTASKS_PER_NODE={per_node}, but {count}={world_size}: srun started {world_size} "
            f"task{'s' if world_size > 1 else ''}, so the world size is {world_size}. "
            f"Fix: drop --ntasks, or ask for --ntasks={per_node}",
            stacklevel=2,
        )
