"""Gradients made smaller for DDP's all-reduce, by name."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from phalanx.dist.engines.precision import Precision

COMPRESSIONS = ("bf16", "fp16", "powersgd")
# PowerSGD starts from gradients that are reduced whole for so many steps; torch asks for 2 at least.
POWERSGD_START = 10


def check_compression(name: str, precision: Precision) -> None:
    """Refuse what is unknown or cannot work.

    Raises:
        ValueError: See the message.
    """
    if name not in COMPRESSIONS:
        raise ValueError(f"compression={name!r}: say {', '.join(map(repr, COMPRESSIONS))}, or leave it out")
    if name == "powersgd" and precision == "fp16":
        raise ValueError(
            "compression='powersgd' with precision='fp16': one overflow would stay in the error that it carries from step to "
            "step.\nFix: precision='bf16', or compression='fp16'"
        )


def compress(ddp: DistributedDataParallel, name: str) -> None:
    """Let DDP reduce gradients compressed: halved (``fp16``, ``bf16``) or as matrices of rank 1 (``powersgd``).

    The weights of ranks with different numbers of samples are in the gradients before, so they are kept.
    """
    if name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(
            process_group=ddp.process_group,
            matrix_approximation_rank=1,
            start_powerSGD_iter=POWERSGD_START,
            min_compression_rate=2,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hook = default_hooks.fp16_compress_hook if name == "fp16" else default_hooks.bf16_compress_hook
    ddp.register_comm_hook(ddp.process_group, hook)
