"""Batch norm whose statistics are those of all ranks' batches together, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.dist.arguments import require_module, short

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm", "revert_sync_batchnorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the batches of all ranks: what one process computes on them put together.

    torch's own works on GPUs only. This one works anywhere, weighs each rank by its number of samples (a stand-in batch
    counts for nothing) and combines means and squared deviations rather than sums of squares, which cancel. In evaluation, without a
    group, and on one rank it is plain batch norm. Made by `convert_sync_batchnorm`.

    Collective in training: one all-gather in the forward, one all-reduce in the backward.
    """

    #: Tells whether this rank's batch is a stand-in.
    counts: _Counts
    #: The class it was converted from.
    origin: type[_BatchNorm] | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (samples, channels), got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (samples, channels, ...)."""
        shared = self.training and dist.is_initialized() and dist.get_world_size() > 1
        if not shared:
            forward: Tensor = super().forward(input)
            return forward
        self._check_input_dim(input)
        output, mean, var, count = _Normalize.apply(
            input, self.weight, self.bias, self.eps, self.counts.real()
        )
        self._track(mean, var, count)
        return cast("Tensor", output)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # momentum=None is a plain average over all batches.
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _Counts:
    """Whether the batch counts; a copy or a pickle of the model takes no loader along."""

    def __init__(self, loader: Any = None) -> None:
        self._loader = None if loader is None else weakref.ref(loader)

    def real(self) -> bool:
        """Whether this rank's batch has samples of its own, rather than a stand-in."""
        loader = None if self._loader is None else self._loader()
        return loader is None or not loader.training or loader.local_count > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Counts:
        copied = _Counts()
        copied._loader = self._loader
        return copied

    def __reduce__(self) -> Any:
        return _Counts, ()


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias over all ranks; also gives mean, var and count."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, counts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Sums in at least fp32, whatever autocast has made of the input.
        wide = x if x.dtype == torch.float64 else x.float()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        channels, local = x.shape[1], x.numel() // max(x.shape[1], 1) if counts else 0
        packed = wide.new_zeros(2 * channels + 1)
        if local:
            var, mean = torch.var_mean(wide, dims, correction=0)
            packed[:channels], packed[channels:-1], packed[-1] = mean, var, local
        every = torch.stack(_gather(packed))
        numbers = every[:, -1:]
        total = numbers.sum().clamp(min=1)
        means, variances = every[:, :channels], every[:, channels:-1]
        mean = (means * numbers).sum(0) / total
        var = ((variances + (means - mean).square()) * numbers).sum(0) / total
        shape = [1, channels] + [1] * (x.dim() - 2)
        inverse = torch.rsqrt(var + eps)
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        output = normal
        if weight is not None:
            output = output * weight.to(wide.dtype).view(shape)
        if bias is not None:
            output = output + bias.to(wide.dtype).view(shape)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.counts, ctx.has_bias = counts, bias is not None
        ctx.mark_non_differentiable(mean, var, total)
        return output.to(x.dtype), mean, var, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        wide = x if x.dtype == torch.float64 else x.float()
        gradient = gradient.to(wide.dtype)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        channels = x.shape[1]
        shape = [1, channels] + [1] * (x.dim() - 2)
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)])
        for_bias, for_weight = sums.clone()  # this rank's: the engine sums them with the other gradients
        dist.all_reduce(sums)
        scale = inverse if weight is None else inverse * weight.to(wide.dtype)
        for_x = gradient
        if ctx.counts:  # a stand-in did not enter the statistics
            for_x = for_x - (sums[0].view(shape) + normal * sums[1].view(shape)) / total
        for_x = (for_x * scale.view(shape)).to(x.dtype)
        return (
            for_x,
            None if weight is None else for_weight.to(weight.dtype),
            for_bias if ctx.has_bias else None,
            None,
            None,
        )


def _gather(tensor: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


def convert_sync_batchnorm(model: nn.Module, loader: Any = None) -> nn.Module:
    """Turn every batch norm of ``model`` into a `SyncBatchNorm`, in place.

    Parameters and buffers stay the same objects, so an optimizer that holds them goes on; so does the model,
    unless it is a batch norm itself::

        >>> from torch import nn
        >>> model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> type(model[1]).__name__
        'SyncBatchNorm'

    Before the model is wrapped; ``parallelize(..., sync_batch_norm=True)`` does it.

    Args:
        model: With batch norms of any number of dimensions; torch's SyncBatchNorm is converted as well.
        loader: The training loader, whose stand-in batches then count for nothing.

    Returns:
        The model, or what it was turned into.

    Raises:
        ValueError: ``model`` is no module, or ``loader`` does not tell how many samples a rank has.
    """
    require_module("model", model)
    if loader is not None and not (hasattr(loader, "training") and hasattr(loader, "local_count")):
        raise ValueError(
            f"loader={short(loader)} does not tell how many samples a batch has here.\n"
            "Fix: the ShardLoader of the training data, or leave it out"
        )
    return _replace_all(model, lambda module: _synchronised(module, loader), {})


def _synchronised(module: nn.Module, loader: Any) -> nn.Module:
    if isinstance(module, SyncBatchNorm):
        module.counts = _Counts(loader) if loader is not None else module.counts
        return module
    if not _is_batch_norm(module):
        return module
    converted = SyncBatchNorm.__new__(SyncBatchNorm)
    converted.__dict__.update(module.__dict__)
    converted.counts = _Counts(loader)
    converted.origin = cast("type[_BatchNorm]", type(module))
    return converted


def _replace_all(
    module: nn.Module, replacement: Callable[[nn.Module], nn.Module], done: dict[int, nn.Module]
) -> nn.Module:
    """``module`` with every module in it replaced, in place; one that stands under two names by one and the same."""
    if id(module) not in done:
        done[id(module)] = module  # while its children are gone through: a circle ends here
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _replace_all(child, replacement, done)
        done[id(module)] = replacement(module)
    return done[id(module)]


def revert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Turn every synchronised batch norm of ``model``, ours or torch's, back into a plain one, in place.

    For export, and for a model that is used without a process group. Parameters and running statistics stay the same
    objects; outputs in evaluation are equal::

        >>> from torch import nn
        >>> model = revert_sync_batchnorm(convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(8))))
        >>> type(model[0]).__name__
        'BatchNorm2d'

    torch's does not keep the number of dimensions that it was made for; it becomes a batch norm that takes any.

    Returns:
        The model, or what it was turned into.

    Raises:
        ValueError: ``model`` is no module.
    """
    require_module("model", model)
    return _replace_all(model, _plain, {})


def _plain(module: nn.Module) -> nn.Module:
    if not isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm)):
        return module
    origin = module.origin if isinstance(module, SyncBatchNorm) else None
    kind: Any = PlainBatchNorm if origin is None or issubclass(origin, nn.SyncBatchNorm) else origin
    plain = kind.__new__(kind)
    plain.__dict__.update(module.__dict__)
    for name in ("counts", "origin", "process_group"):
        plain.__dict__.pop(name, None)
    return cast("nn.Module", plain)


class PlainBatchNorm(_BatchNorm):
    """Batch norm of one process over inputs of any number of dimensions, at least 2."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (samples, channels), got {input.dim()}")


def has_sync_batch_norm(model: nn.Module) -> bool:
    """Whether gradients cross ranks inside the model's backward."""
    return any(isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm)) for module in model.modules())


def _is_batch_norm(module: nn.Module) -> bool:
    lazy = isinstance(module, nn.modules.lazy.LazyModuleMixin)
    return isinstance(module, _BatchNorm) and not lazy
