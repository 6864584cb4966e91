"""Weights and optimizer state that ZeRO shares out, whole and by the user's names."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class ZeroState:
    """Reads and writes a DeepSpeed engine's state as if nothing were shared out. All methods but `bind` are collective.

    Args:
        module: The user's module, before DeepSpeed takes it.
        optimizer: The user's, whose groups DeepSpeed will fill with parts of its own; None if DeepSpeed makes one.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        self._module = module
        names = {id(param): name for name, param in module.named_parameters()}
        groups = optimizer.param_groups if optimizer is not None else [{"params": [*module.parameters()]}]
        self.group_names = [[names[id(param)] for param in group["params"]] for group in groups]

    def bind(self, engine: Any, optimizer: Optimizer) -> None:
        """Know what ``deepspeed.initialize`` has made of it."""
        self._engine, self._optimizer = engine, optimizer
        self._stage: int = engine.zero_optimization_stage()
        self._params = dict(self._module.named_parameters())

    def model(self) -> dict[str, Tensor]:
        """All parameters, in fp32 where DeepSpeed keeps such, and buffers, by name."""
        state = dict(self._module.state_dict())
        whole = {id(param): self._whole(param) for param in self._params.values()}
        for name, param in self._module.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = whole[id(param)]
        return state

    def load_model(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `model` returned."""
        from deepspeed import zero

        own = self._module.state_dict()
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unexpected:
            raise ValueError(f"engine.load(): missing {missing[:4]}, unexpected {unexpected[:4]}")
        with torch.no_grad():
            for name, buffer in self._module.named_buffers(remove_duplicate=False):
                if name in state:
                    buffer.copy_(state[name])
            for name, param in self._params.items():
                value = state[name].detach()
                if self._stage == 3:
                    with zero.GatheredParameters([param], modifier_rank=0):
                        param.data.copy_(value)
                else:
                    param.data.copy_(value)
                if self._is_master(param):
                    self._set(param, value)

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict, parameters numbered as in the user's groups."""
        if self._is_plain():
            return self._optimizer.state_dict()
        from deepspeed.utils import safe_get_full_optimizer_state

        whole, shared = self._entries()
        state: dict[int, dict[str, Any]] = {}
        number = 0
        for group in self.group_names:
            for name in group:
                param = self._params[name]
                if self._is_master(param) and (whole or shared):
                    found = {key: safe_get_full_optimizer_state(param, key) for key in whole}
                    state[number] = {
                        **{key: value for key, value in found.items() if value is not None},
                        **copy.deepcopy(shared),
                    }
                number += 1
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        groups, start = [], 0
        for option, names in zip(options, self.group_names, strict=True):
            groups.append({**option, "params": list(range(start, start + len(names)))})
            start += len(names)
        return {"state": state, "param_groups": groups}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Put back what `optimizer` returned."""
        if self._is_plain():
            self._optimizer.load_state_dict(copy.deepcopy(dict(state)))  # torch keeps the tensors it is given
            return
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        names = [name for group in self.group_names for name in group]
        entries = {
            name: state["state"][number]
            for name, number in zip(names, numbers, strict=True)
            if number in state["state"]
        }
        if not entries:
            self._optimizer.state.clear()
            return
        self._allocate(entries)
        for name, saved in entries.items():
            param = self._params[name]
            for key, value in saved.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    self._set(param, value, key)

    def _is_plain(self) -> bool:
        """Stage 0 in fp32: the user's own optimizer over the user's own parameters."""
        return self._engine.optimizer is self._optimizer

    def _is_master(self, param: nn.Parameter) -> bool:
        kept = hasattr(param, "_hp_mapping") or (hasattr(param, "ds_id") and hasattr(param, "_z3_optimizer"))
        return param.requires_grad and kept

    def _whole(self, param: nn.Parameter) -> Tensor:
        from deepspeed import zero
        from deepspeed.utils import safe_get_full_fp32_param

        if self._is_master(param):
            value: Tensor = safe_get_full_fp32_param(param)
            return value
        if self._stage == 3:
            with zero.GatheredParameters([param]):
                return param.detach().clone()
        return param.detach()

    def _set(self, param: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Put a whole tensor where DeepSpeed keeps this rank's part of it: the fp32 weight, or the optimizer's ``key``."""
        from deepspeed import utils

        flat = value.detach().to(param.device, torch.float32, copy=True)
        if self._stage < 3:
            if key is None:
                utils.safe_set_full_fp32_param(param, flat)
            else:
                utils.safe_set_full_optimizer_state(param, flat, key)
            return
        # Stage 3's own function for whole tensors fails where the last part is padded.
        kept = utils.safe_get_local_fp32_param(param)
        part, size, rank = torch.zeros_like(kept), kept.numel(), dist.get_rank()
        mine = flat.reshape(-1)[rank * size : (rank + 1) * size]
        part[: mine.numel()] = mine
        if key is None:
            utils.safe_set_local_fp32_param(param, part)
        else:
            utils.safe_set_local_optimizer_state(param, part, key)

    def _parts(self) -> list[nn.Parameter]:
        """DeepSpeed's own flat parameters, this rank's part of each group."""
        if self._stage == 3:
            return [part for part in self._engine.optimizer.fp32_partitioned_groups_flat if part is not None]
        return [part for group in self._optimizer.param_groups for part in group["params"]]

    def _entries(self) -> tuple[list[str], dict[str, Any]]:
        """Names of what the optimizer keeps for each element, and what it keeps once."""
        for part in self._parts():
            kept = self._optimizer.state.get(part)
            if kept:
                whole = [
                    key
                    for key, value in kept.items()
                    if isinstance(value, Tensor) and value.numel() == part.numel() and value.dim() > 0
                ]
                return whole, {key: value for key, value in kept.items() if key not in whole}
        return [], {}

    def _allocate(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Make room for the state to come, as the first step would."""
        example = next(iter(entries.values()))
        for part in self._parts():
            kept = self._optimizer.state[part]
            for key, value in example.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    if key not in kept:
                        kept[key] = torch.zeros_like(part)
                else:
                    kept[key] = value.clone() if isinstance(value, Tensor) else value
        link = getattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            link()
