"""NVML asked one thing at a time: what it cannot answer is None, and the reason is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class NvmlAbsent(Exception):
    """NVML cannot be used at all; the message is the reason, ``code`` NVML's number for it (None: no library).

    ``mismatch`` is True when the driver in the kernel and the library are of different versions.
    """

    def __init__(self, reason: str, code: int | None = None, *, mismatch: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.mismatch = mismatch


@dataclass(frozen=True)
class NvmlMemory:
    """Bytes of a device. ``reserved`` is what the driver keeps for itself, None where ``used`` has it included."""

    total: int
    used: int
    reserved: int | None = None


@contextlib.contextmanager
def open_nvml() -> Iterator[Nvml]:
    """NVML for the time of a ``with`` block.

    Raises:
        NvmlAbsent: There is no nvidia-ml-py, no library, no driver, or they do not fit together.
    """
    try:
        import pynvml
    except Exception as error:  # a broken installation is as good as none
        raise NvmlAbsent(f"nvidia-ml-py cannot be imported: {error}") from None
    try:
        pynvml.nvmlInit()
    except Exception as error:
        code = getattr(error, "value", None)
        mismatch = code == getattr(pynvml, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", 18)
        raise NvmlAbsent(reason_of(error), code, mismatch=mismatch) from None
    try:
        yield Nvml(pynvml)
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


class Nvml:
    """An NVML that answers; see `open_nvml`."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def ask(self, name: str, *args: Any) -> Any:
        """The answer of ``nvml<name>``, None where there is none."""
        try:
            return getattr(self._library, f"nvml{name}")(*args)
        except Exception:
            return None

    def devices(self) -> list[NvmlDevice]:
        """Every GPU, those that have fallen off the bus included.

        Raises:
            NvmlAbsent: NVML does not say how many there are.
        """
        try:
            count = int(self._library.nvmlDeviceGetCount())
        except Exception as error:
            raise NvmlAbsent(reason_of(error), getattr(error, "value", None)) from None
        return [self._device(index) for index in range(count)]

    def _device(self, index: int) -> NvmlDevice:
        try:
            return NvmlDevice(self._library, index, self._library.nvmlDeviceGetHandleByIndex(index))
        except Exception as error:  # one GPU's fault must not hide the others
            return NvmlDevice(
                self._library, index, None, problem=f"NVML cannot reach it ({reason_of(error)})"
            )


class NvmlDevice:
    """One GPU, or one MIG instance of it: answers are kept, and so are the reasons for missing ones (``why``)."""

    def __init__(self, library: Any, index: int, handle: Any, *, problem: str = "") -> None:
        self._library, self.index, self.handle = library, index, handle
        self.problem = problem
        self.why: dict[str, str] = {}
        self._answers: dict[tuple[Any, ...], Any] = {}
        if handle is not None:
            self.problem = self._lost()

    def ask(self, name: str, *args: Any) -> Any:
        """The answer of ``nvmlDeviceGet<name>``, None where there is none; ``why[name]`` then says why."""
        key = (name, *args)
        if key not in self._answers:
            self._answers[key] = self._call(name, *args)
        return self._answers[key]

    def ask_about(self, name: str, other: NvmlDevice, *args: Any) -> Any:
        """As `ask`, about this device and another one."""
        return None if other.handle is None else self._call(name, other.handle, *args)

    def _call(self, name: str, *args: Any) -> Any:
        if self.handle is None:
            self.why[name] = self.problem
            return None
        try:
            return getattr(self._library, f"nvmlDeviceGet{name}")(self.handle, *args)
        except Exception as error:  # not supported, no permission, a lost GPU, an older driver, ...
            self.why[name] = reason_of(error)
            return None

    def text(self, name: str) -> str:
        """As `ask`, for texts; empty where there is none."""
        return text_of(self.ask(name))

    def memory(self) -> NvmlMemory | None:
        """Its memory; where a driver is too old to tell, ``used`` includes what it reserves for itself."""
        version = getattr(self._library, "nvmlMemory_v2", None)
        found = None if version is None else self.ask("MemoryInfo", version)
        if found is not None and found.total:
            self.why.pop("MemoryInfo", None)
            return NvmlMemory(int(found.total), int(found.used), int(found.reserved))
        found = self.ask("MemoryInfo")
        if found is None or not found.total:
            self.why.setdefault("MemoryInfo", "reads 0 bytes")
            return None
        self.why.pop("MemoryInfo", None)
        return NvmlMemory(int(found.total), int(found.used))

    def instances(self) -> list[NvmlDevice]:
        """Its MIG instances."""
        mode = self.ask("MigMode")
        if not mode or not mode[0]:
            return []
        found = []
        for index in range(int(self.ask("MaxMigDeviceCount") or 0)):
            handle = self.ask("MigDeviceHandleByIndex", index)
            if handle is not None:
                found.append(NvmlDevice(self._library, index, handle))
        return found

    def _lost(self) -> str:
        """Whether it has fallen off the bus, or needs a reset: its handle may be had all the same."""
        try:
            self._answers[("UUID",)] = self._library.nvmlDeviceGetUUID(self.handle)
        except Exception as error:
            self._answers[("UUID",)], self.why["UUID"] = None, reason_of(error)
            code = getattr(error, "value", None)
            gone = {
                getattr(self._library, f"NVML_ERROR_{name}", -1) for name in ("GPU_IS_LOST", "RESET_REQUIRED")
            }
            return f"NVML cannot reach it ({reason_of(error)})" if code in gone else ""
        return ""


def reason_of(error: Exception) -> str:
    """NVML's own words for an error."""
    return text_of(str(error)) or type(error).__name__


def text_of(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
