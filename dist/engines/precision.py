"""fp32, bf16 and fp16: autocast around a model's forward, and the gradient scaler of fp16."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Autocast:
    """Hooks that turn autocast on for a module's forward and give its outputs back in fp32.

    Hooks rather than a replaced ``forward``: a copy or a pickle of the model keeps working.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type, self.dtype = device_type, dtype
        self._open: list[torch.autocast] = []

    def before(self, module: nn.Module, args: Any) -> None:
        context = torch.autocast(self.device_type, self.dtype)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(context)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._open:
            self._open.pop().__exit__(None, None, None)
        # A loss computed outside autocast would be summed in 8 bits of mantissa.
        return to_float32(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Autocast:
        return _Autocast(self.device_type, self.dtype)

    def __reduce__(self) -> Any:
        return _Autocast, (self.device_type, self.dtype)


def to_float32(output: Any) -> Any:
    """The output with its 16-bit tensors as fp32; dicts are changed in place."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(to_float32(item) for item in output))
    if type(output) in (tuple, list):
        return type(output)(to_float32(item) for item in output)
    if isinstance(output, dict):
        for name, item in output.items():
            output[name] = to_float32(item)
    return output


def autocast_forward(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Run ``model``'s forward under autocast from now on; its floating outputs come back as fp32."""
    if precision == "fp32":
        return
    autocast = _Autocast(device.type, DTYPES[precision])
    model.register_forward_pre_hook(autocast.before)
    model.register_forward_hook(autocast.after, always_call=True)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Give floating tensors to ``model``'s forward as ``dtype``, its weights'; its floating outputs come back as fp32."""

    def cast(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, args), tree_map(cast, kwargs)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: to_float32(output))


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """The gradient scaler of fp16, None for the others."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None
