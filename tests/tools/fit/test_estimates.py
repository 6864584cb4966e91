"""The arithmetic of the strategies, against the formulas of the papers."""

from __future__ import annotations

import pytest

from phalanx.tools.fit.advice import advise
from phalanx.tools.fit.estimates import STRATEGIES, Traced, TracedStep, all_estimates, estimate
from phalanx.tools.fit.gpu_memory import GB, GIB, MIB, NO_GPU, SLACK, UNKNOWN_GPU, GpuMemory, find_gpu
from phalanx.tools.usage import UsageMistake

BILLION = 1_000_000_000
GPU = GpuMemory("24 GiB", 24 * GIB, 450 * MIB)


def traced(parameters: int = BILLION, per_sample: int = 10 * MIB, blocks: int = 10) -> Traced:
    """Adam, and activations that grow with the batch."""
    size = 4 * parameters
    steps = tuple(
        TracedStep(batch, batch * 1000, ((0, 0, batch * per_sample), (size, 0, per_sample)))
        for batch in (8, 16)
    )
    return Traced(
        steps=steps, parameters=parameters, trainable=parameters, parameters_bytes=size, trainable_bytes=size,
        largest_bytes=size // 100, buffers_bytes=0, state_bytes=2 * size, temporary_bytes=size // 100,
        blocks_bytes=(size // blocks,) * blocks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [  # bytes per parameter: weights, gradients, optimizer, for 8 ranks
        ("single", "fp32", (4, 4, 8)),
        ("single", "bf16", (4, 4, 8)),
        ("ddp", "fp32", (4, 4, 8)),
        ("zero1", "fp32", (4, 4, 1)),
        ("zero2", "fp32", (4, 0.5, 1)),
        ("zero3", "fp32", (0.5, 0.5, 1)),
        ("fsdp", "fp32", (0.5, 0.5, 1)),
        ("zero1", "bf16", (2, 2, 1.5)),
        ("zero2", "bf16", (2, 0.25, 1.5)),
        ("zero2", "fp16", (2, 0.25, 1.5)),
        ("zero3", "fp16", (0.25, 0.25, 1.5)),
    ],
)
def test_shares(name: str, precision: str, expected: tuple[float, float, float]) -> None:
    found = estimate(traced(), name, 1 if name == "single" else 8, precision, GPU)
    sizes = (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes)
    assert tuple(size / BILLION for size in sizes) == expected


def test_fp32_copies_of_gradients() -> None:
    plain, copies = (
        estimate(traced(), "zero2", 8, "bf16", GPU, fp32_gradients=more) for more in (False, True)
    )
    assert (copies.gradients_bytes - plain.gradients_bytes) / BILLION == 0.5
    assert copies.peak_bytes - plain.peak_bytes == BILLION // 2


def test_an_update_can_be_the_peak() -> None:
    found = estimate(traced(per_sample=1000), "single", 1, "fp32", GPU)
    assert found.peak_in == "optimizer step"
    assert found.peak_bytes == pytest.approx(16.04 * BILLION, rel=1e-4)
    assert estimate(traced(parameters=1000), "single", 1, "fp32", GPU).peak_in == "backward"


def test_more_ranks_never_take_more() -> None:
    for name in STRATEGIES[1:]:
        sizes = [estimate(traced(), name, ranks, "bf16", GPU).peak_bytes for ranks in (2, 4, 8, 64)]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_largest_micro_batch_fits_and_one_more_does_not(name: str) -> None:
    ranks = 1 if name == "single" else 4
    small = traced(parameters=20_000_000)
    largest = estimate(small, name, ranks, "fp32", GPU).largest_micro_batch
    assert largest is not None
    for batch, fits in ((largest, True), (largest + 1, False)):
        size = 4 * small.parameters
        step = TracedStep(batch, batch * 1000, ((0, 0, batch * 10 * MIB), (size, 0, 10 * MIB)))
        fields = {**vars(small), "steps": (step,)}
        found = estimate(Traced(**fields), name, ranks, "fp32", GPU)
        assert (found.total_bytes <= 24 * GIB) == fits, (largest, found)


def test_no_gpu_no_overhead() -> None:
    found = estimate(traced(), "single", 1, "fp32", NO_GPU)
    assert (found.context_bytes, found.slack_bytes, found.largest_micro_batch) == (0, 0, None)
    assert found.total_bytes == found.peak_bytes
    with_gpu = estimate(traced(), "single", 1, "fp32", UNKNOWN_GPU)
    assert with_gpu.total_bytes == with_gpu.peak_bytes + 450 * MIB + int(SLACK * with_gpu.peak_bytes)


def test_advice() -> None:
    small = all_estimates(traced(parameters=10_000_000), (2, 8), "fp32", GPU)
    assert (advise(small, GPU, 8, False).strategy, advise(small, GPU, 8, False).world_size) == ("ddp", 8)
    medium = GpuMemory("16 GiB", 16 * GIB, 450 * MIB)
    large = all_estimates(traced(), (8,), "bf16", medium)
    assert advise(large, medium, 8, False).strategy in ("zero1", "zero2")
    huge = all_estimates(traced(parameters=100 * BILLION), (8,), "bf16", GPU)
    assert advise(huge, GPU, 8, False).strategy is None
    assert "--world-size" in advise(huge, GPU, 8, True).text
    deep = all_estimates(traced(parameters=1000, per_sample=8 * GIB), (2,), "fp32", GPU)
    assert "--activation-checkpointing" in advise(deep, GPU, 8, False).text
    assert (
        "8 GB" in advise(all_estimates(traced(1000), (2,), "fp32", UNKNOWN_GPU), UNKNOWN_GPU, 8, False).text
    )


@pytest.mark.parametrize(
    ("text", "name", "size"),
    [
        ("H100 80GB", "H100", 80 * GB),
        ("rtx 4090", "NVIDIA GeForce RTX 4090", 24 * GB),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", 40 * GB),
        ("24GiB", "24GiB", 24 * GIB),
        ("80 gb", "80 gb", 80 * GB),
        ("11.5GiB", "11.5GiB", int(11.5 * GIB)),
    ],
)
def test_gpus_by_name_and_size(text: str, name: str, size: int) -> None:
    found = find_gpu(text)
    assert name in found.name
    assert found.memory_bytes == pytest.approx(size, rel=0.08)


def test_a_name_of_several_sizes_is_the_smallest_and_says_so() -> None:
    found = find_gpu("A100")
    assert found.memory_bytes == 40 * GIB
    assert "80 GB" in found.note


@pytest.mark.parametrize("text", ["GTX 9999", "0GB", "", "???"])
def test_gpus_that_are_none(text: str) -> None:
    with pytest.raises(UsageMistake, match="--gpu"):
        find_gpu(text)
