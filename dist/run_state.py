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
from phalanx.dist.checkpoint_errors import CheckpointWarning, OptimizerMismatchError, PlanMismatchError
from phalanx.dist.checkpoint_sources import MEMORY_FORMATS, Source, read_safetensors
from phalanx.dist.engines.engine import engine_of
from phalanx.dist.key_rewrites import StateDictError
from phalanx.dist.optimizer_state import export_optimizer, parameter_names, prepare_optimizer
from phalanx.dist.plain_values import decode, encode
from phalanx.dist.starting_points import named_optimizer_state, read_starting_point
from phalanx.dist.state_dict import alias_groups, load_state_dict, match_state_dict
from phalanx.dist.wrappers import canonical_name, wrapper_paths


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
    """Where a run goes on.

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

    def capture(self) -> None:
        """Take what only the engine knows (fp16's loss scale). Every rank must call it before `write`."""
        engine = engine_of(self.model)
        self._scaler = None if engine is None else engine.export().get("scaler")

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
        tensors, _, _ = model_tensors(self.model)
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(tensors):
            digest.update(f"{name}:{files.tensor_hash(tensors[name])}".encode())
        plan = self.loader.plan.fingerprint() if self.loader is not None else ""
        return {"weights": digest.hexdigest(), "progress": self.progress(), "plan": plan}

    def write(self, folder: Path, values: Mapping[str, Any], world_size: int) -> None:
        """Write a checkpoint's files into an empty folder, the manifest last.

        Raises:
            NotPlainError: A value, or a state dict, holds what cannot be kept without pickle.
        """
        progress = self.progress()
        tensors, metadata, extra = model_tensors(self.model)
        moments, optimizer = export_optimizer(self.optimizer, parameter_names(self.model))
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
        records = {
            files.MODEL_FILE: files.write_tensors(folder / files.MODEL_FILE, tensors, metadata),
            files.OPTIMIZER_FILE: files.write_tensors(folder / files.OPTIMIZER_FILE, moments, {}),
            files.STATE_FILE: files.write_json(folder / files.STATE_FILE, state),
        }
        files.write_manifest(folder, progress["step"], records)

    def load(self, path: Path, partial_optimizer: bool, other_plan: bool) -> Restored:
        """Check the whole checkpoint against this run, and only then load it."""
        state = json.loads((path / files.STATE_FILE).read_bytes())
        loader_state = decode(state["loader"])
        if self.loader is not None and loader_state is not None and not other_plan:
            _refuse_other_plan(path, loader_state.get("plan", {}), self.loader)
        weights = {**read_safetensors(path / files.MODEL_FILE), **decode(state["model_extra"])}
        moments = read_safetensors(path / files.OPTIMIZER_FILE)

        def prepare() -> Callable[[], None]:
            names = parameter_names(self.model)
            return prepare_optimizer(self.optimizer, names, moments, state["optimizer"], partial_optimizer)

        self._load_both(path, weights, prepare)
        engine, scaler = engine_of(self.model), decode(state["scaler"])
        if engine is not None and scaler:
            engine.load({**engine.export(), "scaler": scaler})
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
        start = read_starting_point(source)

        def prepare() -> Callable[[], None]:
            if start.optimizer is None:
                return lambda: None
            names = parameter_names(self.model)
            moments, plain = named_optimizer_state(start.optimizer, self.optimizer, names)
            return prepare_optimizer(self.optimizer, names, moments, plain, partial_optimizer)

        self._load_both(start.name, start.content, prepare)
        if start.scheduler is not None and self.scheduler is not None:
            self.scheduler.load_state_dict(dict(start.scheduler))
        step = start.epoch * (self.loader.plan.steps_per_epoch if self.loader is not None else 1)
        self._go_to({"epoch": start.epoch, "step_in_epoch": 0, "step": step, "skipped": 0}, None)
        return Restored(start.epoch, step, start.values)

    def _load_both(
        self, where: object, weights: Mapping[str, Any], prepare: Callable[[], Callable[[], None]]
    ) -> None:
        """Model and optimizer, or neither; of two things that are wrong, the model's is told."""
        mismatch: OptimizerMismatchError | None = None
        try:
            load_optimizer = prepare()
        except OptimizerMismatchError as error:
            mismatch = error
        try:
            if mismatch is not None:
                match = match_state_dict(weights, self.model)
                if not (match.missing or match.unexpected or match.mismatched):
                    raise mismatch
            load_state_dict(self.model, weights)
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


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Tensors under canonical names (one name per tensor), the file's metadata, and plain extra state."""
    added = set(wrapper_paths(model))
    values = {canonical_name(key, added): value for key, value in model.state_dict(keep_vars=True).items()}
    tensors = {key: value.detach() for key, value in values.items() if isinstance(value, Tensor)}
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
