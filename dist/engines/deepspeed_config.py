"""DeepSpeed's configuration: the user's, with what is ours put in."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from phalanx.dist.engines.precision import Precision

logger = logging.getLogger(__name__)

ZERO_STAGES = (0, 1, 2, 3)
# Accumulation is the engine's: DeepSpeed sees one micro batch of one sample a step.
_OURS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_config(config: Mapping[str, Any] | str | Path | None, zero_stage: int | None) -> dict[str, Any]:
    """The user's configuration, from a file or a mapping, with the stage in it; a copy.

    Values of ``"auto"`` (which Hugging Face's Trainer fills in) count as left out.

    >>> read_config({"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}, None)
    {'zero_optimization': {'stage': 2}}
    >>> read_config(None, 3)
    {'zero_optimization': {'stage': 3}}

    Raises:
        ValueError: The file is not there or no JSON, the stage is none, or the two name different stages, or it has a
            scheduler.
    """
    if zero_stage is not None and (isinstance(zero_stage, bool) or zero_stage not in ZERO_STAGES):
        raise ValueError(f"zero_stage={zero_stage!r}: ZeRO has the stages 0, 1, 2 and 3")
    found = {} if config is None else _load(config)
    found = cast("dict[str, Any]", _without_auto(found))
    zero = found.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(f'config: "zero_optimization" is {zero!r}, not a section.\nFix: {{"stage": 2}}')
    if zero_stage is not None and zero.setdefault("stage", zero_stage) != zero_stage:
        raise ValueError(
            f"zero_stage={zero_stage}, but the config says stage {zero['stage']}.\nFix: say it in one of the two"
        )
    if "stage" not in zero:
        if zero:
            raise ValueError(
                'config: "zero_optimization" has no "stage", and DeepSpeed would leave ZeRO off.\nFix: zero_stage=1, 2 or 3'
            )
        zero["stage"] = 0 if config is not None else 1
    if "scheduler" in found:
        raise ValueError(
            'config: "scheduler" would be stepped by DeepSpeed, and checkpoints would not know it.\n'
            "Fix: take it out, and make a torch scheduler on the optimizer"
        )
    return found


def precision_of(config: Mapping[str, Any], precision: Precision) -> Precision:
    """What the argument and the config together ask for.

    Raises:
        ValueError: They contradict each other.
    """
    said = [name for name in ("bf16", "fp16") if _enabled(config.get(name))]
    if len(said) > 1:
        raise ValueError("config: both bf16 and fp16 are enabled.\nFix: one of them")
    if not said:
        return precision
    if precision not in ("fp32", said[0]):
        raise ValueError(
            f"precision={precision!r}, but the config enables {said[0]}.\nFix: say it in one of the two"
        )
    return cast("Precision", said[0])


def clip_norm(config: Mapping[str, Any], max_grad_norm: float | None) -> float | None:
    """The norm to clip to, from the argument or the config; None for no clipping.

    Raises:
        ValueError: They contradict each other.
    """
    said = float(config.get("gradient_clipping") or 0.0)
    if said and max_grad_norm is not None and said != max_grad_norm:
        raise ValueError(
            f"max_grad_norm={max_grad_norm}, but the config says gradient_clipping={said}.\nFix: say it in one of the two"
        )
    return max_grad_norm if max_grad_norm is not None else said or None


def make_config(
    asked: Mapping[str, Any], *, world_size: int, precision: Precision, max_grad_norm: float | None
) -> dict[str, Any]:
    """What DeepSpeed is given: the user's configuration, with batch sizes, precision and clipping put in.

    >>> make_config({"zero_optimization": {"stage": 1}}, world_size=2, precision="fp32", max_grad_norm=None)[
    ...     "gradient_clipping"]
    0.0

    Raises:
        ValueError: 16-bit weights without ZeRO, which DeepSpeed would train without fp32 masters.
    """
    if precision != "fp32" and asked.get("zero_optimization", {}).get("stage", 0) == 0:
        raise ValueError(
            f"precision={precision!r} with zero_stage=0: DeepSpeed would keep no fp32 weights, and small updates would be lost.\n"
            "Fix: zero_stage=1, or strategy='ddp'"
        )
    config = dict(asked)
    told = {name: config[name] for name in _OURS if name in config}
    if told:
        logger.info(
            "parallelize: %s of the DeepSpeed config: the loader and the engine decide on these", told
        )
    config.update(
        train_batch_size=world_size,
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=1,
        gradient_clipping=max_grad_norm or 0.0,  # left out, it would be 1.0 with ZeRO
    )
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    if precision != "fp32":
        config[precision] = {**config.get(precision, {}), "enabled": True}
    if precision == "bf16":  # sums of 8 bits of mantissa lose micro batches
        config["data_types"] = {"grad_accum_dtype": "fp32", **config.get("data_types", {})}
    return config


def _load(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"config={str(config)!r}: {error.strerror}.\nFix: the path of a JSON file, or a dict"
        ) from None
    except ValueError as error:
        raise ValueError(f"config={str(config)!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"config={str(config)!r} holds a {type(found).__name__}, not a JSON object")
    return found


def _without_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_auto(item) for key, item in value.items() if item != "auto"}
    return value


def _enabled(section: object) -> bool:
    return isinstance(section, Mapping) and bool(section.get("enabled"))
