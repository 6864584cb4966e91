"""The self-test's ranks: the text of this file runs as ``python -c``, without phalanx.

torch is imported once; then a plan is read from stdin and the ranks are forked: a process group that
somebody else's job needs is not made, each two ranks get one of their own, so that a pair that cannot talk
is known by name. What begins and what ends is told, one JSON object a line: a pair that began and never
ended is the one that hangs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

ANSWER = 1
KEPT: list[Any] = []  # groups live as long as their rank: NCCL's destructor waits for peers


def tell(**said: Any) -> None:
    os.write(ANSWER, json.dumps(said).encode() + b"\n")


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs, in rounds in which each rank has one partner at most: the circle method of tournaments."""
    places = list(range(count)) + ([-1] if count % 2 else [])
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def group_of(plan: dict[str, Any], members: tuple[int, ...], rank: int) -> Any:
    """A process group of these ranks alone."""
    from torch import distributed as dist
    from torch._C._distributed_c10d import FileStore, PrefixStore

    store = FileStore(plan["store"], -1)
    mine = PrefixStore("-".join(map(str, members)), store)
    limit = timedelta(seconds=plan["limit_s"])
    if plan["backend"] == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(mine, members.index(rank), len(members), options)
    return dist.ProcessGroupGloo(mine, members.index(rank), len(members), limit)


def check_sum(plan: dict[str, Any], members: tuple[int, ...], rank: int, device: Any) -> None:
    """An all-reduce whose right answer is known."""
    import torch

    group = group_of(plan, members, rank)
    KEPT.append(group)
    values = torch.full((4096,), float(rank + 1), device=device)
    group.allreduce([values]).wait()
    wanted = float(sum(member + 1 for member in members))
    seen = values.cpu()
    if not bool((seen == wanted).all()):
        raise RuntimeError(f"the all-reduce returned {seen[0].item()} where {wanted} is right")


def run_rank(plan: dict[str, Any], rank: int) -> None:
    import torch

    count = plan["ranks"]
    if plan["devices"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = plan["devices"][rank]
    device = torch.device("cuda:0" if plan["devices"] else "cpu")
    if plan["devices"]:
        tell(rank=rank, what="device", state="begin")
        ones = torch.ones((256, 256), device=device)
        if float((ones @ ones).sum().item()) != 256.0**3:
            raise RuntimeError("a matrix product on the device is wrong")
        tell(rank=rank, what="device", state="ok")
    groups = [pair for pairs in rounds(count) for pair in pairs if rank in pair]
    # With two ranks the pair is everybody; a second group of that name would find the first one's addresses.
    for members in [*groups, *([tuple(range(count))] if count != 2 else [])]:
        name = "-".join(map(str, members))
        tell(rank=rank, what=name, state="begin")
        try:
            check_sum(plan, members, rank, device)
        except Exception as error:
            tell(rank=rank, what=name, state="error", error=f"{type(error).__name__}: {error}")
        else:
            tell(rank=rank, what=name, state="ok")


def in_fork(plan: dict[str, Any], rank: int) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # die with the parent
        run_rank(plan, rank)
        code = 0
    except BaseException as error:
        tell(rank=rank, what="rank", state="error", error=f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)  # without destructors: a group whose peer is gone would wait for it


def main() -> None:
    global ANSWER
    ANSWER = os.dup(1)
    os.dup2(2, 1)
    import torch.distributed

    if threading.active_count() > 1:
        tell(what="start", state="error", error="torch started threads at its import; no rank can be forked")
        return
    tell(what="start", state="ok", nccl=torch.distributed.is_nccl_available())
    line = sys.stdin.readline()
    if not line.strip():
        return
    plan = json.loads(line)
    ranks = {}
    for rank in range(plan["ranks"]):
        pid = os.fork()
        if pid == 0:
            in_fork(plan, rank)
        ranks[pid] = rank
    for _ in range(len(ranks)):
        pid, status = os.wait()
        if os.WIFSIGNALED(status):
            tell(rank=ranks[pid], what="rank", state="error", error=f"ended by signal {os.WTERMSIG(status)}")
    tell(what="end", state="ok")


if __name__ == "__main__":
    main()
