"""From one traced step to what each strategy holds on each rank: arithmetic alone.

With P parameters on N ranks, bytes per rank (fp32 weights; Adam keeps 8 bytes per parameter, SGD with momentum 4)::

                      weights    gradients   optimizer
    single, ddp       4P         4P          8P             also under bf16 and fp16, which autocast
    zero1             4P         4P          8P/N
    zero2             4P         4P/N        8P/N
    zero3, fsdp       4P/N       4P/N        8P/N
    zero1 to zero3 in bf16, fp16: weights and gradients take 2 bytes, and an fp32 master joins the optimizer: 12P/N
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.tools.fit.gpu_memory import SLACK, GpuMemory

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
# DeepSpeed's defaults, in elements.
REDUCE_BUCKET = 500_000_000
LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class TracedStep:
    """Forward and backward of one batch size; see `tracing.Step`."""

    batch_size: int
    batch_bytes: int
    moments: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model and its step, as the child traced them."""

    steps: tuple[TracedStep, ...]
    parameters: int
    trainable: int
    parameters_bytes: int
    trainable_bytes: int
    largest_bytes: int
    buffers_bytes: int
    state_bytes: int
    temporary_bytes: int
    blocks_bytes: tuple[int, ...] = ()
    shared: dict[str, str] = field(default_factory=dict)
    batch_norm: bool = False

    @classmethod
    def from_answer(cls, answer: dict[str, Any]) -> Traced:
        """From the child's JSON."""
        steps = tuple(
            TracedStep(step["batch_size"], step["batch_bytes"], tuple(tuple(m) for m in step["moments"]))
            for step in answer["steps"]
        )
        fields = {name: answer[name] for name in (
            "parameters", "trainable", "parameters_bytes", "trainable_bytes", "largest_bytes", "buffers_bytes",
            "shared", "batch_norm",
        )}  # fmt: skip
        return cls(steps=steps, blocks_bytes=tuple(answer["blocks_bytes"]), **answer["optimizer"], **fields)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One strategy on one number of ranks, in bytes per rank.

    Attributes:
        name: One of `STRATEGIES`.
        world_size: Ranks.
        parameters_bytes: Weights that the rank keeps.
        gradients_bytes: Gradients when all are there.
        optimizer_bytes: Optimizer state, fp32 masters among it.
        activations_bytes: What forward and backward hold beside these at the peak.
        buckets_bytes: Communication: buckets that are no gradients themselves, weights gathered for a while.
        buffers_bytes: The model's buffers (batch norm's statistics).
        batch_bytes: The inputs.
        peak_bytes: The most that tensors take at one moment.
        context_bytes: CUDA's context and libraries, NCCL: an assumption.
        slack_bytes: The allocator's rounding and fragmentation: an assumption.
        total_bytes: All of it, as nvidia-smi would show it.
        largest_micro_batch: Samples per rank that fit into the GPU; 0 when none does, None when it is not known.
        peak_in: ``backward`` or ``optimizer step``.
        notes: What else to know.
    """

    name: str
    world_size: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buckets_bytes: int
    buffers_bytes: int
    batch_bytes: int
    peak_bytes: int
    context_bytes: int
    slack_bytes: int
    total_bytes: int
    largest_micro_batch: int | None
    peak_in: str
    notes: tuple[str, ...] = ()

    def fits(self, gpu: GpuMemory) -> bool | None:
        """Whether it fits; None where the GPU's size is not known."""
        return None if gpu.memory_bytes is None else self.total_bytes <= gpu.memory_bytes


@dataclass(frozen=True, kw_only=True)
class _Shares:
    """What a strategy makes of weights, gradients and optimizer state on one rank."""

    parameters: int
    gradients: int
    gradients_kept: int  # there at every moment
    gradient_scale: float  # of the traced ones, on top of those
    casts: bool  # autocast's copies of the weights
    optimizer: int
    temporary: int
    buckets: int
    notes: tuple[str, ...] = ()


