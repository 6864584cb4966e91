"""In the first steps: do all ranks call the same collectives, with the same shapes and dtypes?

Of tensors of different shapes gloo returns a wrong sum to one rank, without an error, while another fails; NCCL hangs.
So what each rank is about to do is compared through the store before it is done.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from phalanx.dist.arguments import require_int, short
from phalanx.dist.collective_calls import KINDS, CallOfRank, describe_call, explain_mismatch
from phalanx.dist.membership import Membership, membership_in_force
from phalanx.dist.rendezvous import RanksMissing, RendezvousError, get_all, name_ranks

logger = logging.getLogger(__name__)

AUDITED_STEPS = 3
MOST_CALLS = 500  # where there is no optimizer whose steps could be counted
MOST_PEERS = 64  # in larger groups each rank compares itself with the group's first
SAY_WAITING_S = 30.0
_LEAVE_S = 5.0


class CollectiveMismatch(ValueError):
    """Ranks are about to call different collectives, or the same one with tensors that do not match.

    Raised on every rank alike, before the call; the message names the ranks, what each calls, and where.
    """


def audit_collectives(steps: int = AUDITED_STEPS) -> None:
    """Compare what ranks call in ``torch.distributed`` for the next ``steps`` optimizer steps; 0 ends it now.

    `init_world` and `parallelize` start it for the first 3 steps, so that there is nothing to call; this is for
    switching it off, or on again for a phase that comes later::

        init_world()
        audit_collectives(0)     # off

    With it, ``dist.all_reduce(torch.ones(4 - rank))`` on two ranks raises rather than returning a wrong sum with gloo::

        CollectiveMismatch: all_reduce differs between ranks:
          rank 0: all_reduce(SUM) of float32 [4], at train.py:12
          rank 1: all_reduce(SUM) of float32 [3], at train.py:12

    Looked at are the functions of ``torch.distributed``, in any group, also with ``async_op=True`` (then in ``wait``). What DDP
    and FSDP do in C++ is not. A rank that does not come is named when the world's timeout is over, and in a warning before.
    It ends after ``steps`` steps of any optimizer, or 500 calls.

    Collective: every rank must call it. Without a group, or with one rank, nothing happens.

    Raises:
        ValueError: ``steps`` is no whole number, or below 0.
    """
    try:
        steps = require_int("steps", steps, at_least=0)
    except ValueError:
        raise ValueError(
            f"steps={short(steps)}: a number of steps is 0 or more.\nFix: audit_collectives(3), or 0 for none"
        ) from None
    global _audit
    with _lock:
        if _audit is not None:
            _audit.end()
            _audit = None
        current = membership_in_force()
        if steps and current is not None and current.group is not None and current.world.world_size > 1:
            _audit = _Audit(current, steps)


def start_first_audit() -> None:
    """What `init_world` and `parallelize` do, once for each world. Collective."""
    current = membership_in_force()
    if current is not None and not current.audited:
        current.audited = True
        audit_collectives()


class _Audit:
    """The functions of ``torch.distributed`` while they are wrapped."""

    def __init__(self, membership: Membership, steps: int) -> None:
        assert membership.store is not None
        self.membership = membership
        self._store: Store = membership.store
        self._prefix = f"calls/{membership.next_call()}"
        self._steps = steps
        self._taken: Counter[int] = Counter()  # by optimizer
        self._numbers: Counter[str] = Counter()  # calls by group
        self._audited = 0
        self.active = True
        self._names = threading.Lock()
        self._originals = {kind: getattr(dist, kind) for kind in KINDS if hasattr(dist, kind)}
        self._places: list[tuple[Any, str]] = []
        for kind, original in self._originals.items():
            wrapped = _wrap(self, kind, original)
            for module in (dist, *_importers()):
                for name, value in list(vars(module).items()):
                    if value is original:
                        setattr(module, name, wrapped)
                        self._places.append((module, name))
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def end(self) -> None:
        """Put the functions back, and tell ranks that wait for this one's descriptions not to."""
        if not self.active:
            return
        self.active = False
        for module, name in self._places:
            original = getattr(getattr(module, name, None), "__wrapped__", None)
            if original is not None and original in self._originals.values():
                setattr(module, name, original)
        self._hook.remove()
        if membership_in_force() is self.membership:
            try:
                self._store.set(f"{self._prefix}/ended/{self.membership.world.rank}", "ended")
            except RuntimeError:  # the store has gone with rank 0
                pass

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._taken[id(optimizer)] += 1
        if self._taken[id(optimizer)] >= self._steps:
            self.end()

    def announce(self, kind: str, arguments: dict[str, Any]) -> Callable[[], None] | None:
        """Tell the others what this rank is about to do; a function that compares it with what they tell."""
        if membership_in_force() is not self.membership:
            self.end()  # the group was destroyed
            return None
        group = arguments.get("group") or dist.group.WORLD
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return None
        with self._names:
            name = str(group.group_name)
            self._numbers[name] += 1
            key = f"{self._prefix}/{name}/{self._numbers[name]}"
            self._audited += 1
            last = self._audited >= MOST_CALLS
        call = describe_call(kind, arguments, ranks)
        call["at"] = _caller()
        rank = self.membership.world.rank
        self._store.set(f"{key}/{rank}", json.dumps(call))
        backend = str(dist.get_backend(group))
        if last:
            self.end()
        return functools.partial(self._compare, key, call, ranks, backend)

    def _compare(self, key: str, mine: CallOfRank, ranks: list[int], backend: str) -> None:
        rank = self.membership.world.rank
        peers = ranks if len(ranks) <= MOST_PEERS else sorted({ranks[0], rank})
        calls = self._collect(key, mine, peers)
        if calls is None:
            return
        problem = explain_mismatch(calls, ranks, backend)
        if problem is None:
            return
        self.end()
        self._let_others_read(key, rank, peers)
        raise CollectiveMismatch(problem)

    def _collect(self, key: str, mine: CallOfRank, ranks: list[int]) -> dict[int, CallOfRank] | None:
        """What each rank calls; None when one has ended its audit, and so does not tell."""
        rank = self.membership.world.rank
        waiting = [other for other in ranks if other != rank]
        said = False
        for waited_s in _pauses():
            missing = self._absent([f"{key}/{other}" for other in waiting], waiting)
            if not missing:
                values = get_all(self._store, [f"{key}/{other}" for other in waiting])
                calls = {other: json.loads(text) for other, text in zip(waiting, values, strict=True)}
                return dict(sorted({**calls, rank: mine}.items()))
            if self._absent([f"{self._prefix}/ended/{other}" for other in missing], missing) != missing:
                self.end()
                return None
            if waited_s > self.membership.timeout_s or self._store.check([f"{key}/given up"]):
                self._store.set(f"{key}/given up", "given up")  # those who came later need not wait as long
                self.end()
                self._let_others_read(key, rank, [other for other in ranks if other not in missing])
                raise _missing(mine, missing, ranks, waited_s)
            if waited_s > SAY_WAITING_S and not said:
                said = True
                logger.warning(
                    "%s at %s has waited %.0f s for %s",
                    mine["kind"],
                    mine["at"],
                    waited_s,
                    name_ranks(missing),
                )
        raise AssertionError("the pauses never end")

    def _absent(self, keys: list[str], ranks: list[int]) -> list[int]:
        """The ranks whose key is not in the store."""
        try:
            if self._store.check(keys):
                return []
            return [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
        except dist.DistNetworkError as error:
            raise RendezvousError(
                f"Comparing collectives: the store is gone ({str(error).splitlines()[0]}); rank 0 or its launcher has ended.\n"
                "Fix: look for the first failure in rank 0's log"
            ) from None

    def _let_others_read(self, key: str, rank: int, ranks: list[int]) -> None:
        """Rank 0 may serve the store, and end it with its error before the others have read what is wrong."""
        self._store.set(f"{key}/seen/{rank}", "seen")
        if rank == 0:
            for waited_s in _pauses():
                if waited_s > _LEAVE_S or self._store.check([f"{key}/seen/{other}" for other in ranks]):
                    return


def _pauses() -> Iterator[float]:
    """Seconds waited so far, with longer and longer pauses between them.

    Rather than Store.wait: it holds the store against other threads, and the exception it ends with may take seconds to make.
    """
    started, pause_s = time.monotonic(), 0.0002
    while True:
        yield time.monotonic() - started
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)


