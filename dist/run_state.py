"""What a checkpoint holds of a run: model, optimizer, progress, scheduler and the user's values."""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.dist import checkpoint_files as files
from phalanx.dist.checkpoint_errors import (
    CheckpointError,
    CheckpointWarning,
    OptimizerMismatchError,
    PlanMismatchError,
)
from phalanx.dist.checkpoint_sources import MEMORY_FORMATS, Source
from phalanx.dist.engines.engine import engine_of
from phalanx.dist.flat_parts import FlatPart
from phalanx.dist.held_state import HeldState, held_state, named_optimizer
from phalanx.dist.key_rewrites import StateDictError
from phalanx.dist.optimizer_state import export_optimizer, prepare_optimizer
from phalanx.dist.plain_values import decode, encode
from phalanx.dist.shards import is_sharded, local_part
from phalanx.dist.starting_points import named_optimizer_state, read_starting_point
from phalanx.dist.state_dict import alias_groups, load_state_dict, match_state_dict
from phalanx.dist.stored_loading import load_held, load_stored
from phalanx.dist.stored_tensors import StoredTensors
from phalanx.dist.wrappers import canonical_name, unwrap, wrapper_paths


class Scheduler(Protocol):
    """What is asked of a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class Loader(Protocol):
    """What is asked of a loader; `ShardLoader` has it."""

    @property
    def progress(self) -> Any: ...

    @property
    def plan(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


@dataclass(frozen=True)
class Restored:
    """Where a run goes on::

        restored = checkpoints.restore()
        best = restored.values.get("accuracy", 0.0)

    Attributes:
        epoch: The epoch to go on with, for ``range(restored.epoch, epochs)``; 0 for a fresh start.
        step: Optimizer steps done so far.
        values: What was passed to `CheckpointManager.save`.
        path: The checkpoint; None for a fresh start.
        damaged: Newer checkpoints that were passed over, and why.
    """

    epoch: int = 0
    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """One checkpoint's content on its way to disk."""

    step: int
    parts: dict[str, dict[str, Tensor]]
    metadata: dict[str, dict[str, str]]
    state: dict[str, Any]
    gather: bool = False  # tensors that ranks hold in parts are to be brought together on rank 0

    def write(self, folder: Path) -> None:
        """Write all of it into an empty folder, the manifest last."""
        records = {
            name: files.write_tensors(folder / name, self.parts[part], self.metadata[part])
            for part, name in (("model", files.MODEL_FILE), ("optimizer", files.OPTIMIZER_FILE))
        }
        records[files.STATE_FILE] = files.write_json(folder / files.STATE_FILE, self.state)
        files.write_manifest(folder, self.step, records)

    def finish_shards(
        self, folder: Path, index: Mapping[str, Any], records: Mapping[str, files.FileRecord]
    ) -> None:
        """Write what belongs to no rank's shard, once all of those are there."""
        others = {
            files.SHARDS_FILE: files.write_json(folder / files.SHARDS_FILE, index),
            files.STATE_FILE: files.write_json(folder / files.STATE_FILE, self.state),
        }
        files.write_manifest(folder, self.step, {**records, **others})


