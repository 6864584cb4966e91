"""Several GPUs in one process, as ``nn.DataParallel`` has it, without its traps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from phalanx.dist.engines import single
from phalanx.dist.engines.engine import CountingLoader
from phalanx.dist.engines.optimizers import ready_optimizer
from phalanx.dist.engines.precision import DTYPES, Precision, make_scaler, to_float32
from phalanx.dist.engines.setting import MakeOptimizer, Setting
from phalanx.dist.engines.single import SingleEngine

OPTIONS = ("device_ids",)


def plan_chunks(num_samples: int, num_devices: int) -> list[int]:
    """Samples of each replica: at most one chunk for each device, all as large as the first but the last.

    >>> plan_chunks(9, 8), plan_chunks(9, 4), plan_chunks(1, 2)
    ([2, 2, 2, 2, 1], [3, 3, 3], [1])

    Raises:
        ValueError: There is no sample, or no device.
    """
    if num_samples < 1 or num_devices < 1:
        raise ValueError(
            f"{num_samples} samples on {num_devices} devices: at least one of each is needed.\nFix: leave empty batches out"
        )
    size = -(-num_samples // num_devices)
    whole, rest = divmod(num_samples, size)
    return [size] * whole + ([rest] if rest else [])


def split(value: Any, num_samples: int, sizes: Sequence[int]) -> list[Any]:
    """What each replica gets of an argument: its rows of tensors of ``num_samples`` rows, and everything else as it is.

    Tuples, lists and dicts are looked into.

    >>> split({"x": torch.arange(3), "scale": torch.tensor(2.0)}, 3, [2, 1])[1]
    {'x': tensor([2]), 'scale': tensor(2.)}
    """
    if isinstance(value, Tensor):
        if value.dim() and value.shape[0] == num_samples:
            return list(torch.split(value, list(sizes)))
        return [value] * len(sizes)
    if isinstance(value, dict):
        parts = {key: split(item, num_samples, sizes) for key, item in value.items()}
        return [type(value)((key, part[place]) for key, part in parts.items()) for place in range(len(sizes))]
    if isinstance(value, (list, tuple)):
        columns = [split(item, num_samples, sizes) for item in value]
        rows = [[column[place] for column in columns] for place in range(len(sizes))]
        return [_like(value, row) for row in rows]
    return [value] * len(sizes)


def join(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """One output of those of the replicas: tensors one below the other, numbers (a mean loss) weighted by their samples.

    >>> join([torch.tensor(1.0), torch.tensor(6.0)], [3, 2], torch.device("cpu"))
    tensor(3.)

    Raises:
        TypeError: It is something else.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        moved = [output.to(device) for output in outputs]
        if first.dim():
            return torch.cat(moved)
        total = sum(sizes)
        weighted = [output * (size / total) for output, size in zip(moved, sizes, strict=True)]
        return torch.stack(weighted).sum()
    if isinstance(first, dict):
        return type(first)((key, join([output[key] for output in outputs], sizes, device)) for key in first)
    if isinstance(first, (list, tuple)):
        return _like(first, [join(items, sizes, device) for items in zip(*outputs, strict=True)])
    if first is None or isinstance(first, (bool, int, float, str)):
        return first
    raise TypeError(
        f"strategy='dp': forward returned a {type(first).__name__}, which cannot be put together from several GPUs.\n"
        "Fix: return tensors, or tuples, lists and dicts of tensors"
    )