def estimate(
    traced: Traced, name: str, world_size: int, precision: str, gpu: GpuMemory, fp32_gradients: bool = False
) -> Estimate:
    """What `name` takes per rank.

    Args:
        traced: The model and its step.
        name: One of `STRATEGIES`.
        world_size: Number of ranks.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        gpu: For context, slack and the largest micro batch.
        fp32_gradients: ZeRO with 16 bits sums gradients in fp32 copies.
    """
    shares = _shares(traced, name, world_size, precision, fp32_gradients)
    first = traced.steps[0]
    peak, activations = _backward_peak(traced, shares, first)
    step_peak = _step_peak(traced, shares)
    in_step = step_peak > peak
    overhead = gpu.overhead_bytes(world_size)
    most = max(peak, step_peak)
    slack = int(SLACK * most) if gpu.context_bytes else 0
    return Estimate(
        name=name,
        world_size=world_size,
        parameters_bytes=shares.parameters,
        gradients_bytes=shares.gradients,
        optimizer_bytes=shares.optimizer,
        activations_bytes=activations,
        buckets_bytes=shares.buckets,
        buffers_bytes=traced.buffers_bytes,
        batch_bytes=first.batch_bytes,
        peak_bytes=most,
        context_bytes=overhead,
        slack_bytes=slack,
        total_bytes=most + overhead + slack,
        largest_micro_batch=_largest(traced, shares, gpu, world_size),
        peak_in="optimizer step" if in_step else "backward",
        notes=shares.notes,
    )


def _shares(traced: Traced, name: str, ranks: int, precision: str, fp32_gradients: bool) -> _Shares:
    weights, gradients = traced.parameters_bytes, traced.trainable_bytes
    state = traced.state_bytes
    if name == "single":
        return _Shares(
            parameters=weights, gradients=gradients, gradients_kept=0, gradient_scale=1.0, casts=True,
            optimizer=state, temporary=traced.temporary_bytes, buckets=0,
        )  # fmt: skip
    if name == "ddp":
        return _Shares(
            parameters=weights, gradients=gradients, gradients_kept=gradients, gradient_scale=0.0, casts=True,
            optimizer=state, temporary=traced.temporary_bytes, buckets=0,
            notes=(f"gradients are views of the buckets; without gradient_as_bucket_view add {gradients / 1e9:.2f} GB",),
        )  # fmt: skip
    if name == "fsdp":
        return _fsdp(traced, ranks, precision)
    return _zero(traced, int(name[-1]), ranks, precision, fp32_gradients)