@dataclass
class RunState:
    """The live objects of a run, and how they become files and come back."""

    model: nn.Module
    optimizer: Optimizer
    loader: Loader | None
    scheduler: Scheduler | None
    step: int = 0  # step and epoch are counted here only without a loader
    epoch: int = 0
    _scaler: dict[str, Any] | None = None

    @property
    def held(self) -> HeldState | None:
        """What the model's engine keeps elsewhere, see `held_state`."""
        return held_state(self.model)

    def check(self) -> None:
        """Raise a ValueError when the optimizer's state could not be stored by the model's names."""
        assert named_optimizer(self.model, self.optimizer).groups is not None

    def capture(self) -> None:
        """Take what only the engine knows (fp16's loss scale). Every rank must call it before `snapshot`."""
        scaler = getattr(engine_of(self.model), "scaler", None)
        self._scaler = None if scaler is None else scaler.state_dict()

    def refuse_inside_step(self, what: str) -> None:
        """Between a step's forward and its update: gradients of the old weights would change the loaded ones.

        Raises:
            CheckpointError: A step is under way.
        """
        if getattr(engine_of(self.model), "in_step", False):
            raise CheckpointError(
                f"{what}() inside a step, between a forward and its update: the update would mix gradients of the old "
                f"weights with the new ones.\nFix: call {what}() before the step's forward or after its update"
            )

    def progress(self) -> dict[str, int]:
        """Where the run stands: the loader's progress, or what is counted here."""
        if self.loader is not None:
            return dict(self.loader.progress.to_dict())
        return {"epoch": self.epoch, "step_in_epoch": 0, "step": self.step, "skipped": 0}

    def current_step(self) -> int:
        """`progress`'s step, for every step: cheap."""
        return self.step if self.loader is None else int(self.loader.progress.step)

    def digests(self) -> dict[str, Any]:
        """What all ranks must agree on after a restore."""
        tensors, _, _ = model_tensors(self.model, None)
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(tensors):
            if not is_sharded(tensors[name]):  # of the others each rank holds another part
                digest.update(f"{name}:{files.tensor_hash(tensors[name])}".encode())
        plan = self.loader.plan.fingerprint() if self.loader is not None else ""
        return {"weights": digest.hexdigest(), "progress": self.progress(), "plan": plan}

    def snapshot(self, values: Mapping[str, Any], world_size: int) -> Snapshot:
        """All that a checkpoint holds: tensors are the live ones, the rest is a copy.

        Raises:
            NotPlainError: A value, or a state dict, holds what cannot be kept without pickle.
            ValueError: A tensor is of a kind that a checkpoint does not hold.
        """
        self.refuse_inside_step("save")
        progress = self.progress()
        held = self.held
        tensors, metadata, extra = model_tensors(self.model, held)
        moments, optimizer = export_optimizer(named_optimizer(self.model, self.optimizer))
        state = {
            "format": files.FORMAT,
            "progress": progress,
            "loader": _encoded(self.loader, "loader.state_dict()"),
            "scheduler": _encoded(self.scheduler, "scheduler.state_dict()"),
            "optimizer": optimizer,
            "scaler": self._scaler and encode(self._scaler, "the engine's scaler"),
            "model_extra": extra,
            "values": {name: encode(value, f"save({name}=...)") for name, value in values.items()},
            "world_size": world_size,
            "versions": _versions(),
        }
        parts = {"model": tensors, "optimizer": moments}
        for part in parts.values():
            files.check_tensors({name: local_part(tensor) for name, tensor in part.items()})
        gather = held is not None and not held.sharded
        return Snapshot(progress["step"], parts, {"model": metadata, "optimizer": {}}, state, gather)

    def load(self, path: Path, partial_optimizer: bool, other_plan: bool, hashed: bool = False) -> Restored:
        """Check the whole checkpoint against this run, and only then load it; `hashed`: this rank has just hashed it."""
        self.refuse_inside_step("restore")
        state = json.loads((path / files.STATE_FILE).read_bytes())
        loader_state = decode(state["loader"])
        if self.loader is not None and loader_state is not None and not other_plan:
            _refuse_other_plan(path, loader_state.get("plan", {}), self.loader)
        weights, moments = (StoredTensors(path, part, hashed) for part in ("model", "optimizer"))
        extra = decode(state["model_extra"])

        def prepare() -> Callable[[], None]:
            optimizer = named_optimizer(self.model, self.optimizer)
            return prepare_optimizer(optimizer, moments, state["optimizer"], partial_optimizer)

        held = self.held

        def load_weights() -> object:
            if held is not None:
                return load_held(unwrap(self.model), held, weights, extra)
            return load_stored(self.model, weights, extra)

        self._load_both(path, {**weights.on_meta(), **extra}, prepare, load_weights)
        scaler = getattr(engine_of(self.model), "scaler", None)
        if scaler is not None and state["scaler"]:
            # What another strategy's scaler keeps beside the scale may be less.
            scaler.load_state_dict({**scaler.state_dict(), **decode(state["scaler"])})
        progress = state["progress"]
        self._go_to(progress, loader_state)
        scheduler = decode(state["scheduler"])
        if self.scheduler is not None and scheduler is not None:
            self.scheduler.load_state_dict(scheduler)
        elif self.scheduler is not None:
            warnings.warn(CheckpointWarning(f"{path} has no scheduler state: it starts afresh"), stacklevel=2)
        return Restored(progress["epoch"], progress["step"], decode(state["values"]), path)

    def load_foreign(self, source: Source, partial_optimizer: bool) -> Restored:
        """Load a tutorial's dict or bare weights; what such a file does not have starts afresh."""
        self.refuse_inside_step("restore")
        start = read_starting_point(source)

        def prepare() -> Callable[[], None]:
            if start.optimizer is None:
                return lambda: None
            optimizer = named_optimizer(self.model, self.optimizer)
            moments, plain = named_optimizer_state(start.optimizer, optimizer)
            return prepare_optimizer(optimizer, moments, plain, partial_optimizer)

        self._load_both(
            start.name, start.content, prepare, lambda: load_state_dict(self.model, start.content)
        )
        if start.scheduler is not None and self.scheduler is not None:
            self.scheduler.load_state_dict(dict(start.scheduler))
        step = start.epoch * (self.loader.plan.steps_per_epoch if self.loader is not None else 1)
        self._go_to({"epoch": start.epoch, "step_in_epoch": 0, "step": step, "skipped": 0}, None)
        return Restored(start.epoch, step, start.values)

    def _load_both(
        self,
        where: object,
        weights: Mapping[str, Any],
        prepare: Callable[[], Callable[[], None]],
        load_weights: Callable[[], object],
    ) -> None:
        """Model and optimizer, or neither; of two things that are wrong, the model's is told."""
        mismatch: OptimizerMismatchError | None = None
        try:
            load_optimizer = prepare()
        except OptimizerMismatchError as error:
            mismatch = error
        try:
            if mismatch is not None:
                match = match_state_dict(weights, self.model if self.held is None else self.held.values())
                if not (match.missing or match.unexpected or match.mismatched):
                    raise mismatch
            load_weights()
        except (StateDictError, OptimizerMismatchError) as error:
            error.args = (
                f"{where}: {str(error).removeprefix('the state dict: ').removeprefix(f'{where}: ')}",
            )
            raise
        load_optimizer()

    def _go_to(self, progress: Mapping[str, int], loader_state: Mapping[str, Any] | None) -> None:
        if self.loader is None:
            self.epoch, self.step = progress["epoch"], progress["step"]
        elif loader_state is not None:
            self.loader.load_state_dict(loader_state)
        else:
            self.loader.load_state_dict({**self.loader.state_dict(), "progress": dict(progress)})


