"""What is fitted: a torchvision model by name, or what a function in a script returns. Runs in the child alone."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.tools.fit.building import SmallValues
from phalanx.tools.usage import nearest

_CLASSES = 1000
_VIDEO_FRAMES = 16


class TargetProblem(ValueError):
    """The model cannot be had or run; the message says why and what to do.

    Attributes:
        typed: What was typed is wrong, rather than the model.
    """

    def __init__(self, message: str, typed: bool = False) -> None:
        super().__init__(message)
        self.typed = typed


@dataclass
class Target:
    """A model, an example batch, and a way to the loss.

    Attributes:
        model: In training mode.
        batch: Tensors in tuples, lists or dicts.
        batch_size: Samples in it.
        loss: From the batch to the loss.
        resizable: Whether the batch can be made of another size.
    """

    model: nn.Module
    batch: Any
    batch_size: int
    loss: Callable[[Any], Tensor]
    resizable: bool = True

    def resized(self, size: int) -> Any:
        """The batch with another number of samples.

        Raises:
            TargetProblem: Its tensors do not show which side that is.
        """
        if size == self.batch_size:
            return self.batch
        if not self.resizable:
            raise TargetProblem(
                "The example batch's size cannot be changed: its tensors have no common first side.\nFix: return a batch of the wanted size"
            )

        def change(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == self.batch_size:
                made = value.new_empty((size, *value.shape[1:]))
                return made.requires_grad_(value.requires_grad)
            return value

        return tree_map(change, self.batch)


def load_target(name: str, micro_batch_size: int | None, image_size: int | None) -> Target:
    """The target of a command line; call it where tensors are fake.

    Raises:
        TargetProblem: There is no such model, or the script does not give one.
    """
    path, colon, function = name.rpartition(":")
    with SmallValues():
        if colon:
            return _from_script(Path(path), function)
        return _from_torchvision(name, micro_batch_size or 32, image_size)


def _from_torchvision(name: str, batch_size: int, image_size: int | None) -> Target:
    try:
        from torchvision import models
    except ImportError as error:
        raise TargetProblem(
            f"{name}: torchvision is not installed ({error}).\nFix: pip install torchvision, or script.py:function"
        ) from None
    known = models.list_models()
    if name not in known:
        near = nearest(name, known) or ["resnet50"]
        raise TargetProblem(
            f"torchvision has no model {name!r}.\nFix: {' or '.join(near)}; or script.py:function, which returns (model, batch, loss)",
            typed=True,
        )
    builder = models.get_model_builder(name)
    kind = builder.__module__.removeprefix("torchvision.models").strip(".").partition(".")[0]
    if kind in ("quantization", "detection"):
        why = (
            "quantized models are not trained"
            if kind == "quantization"
            else "its memory depends on what is in the pictures"
        )
        raise TargetProblem(
            f"{name}: {why}.\nFix: the model it is made from, or script.py:function with a function of your own",
            typed=True,
        )
    takes = inspect.signature(builder).parameters
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in takes:
        options["weights_backbone"] = None
    if "aux_logits" in takes and kind == "":
        options["aux_logits"] = True
    side = image_size or _native_size(builder, name)
    if name.startswith("vit_"):
        options["image_size"] = side
    try:
        model = models.get_model(name, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise TargetProblem(f"{name}: {error}.\nFix: another --image-size", typed=True) from None
    return _with_batch(model, kind, batch_size, side)


def _native_size(builder: Any, name: str) -> int:
    """The side of the pictures that the model was published for."""
    from torchvision import models

    try:
        weights = models.get_model_weights(name)
        crop = weights.DEFAULT.transforms().crop_size
        return int(crop[0] if isinstance(crop, list | tuple) else crop)
    except (AttributeError, ValueError, TypeError, IndexError):
        return 520 if "segmentation" in builder.__module__ else 224


def _with_batch(model: nn.Module, kind: str, batch_size: int, side: int) -> Target:
    labels = torch.zeros(batch_size, dtype=torch.long)
    if kind == "optical_flow":
        frames = torch.zeros(batch_size, 3, side, side)
        flows = torch.zeros(batch_size, 2, side, side)
        return Target(
            model.train(), (frames, frames.clone(), flows), batch_size, lambda b: _flow_loss(model, b)
        )
    if kind == "segmentation":
        images = torch.zeros(batch_size, 3, side, side)
        masks = torch.zeros(batch_size, side, side, dtype=torch.long)
        return Target(model.train(), (images, masks), batch_size, lambda b: _entropy(model(b[0]), b[1]))
    if kind == "video":
        clips = torch.zeros(batch_size, 3, _VIDEO_FRAMES, side, side)
        return Target(model.train(), (clips, labels), batch_size, lambda b: _entropy(model(b[0]), b[1]))
    images = torch.zeros(batch_size, 3, side, side)
    return Target(model.train(), (images, labels), batch_size, lambda b: _entropy(model(b[0]), b[1]))


def _flow_loss(model: nn.Module, batch: Any) -> Tensor:
    first, second, flows = batch
    losses = [(found - flows).abs().mean() for found in model(first, second)]
    return torch.stack(losses).sum()


def _entropy(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of every head that the model has, the auxiliary ones at 0.4 as the recipes do."""
    if isinstance(output, Tensor):
        return functional.cross_entropy(output, target)
    heads = list(output.values()) if isinstance(output, Mapping) else list(output)
    losses = [functional.cross_entropy(head, target) for head in heads if isinstance(head, Tensor)]
    return losses[0] + sum((0.4 * loss for loss in losses[1:]), losses[0].new_zeros(()))


