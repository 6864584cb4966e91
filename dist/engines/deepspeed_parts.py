"""What a checkpoint reads and writes of ZeRO's stages 1 to 3: this rank's parts, and nothing gathered."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.dist.checkpoint_errors import CheckpointWarning, OptimizerMismatchError
from phalanx.dist.engines.deepspeed_state import ZeroState
from phalanx.dist.flat_parts import FlatPart
from phalanx.dist.held_state import ReadInto
from phalanx.dist.key_rewrites import sample_names
from phalanx.dist.named_optimizer import Later, NamedOptimizer, options_of, read_into, saved_shape


class ZeroParts:
    """A DeepSpeed engine's state by name, see `HeldState`.

    Stages 1 and 2 are gathered on rank 0 when they are saved, since each rank holds all weights in any case; stage 3
    is saved in parts. Where the weights are fp32 themselves, they are taken as they are.
    """

    def __init__(self, state: ZeroState) -> None:
        self._state, self._module = state, state.module

    @property
    def sharded(self) -> bool:
        """See `HeldState`."""
        return self._state.stage == 3

    @property
    def optimizer(self) -> NamedOptimizer:
        """See `HeldState`."""
        return ZeroOptimizer(self._state)

    def values(self) -> dict[str, Any]:
        """See `HeldState`."""
        found = dict(self._module.state_dict(keep_vars=True))
        weights = {id(param): self._weight(param) for param in self._module.parameters()}
        for name, param in self._module.named_parameters(remove_duplicate=False):
            if name in found:
                found[name] = weights[id(param)]
        return found

    def load(self, state: Mapping[str, Any], read: ReadInto) -> None:
        """See `HeldState`."""
        done: set[int] = set()
        for name, param in self._module.named_parameters(remove_duplicate=False):
            if name in state and id(param) not in done:
                done.add(id(param))
                with torch.no_grad():
                    (self._load_part if self.sharded else self._load_whole)(param, state[name], read)

    def _weight(self, param: nn.Parameter) -> Tensor:
        if self._state.is_master(param) and (self.sharded or param.dtype != torch.float32):
            return self._state.part(param)
        return self._state.own_part(param) if self.sharded else param.detach()

    def _load_whole(self, param: nn.Parameter, value: Any, read: ReadInto) -> None:
        """Stages 1 and 2: the weight that the forward uses, and this rank's part of the fp32 one."""
        if not self._state.is_master(param):
            read(value, param.detach())
            return
        whole = torch.empty(param.shape, dtype=torch.float32)  # one at a time
        read(value, whole)
        param.detach().copy_(whole)
        master = self._state.part(param)
        master.run.copy_(whole.reshape(-1)[master.start : master.start + master.run.numel()])

    def _load_part(self, param: nn.Parameter, value: Any, read: ReadInto) -> None:
        """Stage 3: this rank's parts of both; of small weights, which are everywhere, the whole as well."""
        own = self._state.own_part(param)
        if self._state.is_master(param):
            master = FlatPart(torch.empty(own.run.numel()), own.start, tuple(own.shape))
            read(value, master)
            self._state.put_part(param, master.run)
            own.run.copy_(master.run)
        else:
            read(value, own)
        if param.numel() == own.numel() and param.shape == own.shape:
            read(value, param.detach())


class ZeroOptimizer:
    """The state of the optimizer that ZeRO gives parts of flattened groups to, see `NamedOptimizer`."""

    def __init__(self, state: ZeroState) -> None:
        self._state = state

    @property
    def kind(self) -> str:
        """See `NamedOptimizer`."""
        return type(self._state.torch_optimizer).__name__

    @property
    def joined(self) -> bool:
        """See `NamedOptimizer`."""
        return True

    @property
    def groups(self) -> list[list[str]]:
        """See `NamedOptimizer`."""
        return self._state.group_names

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `NamedOptimizer`."""
        return {name: self._state.shape(param) for name, param in self._state.params.items()}

    def options(self) -> list[dict[str, Any]]:
        """See `NamedOptimizer`."""
        return options_of(self._state.torch_optimizer)

    def state(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """See `NamedOptimizer`."""
        by_element, once = self._state.entries()
        states: dict[str, dict[str, Any]] = {}
        for name in self._trained() if by_element or once else []:
            param = self._state.params[name]
            entries: dict[str, Any] = {key: self._state.part(param, key) for key in by_element}
            copies = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in once.items()
            }
            states[name] = {**entries, **copies}
        return states, {}

    def check(self, states: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """See `NamedOptimizer`."""
        for name in self._trained():
            for key, value in states.get(name, {}).items():
                shape = saved_shape(tensors, value.key)[0] if isinstance(value, Later) else ()
                if shape and shape != self._state.shape(self._state.params[name]):
                    raise OptimizerMismatchError(
                        f"the checkpoint's {self.kind} keeps {key} of shape {list(shape)} for {name}, which is not one number "
                        "for each element: ZeRO joins and cuts parameters, and has no place for it.\n"
                        "Fix: go on with the strategy that saved it, or load the weights alone with load_state_dict()"
                    )

    def load(
        self,
        options: list[dict[str, Any]],
        states: Mapping[str, Mapping[str, Any]],
        shared: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """See `NamedOptimizer`."""
        for group, saved in zip(self._state.torch_optimizer.param_groups, options, strict=True):
            group.update(saved)
        trained = [name for name in self._trained() if name in states]
        if not trained:
            self._state.forget_entries()
            return
        by_element = self._by_element(trained, states, tensors)
        self._state.allocate(by_element, self._once(trained, states, tensors, by_element))
        for name in self._trained():
            for key in by_element:
                self._load_entry(name, key, states.get(name, {}).get(key), tensors)

    def _trained(self) -> list[str]:
        names = [name for group in self.groups for name in group]
        return [name for name in names if self._state.is_master(self._state.params[name])]

    def _by_element(
        self, trained: list[str], states: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]
    ) -> list[str]:
        """Entries of the parameters' own shapes; no parameter that DeepSpeed takes is a scalar, as counts of steps are."""
        found = set()
        for name in trained:
            shape = self._state.shape(self._state.params[name])
            for key, value in states[name].items():
                if isinstance(value, Later) and saved_shape(tensors, value.key)[0] == shape:
                    found.add(key)
        return sorted(found)

    def _once(
        self,
        trained: list[str],
        states: Mapping[str, Mapping[str, Any]],
        tensors: Mapping[str, Tensor],
        by_element: list[str],
    ) -> dict[str, Any]:
        """What the optimizer keeps once; parameters that were saved with other values are named."""
        found: dict[str, Any] = {}
        differ: list[str] = []
        for name in trained:
            for key, value in states[name].items():
                if key in by_element:
                    continue
                plain = tensors[value.key].clone() if isinstance(value, Later) else value
                if found.setdefault(key, plain) is not plain and found[key] != plain:
                    differ.append(f"{name} ({key} {plain}, not {found[key]})")
        if differ:
            warnings.warn(
                CheckpointWarning(
                    f"ZeRO counts steps once for all parameters, and these were saved with another count: "
                    f"{sample_names(differ)}. Their next updates differ slightly from the run that saved"
                ),
                stacklevel=2,
            )
        return found

    def _load_entry(self, name: str, key: str, value: Any, tensors: Mapping[str, Tensor]) -> None:
        param = self._state.params[name]
        like = self._state.part(param, key)
        part = FlatPart(torch.zeros(like.run.numel()), like.start, tuple(like.shape))
        if isinstance(value, Later):  # without saved state it starts from zero, as a fresh one does
            read_into(tensors, value.key, part)
        self._state.put_part(param, part.run, key)
