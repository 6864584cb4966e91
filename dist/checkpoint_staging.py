"""Saving beside training: tensors are copied into memory that is kept for it, and a thread writes them."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

MIN_BYTES = 64 << 20  # below this, writing at once takes less than a thread is worth
_SHARE_OF_FREE = 0.5  # of the memory that is free, for buffers that are not there yet


class Staging:
    """Copies of tensors in host memory, made into the same buffers each time.

    Memory is taken at the first `hold` and kept, pinned where the tensors are on a GPU.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def hold(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of each tensor, contiguous; valid until the next `hold`."""
        buffers, on_gpu = {}, set()
        for name, tensor in tensors.items():
            buffers[name] = self._buffer(name, tensor).copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                on_gpu.add(tensor.device)
        for device in on_gpu:
            torch.cuda.synchronize(device)
        self._buffers = buffers
        return dict(buffers)

    def place(self, name: str, tensor: Tensor) -> Tensor:
        """The memory that `hold` copies this tensor into; what is written there need not be copied again."""
        buffer = self._buffers[name] = self._buffer(name, tensor)
        return buffer

    def room_for(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the buffers that are still to be made fit well into the memory that is free."""
        needed = sum(
            tensor.numel() * tensor.element_size()
            for name, tensor in tensors.items()
            if not self._fits(name, tensor)
        )
        return needed <= _SHARE_OF_FREE * free_memory_bytes()

    def _fits(self, name: str, tensor: Tensor) -> bool:
        buffer = self._buffers.get(name)
        return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        if self._fits(name, tensor):
            return self._buffers[name]
        self._buffers.pop(name, None)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def free_memory_bytes() -> int:
    """Memory that this process may still take: the machine's, and its control group's where that is less."""
    free = sys.maxsize
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return min(free, int(limit) - int(used) + int(cached["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no limit, or no control group that can be read
        return free


class BackgroundWriter:
    """One piece of work at a time in a thread. The end of the process waits for it.

    An error is kept for `finish`. One that nobody asked for is printed when the process ends, which then
    exits with status 1: a run whose last checkpoint is not there has not gone well.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()
        atexit.register(self._report)

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`; what was begun before must have been finished."""
        assert self._thread is None
        assert self._error is None
        # Not a daemon: Python waits for it at its end, before what it needs is taken down.
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="phalanx-checkpoint", daemon=False
        )
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether an error waits for `finish`."""
        return self._error is not None

    def join(self) -> None:
        """Wait; an error stays for `finish`."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait, and raise what the work raised."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def forget(self) -> None:
        """No more to be told of at the end of the process."""
        atexit.unregister(self._report)

    def _report(self) -> None:
        if self._pid != os.getpid():
            return
        self.join()
        if self._error is not None:
            sys.stdout.flush()
            print(f"phalanx: the last checkpoint was not written: {self._error}", file=sys.stderr, flush=True)
            os._exit(1)  # the one way left to tell the launcher
