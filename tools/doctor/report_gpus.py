"""GPUs behind a label: names, capabilities, modes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from phalanx.tools.doctor.draft import Draft
from phalanx.tools.doctor.quantities import truth
from phalanx.tools.doctor.report_values import items, known, version_text


def gpus(draft: Draft, value: Any) -> None:
    """Names of GPUs: a list, "GPU 0: A100", "8x A100", "no"."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and not value:
        draft.no_gpus = True
        return
    if isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _gpu_item(draft, position, item)
        return
    text = known(value)
    if text is None:
        return
    for part in (text,) if is_gpu_line(text) else items(text):
        _gpu_part(draft, part)


def _gpu_item(draft: Draft, position: int, item: Any) -> None:
    if isinstance(item, Mapping):
        values = {key: item.get(key) for key in ("name", "uuid", "problem")}
        values["capability"] = version_text(item.get("compute_capability") or item.get("capability"))
        draft.gpu(position, **values)
    else:
        gpu_name(draft, position, str(item))


_GPU_LINE = re.compile(
    r"^\W{0,4}(?:GPU|CUDA|Device)[ :]?(\d{1,2}(?:, ?\d{1,2}){0,63})\s?[:=]\s?(\S.{0,120})$", re.I
)


_COUNTED = re.compile(r"^\(?(\d{1,2})\s?(?:x|\*|×)\s{0,2}(\S.{1,80})$", re.I)


_TIMES = re.compile(r"^(\S.{1,80}?)\s?(?:x|\*|×)\s?(\d{1,2})$")


_NAMES_GPU = re.compile(
    r"nvidia|geforce|tesla|quadro|titan|[rg]tx|\b(?:[abhlvkpmt]\d{1,3}[a-z]{0,2}|gb?\d{2,3}|gh200)\b|radeon|instinct|mi\d{2,3}|jetson|orin|xavier|gfx|rtx",
    re.I,
)


def _gpu_part(draft: Draft, part: str) -> None:
    part = re.sub(r"^GPU (\d{1,2})[ :]{1,3}(?=[A-Za-z])", r"GPU \1: ", part)
    listed = is_gpu_line(part)
    if listed:
        for index in listed[0]:
            gpu_name(draft, index, listed[1])
        return
    counted, times = _COUNTED.match(part), _TIMES.match(part)
    name, count = (
        (counted[2], int(counted[1])) if counted else (times[1], int(times[2])) if times else (part, 1)
    )
    if _NAMES_GPU.search(name):
        for _ in range(min(count, 64)):
            gpu_name(draft, None, name)


def gpu_name(draft: Draft, index: int | None, name: str) -> None:
    """One GPU by name; what follows in brackets is its UUID."""
    uuid = re.search(r"(?:GPU|MIG)-[0-9a-fA-F-]{8,40}", name)
    gfx = re.search(r"\bgfx[0-9a-f]{3,4}\b", name)
    plain = re.sub(r"\((?:UUID|rev|arch=)[^()]{0,80}\)?", "", name).strip().lstrip("-* ").strip(",").strip()
    arch = re.search(r"arch=(\d{1,2}\.\d)", name)
    draft.gpu(
        index,
        capability=arch[1] if arch else None,
        name=plain[:100],
        uuid=uuid.group() if uuid else None,
        gfx=gfx.group() if gfx else None,
    )


def is_gpu_line(line: str) -> tuple[tuple[int, ...], str] | None:
    """Indices and name of a line "GPU 0: Tesla V100" or "GPU 0,1,2,3: NVIDIA H20"."""
    match = _GPU_LINE.match(line.strip())
    if match is None or re.match(r"^\d+\s?%|^\d+$", match[2]):
        return None
    return tuple(int(number) for number in match[1].split(",")), match[2]


def capability(draft: Draft, value: Any) -> None:
    """ "8.6", "sm_86", [8, 6], or one for each GPU: "3.7 / 3.5 / 3.5"."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(part, int) for part in value):
        found = [f"{value[0]}.{value[1]}"]
    else:
        text = " ".join(str(item) for item in value) if isinstance(value, (list, tuple)) else str(value)
        found = re.findall(r"\b\d{1,2}\.\d\b", text) or [
            f"{part[:-1]}.{part[-1]}" for part in re.findall(r"\bsm_?(\d{2,3})\b", text)
        ]
    if not found:
        gpu_arch(draft, value)
        return
    count = max(len(draft.gpus), len(found))
    for position in range(count):
        draft.gpu(position, capability=found[min(position, len(found) - 1)])


def gpu_arch(draft: Draft, value: Any) -> None:
    """An AMD target, or a CUDA architecture under the same name."""
    text = str(value)
    gfx = re.findall(r"\bgfx[0-9a-f]{3,4}\b", text)
    for position, name in enumerate(gfx):
        draft.gpu(position, gfx=name)
    if not gfx and re.search(r"\b\d{1,2}\.\d\b|sm_?\d{2,3}", text):
        capability(draft, value)


def compute_mode(draft: Draft, value: Any) -> None:
    """Default, Exclusive_Process, Prohibited."""
    words = str(value).lower()
    mode = next(
        (
            mode
            for mode in ("exclusive", "prohibited", "default")
            if mode in words or (mode == "exclusive" and "e. p" in words)
        ),
        None,
    )
    for position in range(max(len(draft.gpus), 1)) if mode else ():
        draft.gpu(position, compute_mode=mode)


def mig(draft: Draft, value: Any) -> None:
    """MIG mode of all GPUs."""
    on = truth(value)
    for position in range(max(len(draft.gpus), 1)) if on is not None else ():
        draft.gpu(position, mig_enabled=on)


def persistence(draft: Draft, value: Any) -> None:
    """Persistence mode of all GPUs."""
    on = truth(value)
    for position in range(len(draft.gpus)) if on is not None else ():
        draft.gpu(position, persistence=on)


def fabric_state(draft: Draft, value: Any) -> None:
    """NVML's fabric state."""
    text = known(value)
    for position in range(max(len(draft.gpus), 1)) if text else ():
        draft.gpu(position, fabric_state=text)
