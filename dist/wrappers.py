"""Modules that wrap the user's module (DDP, compile, FSDP ...), and the names they put into keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.dist.arguments import require_module

if TYPE_CHECKING:
    from torch import nn

# Whole path components that wrappers insert and that nobody uses for a layer of their own.
RESERVED_COMPONENTS = frozenset(
    {
        "_orig_mod",  # torch.compile
        "_fsdp_wrapped_module",  # FSDP
        "_fpw_module",  # FSDP before torch 2.0
        "_checkpoint_wrapped_module",  # activation checkpointing
        "_forward_module",  # Lightning and DeepSpeed strategies
        "_original_module",  # Lightning Fabric's second name for the same module
    }
)
# DDP's own component is also a fair name for a layer, so it needs more care.
MODULE = "module"
WRAPPER_COMPONENTS = RESERVED_COMPONENTS | {MODULE}

# Wrappers that keep the module as `.module`, by class name: importing the classes to ask
# isinstance() would load DeepSpeed or FSDP for everybody. AveragedModel is left out on purpose: it
# has state of its own, which a caller that unwrapped it would lose.
_MODULE_WRAPPERS = frozenset(
    {
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "torch.nn.parallel.data_parallel.DataParallel",
        "deepspeed.runtime.engine.DeepSpeedEngine",
        "deepspeed.runtime.pipe.engine.PipelineEngine",
        "apex.parallel.distributed.DistributedDataParallel",
    }
)


def wrapped_component(module: nn.Module) -> str | None:
    """The child name under which `module` keeps what it wraps; None for a module that is no wrapper."""
    # The table of children, not getattr: wrappers forward unknown attributes to what they wrap.
    children = module._modules
    for component in children:
        if component in RESERVED_COMPONENTS:
            return component
    if MODULE in children:
        classes = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
        if classes & _MODULE_WRAPPERS:
            return MODULE
    return None


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module under every wrapper, in whatever order they were put on.

    ``DistributedDataParallel``, ``DataParallel``, ``torch.compile``, FSDP, activation checkpointing
    and DeepSpeed's engine are taken off; a module that merely has a layer called ``module`` is left
    as it is, and so is ``AveragedModel``, which holds state of its own::

        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> unwrap(torch.compile(torch.nn.DataParallel(model))) is model
        True

    Raises:
        ValueError: ``model`` is no module.
    """
    require_module("model", model)
    while (component := wrapped_component(model)) is not None:
        inner = model._modules[component]
        assert inner is not None
        model = inner
    return model


def wrapper_paths(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Module paths, as components, that a wrapper inside `model` has added."""
    for name, module in model.named_modules(remove_duplicate=False):
        component = wrapped_component(module)
        if component is not None:
            yield (*name.split("."), component) if name else (component,)


def canonical_name(key: str, added: set[tuple[str, ...]]) -> str:
    """`key` without the components that the wrappers at the paths `added` put into it."""
    if not added:
        return key
    parts = tuple(key.split("."))
    return ".".join(part for end, part in enumerate(parts, 1) if parts[:end] not in added)
