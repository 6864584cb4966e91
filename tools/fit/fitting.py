"""`phalanx fit`: from a model's name to what it takes, strategy by strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.tools.fit.advice import Advice, advise
from phalanx.tools.fit.asking import ask_child
from phalanx.tools.fit.estimates import Estimate, Traced, all_estimates
from phalanx.tools.fit.gpu_memory import NCCL_MIB, NO_GPU, SLACK, GpuMemory

OPTIMIZERS = ("sgd", "adam", "adamw")
PRECISIONS = ("fp32", "bf16", "fp16")
DEFAULT_WORLD_SIZES = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked; see the options of `phalanx fit`."""

    target: str
    micro_batch_size: int | None = None
    optimizer: str = "adam"
    momentum: float = 0.9
    precision: str = "fp32"
    world_sizes: tuple[int, ...] = DEFAULT_WORLD_SIZES
    image_size: int | None = None
    activation_checkpointing: bool = False
    fp32_gradients: bool = False


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The answer."""

    question: Question
    traced: Traced
    gpu: GpuMemory
    estimates: Sequence[Estimate]
    advice: Advice

    @property
    def micro_batch_size(self) -> int:
        return self.traced.steps[0].batch_size


def fit(question: Question, gpu: GpuMemory) -> Fit:
    """Trace the step in a child process and work out every strategy.

    Raises:
        BadTarget: The model or its script is broken.
        UsageMistake: There is no such model.
        CannotFinish: torch is not there.
    """
    answer = ask_child(
        {
            "target": question.target,
            "micro_batch_size": question.micro_batch_size,
            "image_size": question.image_size,
            "precision": question.precision,
            "optimizer": question.optimizer,
            "momentum": question.momentum,
            "activation_checkpointing": question.activation_checkpointing,
            "device": "cpu" if gpu is NO_GPU else "gpu",
        }
    )
    traced = Traced.from_answer(answer)
    estimates = all_estimates(traced, question.world_sizes, question.precision, gpu, question.fp32_gradients)
    advice = advise(estimates, gpu, traced.steps[0].batch_size, question.activation_checkpointing)
    return Fit(question=question, traced=traced, gpu=gpu, estimates=estimates, advice=advice)


def fit_json(found: Fit) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {
        "schema": 1,
        "target": found.question.target,
        "micro_batch_size": found.micro_batch_size,
        "optimizer": found.question.optimizer,
        "precision": found.question.precision,
        "activation_checkpointing": found.question.activation_checkpointing,
        "parameters": found.traced.parameters,
        "trainable_parameters": found.traced.trainable,
        "shared": found.traced.shared,
        "gpu": {
            "name": found.gpu.name,
            "memory_bytes": found.gpu.memory_bytes,
            "certain": found.gpu.certain,
            "note": found.gpu.note,
        },
        "strategies": [
            {**asdict(estimate), "fits": estimate.fits(found.gpu)} for estimate in found.estimates
        ],
        "recommendation": asdict(found.advice),
        "assumptions": {
            "context_bytes": found.gpu.context_bytes,
            "nccl_bytes": (NCCL_MIB << 20) if found.gpu.context_bytes else 0,
            "slack": SLACK if found.gpu.context_bytes else 0.0,
        },
    }