def _fsdp(traced: Traced, ranks: int, precision: str) -> _Shares:
    blocks = sorted(traced.blocks_bytes, reverse=True)
    rest = max(traced.parameters_bytes - sum(blocks), 0)
    whole = rest + sum(blocks[:2])  # the block at work and the next one, and what is in no block
    narrow = precision != "fp32" and not traced.batch_norm
    gathered = (whole // 2 if narrow else whole) + min(sum(blocks[:2]) or rest, traced.trainable_bytes)
    note = () if blocks else ("no list of equal blocks was found: all weights are gathered at once",)
    return _Shares(
        parameters=_share(traced.parameters_bytes, ranks),
        gradients=_share(traced.trainable_bytes, ranks),
        gradients_kept=_share(traced.trainable_bytes, ranks),
        gradient_scale=0.0,
        casts=not narrow and precision != "fp32",
        optimizer=_share(traced.state_bytes, ranks),
        temporary=_share(traced.temporary_bytes, ranks),
        buckets=gathered if ranks > 1 else 0,
        notes=note,
    )


def _zero(traced: Traced, stage: int, ranks: int, precision: str, fp32_gradients: bool) -> _Shares:
    half = precision != "fp32"
    width = 2 if half else 4
    weights, gradients = (
        (traced.parameters * 2, traced.trainable * 2)
        if half
        else (traced.parameters_bytes, traced.trainable_bytes)
    )
    master = 4 * traced.trainable if half else 0
    bucket = min(REDUCE_BUCKET, traced.trainable) * width
    gathered = min(LIVE_PARAMETERS, traced.parameters) * width if stage == 3 and ranks > 1 else 0
    held = _share(gradients, ranks) if stage >= 2 else gradients
    copies = _share(4 * traced.trainable, ranks) if half and fp32_gradients else 0
    notes = []
    if ranks > 1:
        notes.append("buckets and gathered weights are as large as DeepSpeed's defaults make them")
    if half and not fp32_gradients:
        notes.append("--fp32-gradients adds 4P/N: gradients summed in fp32")
    return _Shares(
        parameters=_share(weights, ranks) if stage == 3 else weights,
        gradients=held + copies,
        gradients_kept=held + copies,
        gradient_scale=0.0,
        casts=False,
        optimizer=_share(traced.state_bytes + master, ranks),
        temporary=_share(traced.temporary_bytes, ranks),
        buckets=(bucket if ranks > 1 else 0) + gathered,
        notes=tuple(notes),
    )


def _share(total: int, ranks: int) -> int:
    return -(-total // ranks)


def _backward_peak(traced: Traced, shares: _Shares, step: TracedStep) -> tuple[int, int]:
    """The most that is alive in forward and backward, and how much of it are activations."""
    moment = max(step.moments, key=lambda moment: _at(traced, shares, step, moment))
    return _at(traced, shares, step, moment), moment[2] + (moment[1] if shares.casts else 0)


def _at(traced: Traced, shares: _Shares, step: TracedStep, moment: tuple[int, int, int]) -> int:
    """What is alive at a moment of forward or backward."""
    fixed = (
        shares.parameters + traced.buffers_bytes + shares.optimizer + shares.gradients_kept + shares.buckets
    )
    gradients, casts, others = moment
    alive = int(gradients * shares.gradient_scale) + (casts if shares.casts else 0) + others
    return fixed + step.batch_bytes + alive


def _step_peak(traced: Traced, shares: _Shares) -> int:
    """What the optimizer's step takes; the batch and the output are still there in a usual loop."""
    gradients = max(shares.gradients, shares.gradients_kept)
    return (
        shares.parameters
        + traced.buffers_bytes
        + shares.optimizer
        + gradients
        + shares.temporary
        + traced.steps[0].batch_bytes
    )


def _largest(traced: Traced, shares: _Shares, gpu: GpuMemory, world_size: int) -> int | None:
    """Samples that fit: each moment of the step grows in a straight line, which two traced sizes tell."""
    if gpu.memory_bytes is None or len(traced.steps) < 2:
        return None
    usable = int((gpu.memory_bytes - gpu.overhead_bytes(world_size)) / (1 + SLACK))
    one, two = traced.steps[:2]
    more = two.batch_size - one.batch_size
    input_slope = (two.batch_bytes - one.batch_bytes) / more
    lines = [(_step_peak(traced, shares), input_slope)]
    # Gradients and casts do not depend on the batch, so a moment is known again by them.
    later = {moment[:2]: moment for moment in two.moments}
    for moment in one.moments:
        if moment[:2] in later:
            growth = (later[moment[:2]][2] - moment[2]) / more
            lines.append((_at(traced, shares, one, moment), growth + input_slope))
    peaks = [_backward_peak(traced, shares, step)[0] for step in (one, two)]
    lines.append((peaks[0], (peaks[1] - peaks[0]) / more))
    if max(slope for _, slope in lines) <= 0:
        return None
    return max(0, min(_fitting(start, slope, one.batch_size, usable) for start, slope in lines))


def _fitting(start: float, slope: float, at: int, usable: int) -> int:
    """The largest batch on a line that takes `start` at the batch `at`."""
    if slope <= 0:
        return 0 if start > usable else 1 << 62
    return int(at + (usable - start) // slope)


def all_estimates(
    traced: Traced, world_sizes: Sequence[int], precision: str, gpu: GpuMemory, fp32_gradients: bool = False
) -> list[Estimate]:
    """Every strategy on every number of ranks; `single` once."""
    found = [estimate(traced, "single", 1, precision, gpu, fp32_gradients)]
    for world_size in world_sizes:
        names = STRATEGIES[1:] if world_size > 1 else ()
        found += [estimate(traced, name, world_size, precision, gpu, fp32_gradients) for name in names]
    return found
