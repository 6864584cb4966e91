"""While a model is built on fake tensors: small tensors have their values after all, since its shape may hang on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

_SMALL = 4096  # elements


class SmallValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the real values of small tensors that were made of nothing else than small tensors.

    RegNet's widths and the drop rates of many models come from a `linspace`, read number by number. What is read of a
    tensor without values is of no consequence for memory as a rule (initial weights, drawn again until all fit): False,
    one half, or one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._answer(args[0])
        out = func(*args, **kwargs)
        self._follow(func, args, kwargs, out)
        return out

    def _answer(self, tensor: Tensor) -> bool | int | float | complex:
        if self._known(tensor):
            with _disable_current_modes():
                found: bool | int | float | complex = self._value(tensor).item()
            return found
        return False if tensor.dtype == torch.bool else 0.5 if tensor.dtype.is_floating_point else 1

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Do the same to the values, if all inputs have some and the outputs are small."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        known = all(map(self._known, inputs))
        if known and outputs and sum(tensor.numel() for tensor in outputs) <= _SMALL:
            try:
                with _disable_current_modes(), torch.no_grad():
                    real = func(*tree_map(self._value, args), **tree_map(self._value, kwargs))
            except Exception:
                real = None  # what has no values stays without
            found = [leaf for leaf in tree_leaves(real) if isinstance(leaf, Tensor)]
            if len(found) == len(outputs):
                for tensor, value in zip(outputs, found, strict=True):
                    self._values[tensor] = value
                return
        for tensor in outputs:  # written to with something unknown
            self._values.pop(tensor, None)

    def _known(self, tensor: Tensor) -> bool:
        return tensor in self._values or not isinstance(tensor, FakeTensor)

    def _value(self, leaf: Any) -> Any:
        return self._values.get(leaf, leaf) if isinstance(leaf, Tensor) else leaf
