"""The process that has torch and the model's code: traces a step on fake tensors and writes what it saw as JSON.

    python -m phalanx.tools.fit.child REQUEST ANSWER

Both are files; standard output and error belong to the model's code.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.tools.fit.targets import Target, TargetProblem, load_target
from phalanx.tools.fit.tracing import NothingToTrain, Step, trace_optimizer, trace_step

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What the parent needs to know of a model.

    Raises:
        TargetProblem: There is no model, or it does not run on fake tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        target = load_target(request["target"], request["micro_batch_size"], request["image_size"])
        if request["activation_checkpointing"]:
            checkpointed = _checkpoint_blocks(target.model)
            if not checkpointed:
                raise TargetProblem(
                    "The model has no list of equal blocks whose activations could be recomputed.\nFix: leave --activation-checkpointing out"
                )
        size = request["micro_batch_size"] or target.batch_size
        dtype = _DTYPES[request["precision"]]
        steps = [_step(target, size, dtype)]
        described = _described(target.model)
        optimizer = {"state_bytes": 0, "temporary_bytes": 0}
        if described["trainable"]:
            optimizer = vars(trace_optimizer(_optimizer(target.model, request)))
        target.model.zero_grad(set_to_none=True)
        # A second size tells what grows with the batch; twice as large, since one sample may be too few for batch norm.
        if target.resizable:
            steps.append(_step(target, 2 * size, dtype))
    return {"steps": [vars(step) for step in steps], "optimizer": optimizer, **described}


def _step(target: Target, size: int, dtype: torch.dtype | None) -> Step:
    try:
        step = trace_step(target.model, target.resized(size), size, target.loss, dtype)
        if all(parameter.grad is None for parameter in target.model.parameters()):
            raise NothingToTrain
    except TargetProblem:
        raise
    except NothingToTrain:
        raise TargetProblem(
            "The loss does not depend on any parameter that is trained.\n"
            "Fix: a loss made from the model's output, and a model with requires_grad on something"
        ) from None
    except Exception as error:
        raise TargetProblem(_trace_failed(error)) from error
    return step


def _trace_failed(error: Exception) -> str:
    text = " ".join(str(error).split())[:500]
    name = type(error).__name__
    if "DataDependent" in name or "DynamicOutputShape" in name or "data-dependent" in text.lower():
        return (
            f"The model's memory depends on the values it sees ({name}), and fake tensors have none.\n"
            "Fix: a function that returns the part of the model without .item(), nonzero() and masks as indices"
        )
    return f"The training step failed: {name}: {text}\nFix: does the model run on this batch? (see also --image-size)"


def _optimizer(model: nn.Module, request: dict[str, Any]) -> torch.optim.Optimizer:
    """As torch makes it by default: on a GPU it works on all parameters at once, which takes more for a moment."""
    foreach = request["device"] == "gpu"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if request["optimizer"] == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=request["momentum"], foreach=foreach)
    kind: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[request["optimizer"]]
    made: torch.optim.Optimizer = kind(parameters, lr=1e-3, foreach=foreach)
    return made


def _described(model: nn.Module) -> dict[str, Any]:
    """Parameters, each tensor counted once, and the names of those that have two."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    parameters = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            shared[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
            parameters.append(parameter)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in trainable),
        "parameters_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "trainable_bytes": sum(parameter.numel() * parameter.element_size() for parameter in trainable),
        "largest_bytes": max(
            (parameter.numel() * parameter.element_size() for parameter in parameters), default=0
        ),
        "buffers_bytes": sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        "shared": shared,
        "batch_norm": any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()),
        "blocks_bytes": _block_sizes(model),
    }


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The submodules that FSDP shards one by one."""
    from phalanx.dist.engines.fsdp import find_blocks

    return find_blocks(model)


def _block_sizes(model: nn.Module) -> list[int]:
    return [sum(p.numel() * p.element_size() for p in block.parameters()) for block in _blocks(model)]


def _checkpoint_blocks(model: nn.Module) -> int:
    """Let the blocks keep their inputs alone, and compute the rest again in the backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    blocks = set(_blocks(model))
    wrap: Any = checkpoint_wrapper
    apply: Any = apply_activation_checkpointing
    # Random numbers need not be the same again: there are none.
    apply(
        model,
        checkpoint_wrapper_fn=lambda module: wrap(module, preserve_rng_state=False),
        check_fn=lambda module: module in blocks,
    )
    return len(blocks)


def main(request: str, out: str) -> None:
    """Answer one request, or say what is wrong with it."""
    warnings.simplefilter("ignore")
    try:
        found = answer(json.loads(Path(request).read_text()))
    except TargetProblem as error:
        found = {"problem": str(error), "typed": error.typed}
    except Exception as error:  # whatever a model's code may do: one message, and torch's own words
        found = {
            "problem": f"The model could not be traced: {type(error).__name__}: {' '.join(str(error).split())[:500]}\n"
            "Fix: script.py:function with the part of the model that can run on fake tensors",
            "typed": False,
        }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:3])
