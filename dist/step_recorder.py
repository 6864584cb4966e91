"""Writing down what a training step computes, in any script, by hooks that PHALANX_BISECT_FOLDER asks for.

`bisect_divergence` sets that variable for the ranks it has started, and reads what they have written.
"""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from phalanx.dist.recorded_tensors import (
    named_tensors,
    shares_state_out,
    watch_steps,
    whole_copy,
    whole_gradient,
)
from phalanx.dist.wrappers import canonical_name, unwrap, wrapper_paths

FOLDER_VARIABLE = "PHALANX_BISECT_FOLDER"
STEPS_VARIABLE = "PHALANX_BISECT_STEPS"
NO_DROPOUT_VARIABLE = "PHALANX_BISECT_NO_DROPOUT"

_recorder: StepRecorder | None = None


def record_if_asked(environ: Mapping[str, str] | None = None) -> None:
    """Install the hooks when PHALANX_BISECT_FOLDER is set, once in a process."""
    global _recorder
    environ = os.environ if environ is None else environ
    if environ.get(FOLDER_VARIABLE) and _recorder is None:
        if environ.get(NO_DROPOUT_VARIABLE) == "1":
            switch_dropout_off()
        _recorder = StepRecorder(Path(environ[FOLDER_VARIABLE]), int(environ.get(STEPS_VARIABLE, "1")))


def switch_dropout_off() -> None:
    """Let every dropout, of modules too, return its input."""
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(nn.functional, name, _identity)


def _identity(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


class StepRecorder:
    """Records the first training steps of this process, and then ends it.

    A step's record, one file per rank and step: ``rows`` (samples in each forward), ``weights`` before the step,
    ``inputs``, ``outputs`` of every module in the order of forward, ``gradients`` as the optimizer finds them, and
    ``weights_after`` with the buffers.

    Args:
        folder: Where ``rank-<R>-step-<S>.pt`` are written.
        steps: How many optimizer steps.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._pid = os.getpid()
        self._depth = 0
        self._root: nn.Module | None = None  # of the forward under way
        self._models: dict[
            int, tuple[nn.Module, str]
        ] = {}  # those whose forward was seen, and what their names begin with
        self._names: dict[int, str] = {}  # of modules
        self._watched: set[int] = set()  # engines that step their optimizers in their own way
        self._step = 0
        self._record: dict[str, Any] = {}
        self._calls: Counter[str] = Counter()
        self._begin()
        self._hooks = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        atexit.register(self._write_rest)

    def _begin(self) -> None:
        self._record = {
            "rows": [],
            "weights": {},
            "inputs": [],
            "outputs": {},
            "gradients": {},
            "weights_after": {},
            "kinds": {},
        }

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if os.getpid() != self._pid:
            return
        self._depth += 1
        if self._depth > 1:
            return
        recomputed = id(module) in self._names and not self._is_model(module)
        training = module.training and torch.is_grad_enabled() and not recomputed
        self._root = module if training else None
        self._calls = Counter()
        if training and self._is_model(module):
            self._know(module)
            self._watch(module)

    def _watch(self, model: nn.Module) -> None:
        if shares_state_out(model) and id(model) not in self._watched:
            self._watched.add(id(model))
            watch_steps(model, self._record_gradients, self._end_step)

    def _is_model(self, module: nn.Module) -> bool:
        return id(unwrap(module)) in self._models or (
            id(module) not in self._names and next(module.parameters(), None) is not None
        )

    def _know(self, model: nn.Module) -> None:
        """Names of its modules, and its weights as they are before the step."""
        inner = unwrap(model)
        if id(inner) not in self._models:
            prefix = f"model{len(self._models) + 1}." if self._models else ""
            self._models[id(inner)] = (inner, prefix)
            added = set(wrapper_paths(inner))
            for name, module in inner.named_modules():
                self._names[id(module)] = prefix + canonical_name(name, added)
        inner, prefix = self._models[id(inner)]
        weights = self._weights(inner, prefix)
        if not weights.keys() <= self._record["weights"].keys():
            self._record["weights"].update(weights)
            for module in inner.modules():
                self._record["kinds"].update(_kind_of(self._names[id(module)], module))

    def _weights(self, model: nn.Module, prefix: str) -> dict[str, Tensor]:
        return {prefix + name: whole_copy(tensor) for name, tensor in named_tensors(model)}

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if os.getpid() != self._pid:
            return
        self._depth -= 1
        root = self._root
        if root is None:
            return
        if self._depth == 0:
            self._root = None
            self._end_forward(module, args, kwargs, output)
            return
        name = self._names.get(id(module))
        if name:  # not the model itself inside a wrapper: its output comes last
            self._add_output(name, output, len(self._record["rows"]))

    def _end_forward(self, root: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = list(_tensors((args, kwargs)))
        if not self._is_model(root):
            name = f"loss {type(root).__name__}"
            for index, tensor in enumerate(inputs):
                if not tensor.requires_grad:
                    self._add_output(f"{name} input {index}", tensor, len(self._record["rows"]) - 1)
            self._add_output(name, output, len(self._record["rows"]) - 1)
            return
        forward = len(self._record["rows"])
        self._add_output(self._models[id(unwrap(root))][1] + "(the model)", output, forward)
        self._record["rows"].append(inputs[0].shape[0] if inputs and inputs[0].dim() else 0)
        self._record["inputs"].append([whole_copy(tensor) for tensor in inputs])

    def _add_output(self, name: str, output: Any, forward: int) -> None:
        call = self._calls[name]
        self._calls[name] += 1
        for index, tensor in enumerate(_tensors(output)):
            key = name + (f" call {call + 1}" if call else "") + (f"[{index}]" if index else "")
            self._record["outputs"].setdefault(key, []).append((max(forward, 0), whole_copy(tensor)))

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() == self._pid and not self._watched:
            self._record_gradients(optimizer)

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() == self._pid and not self._watched:
            self._end_step()

    def _record_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Of the optimizer's parameters; of all when it holds none of the model's own."""
        groups = optimizer.param_groups if optimizer is not None else []
        own = {id(param) for group in groups for param in group["params"]}
        for model, prefix in self._models.values():
            for name, tensor in named_tensors(model):
                if optimizer is None or id(tensor) in own:
                    gradient = whole_gradient(tensor)
                    if gradient is not None:
                        self._record["gradients"][prefix + name] = gradient

    def _end_step(self) -> None:
        if not self._record["rows"]:
            return
        for model, prefix in self._models.values():
            self._record["weights_after"].update(self._weights(model, prefix))
        self._write()
        if self._step == self._steps:
            self._stop()
            raise SystemExit(0)  # what was asked for is there; the rest of the training would only cost time

    def _write(self) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if distributed else int(os.environ.get("RANK", "0"))
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{rank}-step-{self._step}.pt"
        torch.save(self._record, path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)
        self._step += 1
        self._begin()

    def _write_rest(self) -> None:
        """A script that ended within its first step: its forward is worth a look."""
        if os.getpid() == self._pid and self._step < self._steps and self._record["rows"]:
            self._write()

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _kind_of(name: str, module: nn.Module) -> dict[str, str]:
    if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
        return {name: "batch norm"}
    if isinstance(module, (_DropoutNd, nn.RReLU)):
        return {name: "dropout"}
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout:
        return {name: "dropout"}
    return {}


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