def _from_script(path: Path, function: str) -> Target:
    module = _imported(path)
    made = getattr(module, function, None)
    if not callable(made):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        near = nearest(function, names, count=1) or names[:1]
        hint = f"{path}:{near[0]}" if near else f"def {function}(): return model, batch, loss"
        raise TargetProblem(f"{path} has no function {function!r}.\nFix: {hint}", typed=True)
    try:
        returned = made()
    except (Exception, SystemExit) as error:
        raise TargetProblem(
            f"{path}:{function} failed: {_said(error)}\nFix: it must run without arguments, on the CPU"
        ) from error
    if not isinstance(returned, tuple | list) or len(returned) != 3 or not isinstance(returned[0], nn.Module):
        raise TargetProblem(
            f"{path}:{function} returned {_kind(returned)}; wanted is (model, example batch, loss).\n"
            "Fix: return model, (inputs, targets), torch.nn.functional.cross_entropy"
        )
    model, batch, loss = returned
    size = _batch_size(batch)
    if size is None:
        raise TargetProblem(
            f"{path}:{function}: the example batch holds no tensor with a first side.\nFix: return tensors, the samples first"
        )
    if loss is not None and not callable(loss):
        raise TargetProblem(
            f"{path}:{function}: the loss is a {type(loss).__name__}, not a function.\nFix: a function of (output, target), of (model, batch), or of the output"
        )
    return Target(model.train(), batch, size, lambda b: _loss(model, loss, b))


def _imported(path: Path) -> Any:
    if not path.is_file():
        raise TargetProblem(f"{path}: no such file.\nFix: the path of a Python script")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetProblem(f"{path}: no Python script.\nFix: a file that ends with .py")
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise TargetProblem(
            f"{path} cannot be imported: {_said(error)}\nFix: keep its training under if __name__ == '__main__'"
        ) from error
    return module


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else f"{type(error).__name__}."


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(type(entry).__name__ for entry in value[:5])})"
    return type(value).__name__


def _batch_size(batch: Any) -> int | None:
    """The common first side of the batch's tensors, or that of the first."""
    sides = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return sides[0] if sides else None


def _loss(model: nn.Module, loss: Callable[..., Any] | None, batch: Any) -> Tensor:
    """The loss, however the script's three values go together."""
    found = _combined(model, loss, batch)
    if not isinstance(found, Tensor):
        raise TargetProblem(
            f"The loss is a {type(found).__name__}, not a tensor.\nFix: return a function whose result is the loss"
        )
    return found if found.dim() == 0 else found.mean()


def _combined(model: nn.Module, loss: Callable[..., Any] | None, batch: Any) -> Any:
    if loss is not None and _wants_model(loss):
        return loss(model, batch)
    if isinstance(batch, Mapping):
        output = model(**batch)
        return _own_loss(output) if loss is None else loss(output)
    if isinstance(batch, tuple | list) and len(batch) > 1 and loss is not None:
        *inputs, target = batch
        return loss(model(*inputs), target)
    output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    return _own_loss(output) if loss is None else loss(output)


def _own_loss(output: Any) -> Any:
    """A model that brings its loss: an attribute, an entry, or the output itself."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)


def _wants_model(loss: Callable[..., Any]) -> bool:
    if isinstance(loss, nn.Module):
        return False
    try:
        names = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):
        return False
    return len(names) >= 2 and names[0] in ("model", "module", "net")