def count_samples(args: Any, kwargs: Any) -> int:
    """Rows of the first tensor among the arguments, positional ones first."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
        if isinstance(value, (list, tuple, dict)):
            inner = value.values() if isinstance(value, dict) else value
            try:
                return count_samples(tuple(inner), {})
            except ValueError:
                continue
    raise ValueError(
        "strategy='dp': no argument of forward is a tensor with samples, so nothing can be shared out.\n"
        "Fix: pass the batch to the model"
    )


class ChunkedDataParallel(nn.DataParallel[nn.Module]):
    """``nn.DataParallel`` with a plan: as many replicas as chunks, arguments that are no batch whole, mean losses weighted.

    Args:
        module: On the first device.
        device_ids: Indices of the GPUs; the first holds the model and the outputs.
        precision: Of the replicas' forward.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int], precision: Precision = "fp32") -> None:
        super().__init__(module, device_ids=list(device_ids))
        self._dtype = DTYPES.get(precision)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs, on the first device."""
        num_samples = count_samples(args, kwargs)
        sizes = plan_chunks(num_samples, len(self.device_ids))
        devices = [torch.device("cuda", index) for index in self.device_ids[: len(sizes)]]
        inputs = [
            _to(part, place) for part, place in zip(split(args, num_samples, sizes), devices, strict=True)
        ]
        named = [
            _to(part, place) for part, place in zip(split(kwargs, num_samples, sizes), devices, strict=True)
        ]
        if len(sizes) == 1:
            outputs = [self._run(self.module, *inputs[0], **named[0])]
        else:
            replicas = self.replicate(self.module, self.device_ids[: len(sizes)])
            runners: list[Any] = [_Replica(self._run, each) for each in replicas]
            outputs = parallel_apply(runners, inputs, named, devices)
        return join(outputs, sizes, devices[0])

    def _run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Autocast belongs to the thread, and each replica has one of its own.
        with torch.autocast("cuda", self._dtype, enabled=self._dtype is not None):
            output = module(*args, **kwargs)
        return to_float32(output)


class DPEngine(SingleEngine):
    """Training on several GPUs of one process: batches are cut into chunks, gradients meet on the first GPU.

    ::

        model, optimizer, engine = parallelize(model, Adam, "dp", device_ids=[0, 1])

    The forward may return a mean loss: chunks count by their samples. Of a batch that is smaller than the number of GPUs some get
    nothing, which `plan_chunks` tells beforehand. Batch norm's running statistics are those of the first chunk. One process for
    each GPU (``ddp``) is faster, since Python runs one thread at a time: a warning says so.

    Args:
        model: A `ChunkedDataParallel`, with this precision.
        optimizer: Of its parameters.
        options: Those of `SingleEngine`.
    """

    def __init__(
        self,
        model: ChunkedDataParallel,
        optimizer: Optimizer,
        *,
        device: torch.device,
        precision: Precision = "fp32",
        max_grad_norm: float | None = None,
        loader: CountingLoader | None = None,
    ) -> None:
        # Autocast is in each replica's thread.
        super().__init__(model, optimizer, device=device, max_grad_norm=max_grad_norm, loader=loader)
        self.precision = precision
        self._scaler = make_scaler(precision, device)


def build(
    model: nn.Module, optimizer: Optimizer | MakeOptimizer | None, setting: Setting
) -> tuple[nn.Module, Optimizer, SingleEngine]:
    """See `Builder.build`; with one GPU, the plain model."""
    device_ids = choose_devices(
        setting.options.get("device_ids"), torch.cuda.device_count(), setting.world.world_size
    )
    device = torch.device("cuda", device_ids[0])
    model = model.to(device)
    if len(device_ids) == 1:
        return single.build(model, optimizer, setting)
    warnings.warn(
        f"strategy='dp' runs {len(device_ids)} GPUs from one process, one Python thread at a time; "
        f"`phalanx run --nproc-per-node {len(device_ids)}` with strategy='ddp' is faster, and exact with batch norm",
        stacklevel=3,
    )
    ready = ready_optimizer(model, optimizer)
    wrapped = ChunkedDataParallel(model, device_ids, setting.precision)
    engine = DPEngine(wrapped, ready, **replace(setting, device=device).common)
    return wrapped, ready, engine


def choose_devices(device_ids: Sequence[int] | None, visible: int, world_size: int) -> list[int]:
    """The GPUs to use, by their indices among the visible ones.

    >>> choose_devices(None, 2, 1), choose_devices([1, 0], 2, 1)
    ([0, 1], [1, 0])

    Raises:
        ValueError: There is no GPU, there are several ranks, or an index is not a visible GPU's or comes twice.
    """
    if world_size > 1:
        raise ValueError(
            f"strategy='dp' is for one process, and this is one of {world_size}: each would use all GPUs.\nFix: strategy='ddp'"
        )
    if visible == 0:
        raise ValueError(
            "strategy='dp' shares a batch among the GPUs of this process, and it sees none.\n"
            "Fix: strategy='auto'; several processes on the CPU: `phalanx run --nproc-per-node 2`"
        )
    if device_ids is None:
        return list(range(visible))
    wrong = [index for index in device_ids if isinstance(index, bool) or index not in range(visible)]
    if wrong or not device_ids or len(set(device_ids)) < len(device_ids):
        what = (
            f"{wrong[0]!r} is none of the visible GPUs (0-{visible - 1})"
            if wrong
            else "each GPU counts once, one at least"
        )
        raise ValueError(
            f"device_ids={list(device_ids)}: {what}.\nFix: device_ids={list(range(visible))}, or leave it out"
        )
    return list(device_ids)


class _Replica:
    """One replica as ``parallel_apply`` calls it."""

    def __init__(self, run: Any, module: nn.Module) -> None:
        self._run, self._module = run, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._module, *args, **kwargs)


def _like(value: Any, items: list[Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else items


def _to(value: Any, device: torch.device) -> Any:
    return tree_map(
        lambda item: item.to(device, non_blocking=True) if isinstance(item, Tensor) else item, value
    )