def _encoded(part: Loader | Scheduler | None, where: str) -> Any:
    return None if part is None else encode(part.state_dict(), where)


def _versions() -> dict[str, str]:
    from phalanx import __version__

    return {"phalanx": __version__, "torch": torch.__version__, "python": platform.python_version()}


def model_tensors(
    model: nn.Module, held: HeldState | None
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Tensors under canonical names (one name per tensor), the file's metadata, and plain extra state."""
    if held is not None:
        values = held.values()
    else:
        added = set(wrapper_paths(model))
        named = model.state_dict(keep_vars=True)
        values = {canonical_name(key, added): value for key, value in named.items()}
    tensors = {
        key: value if isinstance(value, FlatPart) else value.detach()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }
    extra = {key: encode(value, key) for key, value in values.items() if key not in tensors}
    aliases = {}
    for first, *others in alias_groups(tensors):
        aliases.update(dict.fromkeys(others, first))
    tensors = {key: value for key, value in tensors.items() if key not in aliases}
    formats = {
        key: name
        for key, value in tensors.items()
        for name, memory_format in MEMORY_FORMATS.items()
        if value.dim() == (4 if name == "channels_last" else 5)
        and not is_sharded(value)
        and value.is_contiguous(memory_format=memory_format)
        and not value.is_contiguous()
    }
    tables = {"aliases": aliases, "memory_formats": formats}
    return tensors, {name: json.dumps(table) for name, table in tables.items() if table}, extra


def _refuse_other_plan(path: Path, saved: Mapping[str, Any], loader: Loader) -> None:
    if saved.get("fingerprint") == loader.plan.fingerprint():
        return
    now = loader.state_dict().get("plan", {})
    differ = [
        f"{name} {saved[name]!r} -> {now[name]!r}"
        for name in saved
        if name in now and name != "fingerprint" and saved[name] != now[name]
    ]
    raise PlanMismatchError(
        f"{path} is of a run that saw other samples (saved -> now): {', '.join(differ) or 'another plan'}.\n"
        "Samples would be seen twice or never. The number of ranks may change, these may not.\n"
        "Fix: the same settings and data as before, another folder to start over, or restore(other_plan=True)"
    )
