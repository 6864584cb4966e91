"""Weights and optimizer state that ZeRO shares out, whole and by the user's names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.dist.flat_parts import FlatPart


class ZeroState:
    """Reads and writes a DeepSpeed engine's state as if nothing were shared out. All methods but `bind` are collective.

    Args:
        module: The user's module, before DeepSpeed takes it.
        optimizer: The user's, whose groups DeepSpeed will fill with parts of its own; None if DeepSpeed makes one.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        self.module = module
        names = {id(param): name for name, param in module.named_parameters()}
        groups = optimizer.param_groups if optimizer is not None else [{"params": [*module.parameters()]}]
        self.group_names = [[names[id(param)] for param in group["params"]] for group in groups]

    def bind(self, engine: Any, optimizer: Optimizer) -> None:
        """Know what ``deepspeed.initialize`` has made of it."""
        self._engine, self.torch_optimizer = engine, optimizer
        self.stage: int = engine.zero_optimization_stage()
        self.params = dict(self.module.named_parameters())

    def model(self) -> dict[str, Tensor]:
        """All parameters, in fp32 where DeepSpeed keeps such, and buffers, by name."""
        state = dict(self.module.state_dict())
        whole = {id(param): self._whole(param) for param in self.params.values()}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = whole[id(param)]
        return state

    def load_model(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `model` returned."""
        from deepspeed import zero

        own = self.module.state_dict()
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unexpected:
            raise ValueError(f"engine.load(): missing {missing[:4]}, unexpected {unexpected[:4]}")
        with torch.no_grad():
            for name, buffer in self.module.named_buffers(remove_duplicate=False):
                if name in state:
                    buffer.copy_(state[name])
            for name, param in self.params.items():
                value = state[name].detach()
                if self.stage == 3:
                    with zero.GatheredParameters([param], modifier_rank=0):
                        param.data.copy_(value)
                else:
                    param.data.copy_(value)
                if self.is_master(param):
                    self._set(param, value)

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict, parameters numbered as in the user's groups."""
        if self.is_plain():
            return self.torch_optimizer.state_dict()
        whole, shared = self.entries()
        state: dict[int, dict[str, Any]] = {}
        number = 0
        for group in self.group_names:
            for name in group:
                param = self.params[name]
                if self.is_master(param) and (whole or shared):
                    found = {key: _gathered(self.part(param, key), param.device) for key in whole}
                    state[number] = {**found, **copy.deepcopy(shared)}
                number += 1
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.torch_optimizer.param_groups
        ]
        groups, start = [], 0
        for option, names in zip(options, self.group_names, strict=True):
            groups.append({**option, "params": list(range(start, start + len(names)))})
            start += len(names)
        return {"state": state, "param_groups": groups}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Put back what `optimizer` returned."""
        if self.is_plain():
            self.torch_optimizer.load_state_dict(
                copy.deepcopy(dict(state))
            )  # torch keeps the tensors it is given
            return
        for group, saved in zip(self.torch_optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        names = [name for group in self.group_names for name in group]
        entries = {
            name: state["state"][number]
            for name, number in zip(names, numbers, strict=True)
            if number in state["state"]
        }
        if not entries:
            self.forget_entries()
            return
        example = next(iter(entries.values()))
        by_element = [k for k, value in example.items() if isinstance(value, Tensor) and value.dim() > 0]
        self.allocate(by_element, {k: value for k, value in example.items() if k not in by_element})
        for name, saved in entries.items():
            param = self.params[name]
            for key, value in saved.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    self._set(param, value, key)

    def is_plain(self) -> bool:
        """Stage 0 in fp32: the user's own optimizer over the user's own parameters."""
        return self._engine.optimizer is self.torch_optimizer

    def is_master(self, param: nn.Parameter) -> bool:
        kept = hasattr(param, "_hp_mapping") or (hasattr(param, "ds_id") and hasattr(param, "_z3_optimizer"))
        return param.requires_grad and kept

    def _whole(self, param: nn.Parameter) -> Tensor:
        from deepspeed import zero

        if self.is_master(param):
            return _gathered(self.part(param), param.device)
        if self.stage == 3:
            with zero.GatheredParameters([param]):
                return param.detach().clone()
        return param.detach()

    def _set(self, param: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Put a whole tensor where DeepSpeed keeps this rank's part of it: the fp32 weight, or the optimizer's ``key``."""
        flat, part = value.detach().reshape(-1), self.part(param, key)
        self.put_part(param, flat[part.start : part.start + part.run.numel()], key)

    # This rank's parts

    def shape(self, param: nn.Parameter) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(param.ds_shape if self.stage == 3 else param.shape)  # type: ignore[attr-defined]

    def part(self, param: nn.Parameter, key: str | None = None) -> FlatPart:
        """What this rank holds of the fp32 weight, or of the optimizer's ``key``."""
        shape = self.shape(param)
        if self.stage == 3:
            from deepspeed import utils

            kept = utils.safe_get_local_fp32_param(param)
            if key is not None:
                kept = utils.safe_get_local_optimizer_state(param, key)
            start, end = self._range(param)
            return FlatPart(kept[: end - start], start, shape)
        mapping = param._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return FlatPart(torch.empty(0, device=param.device), 0, shape)
        flat = self._parts()[mapping.param_group_index]
        if key is not None:
            flat = self.torch_optimizer.state[flat][key]
        place = mapping.get_hp_fragment_address()
        run = flat.detach().narrow(0, place.start, place.numel)
        return FlatPart(run, mapping.lp_fragment_address.start, shape)

    def own_part(self, param: nn.Parameter) -> FlatPart:
        """Stage 3: what this rank holds of the weight that the forward uses."""
        start, end = self._range(param)
        return FlatPart(param.ds_tensor.detach()[: end - start], start, self.shape(param))  # type: ignore[attr-defined]

    def put_part(self, param: nn.Parameter, run: Tensor, key: str | None = None) -> None:
        """Replace what `part` returns."""
        if self.stage < 3:
            self.part(param, key).run.copy_(run)
            return
        from deepspeed import utils

        padded = torch.zeros(param.ds_tensor.numel(), device=param.ds_tensor.device)  # type: ignore[attr-defined]
        padded[: run.numel()] = run
        if key is None:
            utils.safe_set_local_fp32_param(param, padded)
        else:
            utils.safe_set_local_optimizer_state(param, padded, key)

    def _range(self, param: nn.Parameter) -> tuple[int, int]:
        """Stage 3: this rank's elements of the flattened parameter, without the padding."""
        size = param.ds_tensor.ds_numel  # type: ignore[attr-defined]
        start = min(dist.get_rank() * size, param.ds_numel)  # type: ignore[attr-defined]
        return start, min(start + size, param.ds_numel)  # type: ignore[attr-defined]

    # DeepSpeed's flat parameters

    def _parts(self) -> list[nn.Parameter]:
        """DeepSpeed's own flat parameters, this rank's part of each group."""
        if self.stage == 3:
            return [part for part in self._engine.optimizer.fp32_partitioned_groups_flat if part is not None]
        return [part for group in self.torch_optimizer.param_groups for part in group["params"]]

    def entries(self) -> tuple[list[str], dict[str, Any]]:
        """Names of what the optimizer keeps for each element, and what it keeps once.

        Raises:
            ValueError: It keeps something of another size, which belongs to no parameter.
        """
        for part in self._parts():
            kept = self.torch_optimizer.state.get(part)
            if not kept:
                continue
            sized = {key for key, value in kept.items() if isinstance(value, Tensor) and value.dim() > 0}
            odd = sorted(key for key in sized if kept[key].shape != part.shape)
            if odd:
                raise ValueError(
                    f"{type(self.torch_optimizer).__name__} keeps {', '.join(odd)}, which is not one number for each element: "
                    "under ZeRO its parameters are joined and cut, and that state is no parameter's.\n"
                    "Fix: strategy='fsdp' or 'ddp' with this optimizer, or ZeRO with SGD, Adam or AdamW"
                )
            return sorted(sized), {key: value for key, value in kept.items() if key not in sized}
        return [], {}

    def allocate(self, by_element: Iterable[str], once: Mapping[str, Any]) -> None:
        """Make room for the state to come, as the first step would; what is kept once is put in."""
        for part in self._parts():
            kept = self.torch_optimizer.state[part]
            for key in by_element:
                if not isinstance(kept.get(key), Tensor) or kept[key].shape != part.shape:
                    kept[key] = torch.zeros_like(part, requires_grad=False)
            for key, value in once.items():
                kept[key] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        self._link(linked=False)
        link = getattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            link()

    def forget_entries(self) -> None:
        """Let the optimizer start afresh."""
        self.torch_optimizer.state.clear()
        self._link(linked=False)

    def _link(self, *, linked: bool) -> None:
        """Whether DeepSpeed's own functions still find the optimizer's tensors where they were."""
        if hasattr(self._engine.optimizer, "_hp_optimizer_states_linked"):
            self._engine.optimizer._hp_optimizer_states_linked = linked


def _gathered(part: FlatPart, device: torch.device) -> Tensor:
    """The whole tensor on every rank: each element is one rank's, and zeros are added to it."""
    whole = torch.zeros(prod(part.shape), dtype=part.dtype, device=device)
    whole[part.start : part.start + part.run.numel()] = part.run
    dist.all_reduce(whole)
    return whole.view(part.shape)