_audit: _Audit | None = None
_lock = threading.RLock()


def _missing(mine: CallOfRank, missing: list[int], ranks: list[int], waited_s: float) -> RanksMissing:
    here = [rank for rank in ranks if rank not in missing]
    return RanksMissing(
        f"{mine['kind']} at {mine['at']}: {name_ranks(missing)} called no collective within {waited_s:.0f} s, "
        f"and {name_ranks(here)} would have waited for ever.\n"
        f"Fix: see where {name_ranks(missing)} stood: ended, stuck, or on a path without this call (an `if rank == 0:`, a loop "
        "with fewer batches)",
        missing,
    )


def _wrap(audit: _Audit, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def audited(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not audit.active or not dist.is_initialized():
            return original(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # raises it in torch's own words
        bound.apply_defaults()
        check = audit.announce(kind, dict(bound.arguments))
        if check is None:
            return original(*args, **kwargs)
        if not bound.arguments.get("async_op"):
            check()
            return original(*args, **kwargs)
        # The others may come to this call only after something that this rank does next, so it must not wait here.
        work = original(*args, **kwargs)
        return None if work is None else _CheckedWork(work, check)

    # The original's own attribute, which functools.wraps sets, is also how `end` finds back to it.
    return audited


class _CheckedWork:
    """A collective under way, compared with the other ranks' before its result is used."""

    def __init__(self, work: Any, check: Callable[[], None]) -> None:
        self._work = work
        self._check: Callable[[], None] | None = check

    def _compare(self) -> None:
        check, self._check = self._check, None
        if check is not None:
            check()

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._compare()
        return self._work.wait(*args, **kwargs)

    def get_future(self) -> Any:
        self._compare()
        return self._work.get_future()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _importers() -> list[Any]:
    """The user's own modules, which may hold functions by ``from torch.distributed import all_reduce``."""
    installed = (sys.prefix, sys.base_prefix)
    found = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name == "__main__" or (
            isinstance(path, str)
            and "site-packages" not in path
            and not path.startswith(installed)
            and name.split(".")[0] not in ("torch", "phalanx")
        ):
            found.append(module)
    return [module for module in found if hasattr(module, "__dict__")]


def _caller() -> str:
    """``train.py:57``: the nearest frame that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        top = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if top not in ("torch", "phalanx"):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
