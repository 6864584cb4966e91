"""Decisions between sibling causes: functions of a hit and of everything else that the log told."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from phalanx.tools.explain import timeouts
from phalanx.tools.explain.events import Hit, Traceback
from phalanx.tools.explain.memory_words import in_words, memory_of
from phalanx.tools.explain.rule import Kind
from phalanx.tools.explain.scanning import Scan
from phalanx.tools.explain.state_dicts import keys_in, prefix_between


@dataclass(frozen=True, kw_only=True)
class Refined:
    """One diagnosis that a hit stands for; ``kind`` is set where it differs from the rule's."""

    id: str
    groups: Mapping[str, str] = field(default_factory=dict)
    kind: Kind | None = None


Refinement = Callable[[Hit, Scan], list[Refined]]


def _same(
    hit: Hit, id: str | None = None, kind: Kind | None = None, words: Mapping[str, str] | None = None
) -> Refined:
    return Refined(id=id or hit.rule_id, groups={**hit.groups, **(words or {})}, kind=kind)


def _frames_text(traceback: Traceback | None) -> str:
    if traceback is None:
        return ""
    return "\n".join(f"{frame.file} {frame.function} {frame.code}" for frame in traceback.frames)


def gpu_memory(hit: Hit, scan: Scan) -> list[Refined]:
    text = hit.line.text
    if hit.traceback is not None and len(hit.traceback.text) > len(text):
        text = hit.traceback.text
    memory = memory_of(text)
    words = {"memory": memory.words} if memory.words else {}
    rank = hit.line.rank
    frames = _frames_text(hit.traceback)
    loads = re.search(
        r"torch/serialization|restore_location|torch\.load\(|_cuda_deserialize|default_restore_location",
        frames,
    )
    if loads and (memory.gpu in (0, None)) and (rank not in (0, None) or scan.facts.is_distributed):
        return [_same(hit, "checkpoint-loaded-on-gpu0", words=words), _same(hit, memory.kind, words=words)]
    return [_same(hit, memory.kind, words=words)]


def killed(hit: Hit, scan: Scan) -> list[Refined]:
    if scan.facts.has("no-oom-sign") and "killed by the kernel" not in hit.line.text:
        return [_same(hit, "killed-from-outside", "symptom")]
    words = {}
    if hit.groups.get("rss_kb", "").isdigit():
        words["rss_gib"] = in_words(int(hit.groups["rss_kb"]) * 1024)
    return [_same(hit, words=words)]


def xid(hit: Hit, scan: Scan) -> list[Refined]:
    code = hit.groups.get("xid", "")
    if not code.isdigit():
        return [_same(hit)]
    from phalanx.tools.facts.tables import xid as xid_facts

    known = xid_facts(int(code)) or {}
    return [_same(hit, words={"xid_name": str(known.get("title", "see NVIDIA's list"))})]


def inplace(hit: Hit, scan: Scan) -> list[Refined]:
    tensor = hit.groups.get("tensor", "")
    shape = re.search(r"\[([\d, ]*)\]", tensor)
    is_buffer = "Long" in tensor or (shape is not None and ("," not in shape[1] or shape[1].startswith("1,")))
    buffer, own = _same(hit, "ddp-inplace-buffer"), _same(hit, "inplace-operation")
    if scan.facts.is_distributed:
        return [buffer, own] if is_buffer or not tensor else [own, buffer]
    return [own]


def loss_without_grad(hit: Hit, scan: Scan) -> list[Refined]:
    if "checkpoint" in _frames_text(hit.traceback):
        return [_same(hit, "checkpointing-without-input-grads", "cause")]
    return [_same(hit)]


_ASSERTIONS = frozenset({"label-out-of-range", "index-out-of-bounds", "bce-input-out-of-range"})
_LABELS = re.compile(
    r"cross_entropy|nll_loss|criterion|loss_f|one_hot|num_classes|Loss\(|labels?\b", re.IGNORECASE
)
_TABLES = re.compile(r"embedding|index_select|gather|position_ids|input_ids|scatter|wte|token", re.IGNORECASE)


def device_assert(hit: Hit, scan: Scan) -> list[Refined]:
    if any(other.rule_id in _ASSERTIONS for other in scan.hits):
        return []  # the assertion itself is there
    frames = "\n".join(_frames_text(traceback) for traceback in scan.tracebacks[:50])
    label, index = _same(hit, "label-out-of-range"), _same(hit, "index-out-of-bounds")
    if _LABELS.search(frames) and not _TABLES.search(frames):
        return [label, index]
    return [index, label]


def loss_scale(hit: Hit, scan: Scan) -> list[Refined]:
    try:
        scale = float(hit.groups.get("scale", "0"))
    except ValueError:
        scale = 1.0
    hits = [other for other in scan.hits if other.rule_id == hit.rule_id]
    if "minimum" in hit.line.text.lower() or re.search(
        r"scale: ([\d.]{1,12}), reducing to \1(?![\d.])", hit.line.text
    ):
        return [_same(hit, kind="cause")]
    lowest = min((_number(other.groups.get("scale")) for other in hits), default=scale)
    if lowest < 1e-2 or (lowest <= 1 and len(hits) >= 5):
        return [Refined(id=hit.rule_id, groups={"scale": f"{lowest:g}"}, kind="cause")]
    return []


def _number(text: str | None) -> float:
    try:
        return float(text or "1")
    except ValueError:
        return 1.0


def state_dict_keys(hit: Hit, scan: Scan) -> list[Refined]:
    missing: list[str] = []
    unexpected: list[str] = []
    for other in scan.hits:
        near = other.line.stream == hit.line.stream and abs(other.line.order - hit.line.order) <= 12
        if other.rule_id == hit.rule_id and near:
            missing += keys_in(other.groups.get("missing", ""))
            unexpected += keys_in(other.groups.get("unexpected", ""))
    prefix = prefix_between(missing, unexpected)
    if prefix is not None:
        return [_same(hit, words={"prefix": prefix})]
    words = {}
    if missing:
        words["missing_one"] = missing[0]
    if unexpected:
        words["unexpected_one"] = unexpected[0]
    return [_same(hit, "state-dict-keys", words=words)]


_LOADING = re.compile(
    r"torch/serialization|_weights_only_unpickler|torch\.load|pickle\.load|load_checkpoint|np\.load"
)


def damaged(hit: Hit, scan: Scan) -> list[Refined]:
    if "bare" in hit.groups and not _LOADING.search(_frames_text(hit.traceback)):
        return []  # an EOFError of something else
    return [_same(hit)]


#: Bytes that pickles are made of; a file with another one where an instruction should be is no pickle.
_INSTRUCTIONS = frozenset(b"().012BCFGIJKLMNPQRSTUVX]abcdeghijlopqrstu}") | frozenset(range(128, 153))


def weights_only(hit: Hit, scan: Scan) -> list[Refined]:
    for line, groups in scan.facts.of("operand"):
        near = line.source == hit.line.source and abs(line.order - hit.line.order) < 40
        if near and int(groups["code"]) not in _INSTRUCTIONS:
            return [_same(hit, "checkpoint-corrupted", words={"key": chr(int(groups["code"]))})]
    return [_same(hit)]


def timeout(hit: Hit, scan: Scan) -> list[Refined]:
    hits = [other for other in scan.hits if other.rule_id == hit.rule_id]
    tracebacks = [t for t in scan.tracebacks if not t.is_harmless]
    ids, words = timeouts.judge(hits, scan.facts, tracebacks, scan.context)
    return [_same(hit, id, words=words) for id in ids]


def port(hit: Hit, scan: Scan) -> list[Refined]:
    found = [
        other.groups["port"] for other in scan.hits if other.rule_id == hit.rule_id and "port" in other.groups
    ]
    result = [_same(hit, words={"port": found[0]} if found else {})]
    banners = scan.facts.of("launcher-banner")
    if scan.facts.has("slurm") and len(banners) > 1:
        result.insert(0, _same(hit, "launcher-started-many-times"))
    return result


def duplicate_rank(hit: Hit, scan: Scan) -> list[Refined]:
    others = [_same(hit, "launcher-started-many-times")] if scan.facts.has("slurm") else []
    if "same rank" in hit.line.text:
        others.insert(0, _same(hit, "every-process-is-rank0", words={"count": "several"}))
    return [_same(hit), *others] if not others else [*others[:1], _same(hit), *others[1:]]


def many_launchers(hit: Hit, scan: Scan) -> list[Refined]:
    return [_same(hit)]


def no_host(hit: Hit, scan: Scan) -> list[Refined]:
    if any(other.rule_id == "peer-lost" and other.line.order < hit.line.order for other in scan.hits):
        return []  # refused because the host went away
    return [_same(hit)]


def loopback(hit: Hit, scan: Scan) -> list[Refined]:
    return [_same(hit)] if "127.0.1.1" in hit.line.text or "loopback" in hit.line.text.lower() else []


_STALE = re.compile(r"refused|timed out|timeout|connectFullMesh|Connection", re.IGNORECASE)


def stale_file(hit: Hit, scan: Scan) -> list[Refined]:
    frames = [
        t
        for t in scan.tracebacks
        if "rendezvous" in _frames_text(t) or "init_process_group" in _frames_text(t)
    ]
    network = {
        "rendezvous-timeout",
        "rendezvous-no-host",
        "nccl-network-unreachable",
        "peer-lost",
        "nccl-timeout-unknown",
    }
    failed = any(_STALE.search(t.text) for t in frames) or any(
        other.rule_id in network for other in scan.hits
    )
    return [_same(hit, kind="symptom")] if failed else []


_SM = re.compile(r"sm_(\d{2,3})")


def architecture(hit: Hit, scan: Scan) -> list[Refined]:
    own = [other.groups["sm"] for other in scan.hits if other.rule_id == hit.rule_id and "sm" in other.groups]
    names = [
        other.groups["gpu"].strip()
        for other in scan.hits
        if other.rule_id == hit.rule_id and "gpu" in other.groups
    ]
    lists = [
        _SM.findall(other.groups["archs"])
        for other in scan.hits
        if other.rule_id == hit.rule_id and "archs" in other.groups
    ]
    words = {**({"sm": own[0]} if own else {}), **({"gpu": names[0]} if names else {})}
    if own and lists and lists[0] and int(own[0]) < min(map(int, lists[0])):
        words["capability"] = f"{own[0][:-1]}.{own[0][-1]}"
        return [_same(hit, "gpu-too-old-for-build", words=words)]
    is_fatal = "no kernel image" in hit.line.text.lower() or "BINARY" in hit.line.text
    return [_same(hit, None, None if is_fatal else "warning", words=words)]


def driver(hit: Hit, scan: Scan) -> list[Refined]:
    found = hit.groups.get("found", "")
    if found.isdigit() and int(found) >= 1000:
        return [_same(hit, words={"found_cuda": f"{int(found) // 1000}.{int(found) % 1000 // 10}"})]
    return [_same(hit)]


def cpu_torch(hit: Hit, scan: Scan) -> list[Refined]:
    return [_same(hit, "jetson-wrong-wheel" if scan.facts.has("jetson") else None)]


_SENSIBLE = re.compile(r"^(?:\d{1,2})(?:,\d{1,2})*$|^(?:GPU|MIG)-|^all$")


def no_gpu(hit: Hit, scan: Scan) -> list[Refined]:
    values = [groups.get("value", "") for _, groups in scan.facts.of("visible-devices")]
    if values:
        value = values[-1]
        odd = not _SENSIBLE.match(value)
        named = _same(hit, "cuda-visible-devices-invalid", words={"value": value or "''"})
        return [named, _same(hit)] if odd or value else [_same(hit), named]
    return [_same(hit)]


def numpy(hit: Hit, scan: Scan) -> list[Refined]:
    return [_same(hit, kind="cause" if "is not available" in hit.line.text else "warning")]


def deepspeed_op(hit: Hit, scan: Scan) -> list[Refined]:
    op = hit.groups.get("op", "")
    return [
        _same(
            hit, words={"op": op if "adam" not in hit.line.text or "_" in op or "adam" in op else f"cpu_{op}"}
        )
    ]


def device_or_dtype(hit: Hit, scan: Scan) -> list[Refined]:
    one, other = hit.groups.get("one", ""), hit.groups.get("other", "")
    both_types = one.endswith("Tensor") and other.endswith("Tensor")
    if both_types and ("cuda" in one) == ("cuda" in other):
        return [_same(hit, "dtype-mismatch")]
    return [_same(hit)]


@lru_cache(maxsize=1)
def refinements() -> dict[str, Refinement]:
    """By the names that rules use."""
    functions: tuple[Refinement, ...] = (
        gpu_memory, killed, xid, inplace, loss_without_grad, device_assert, loss_scale, state_dict_keys, timeout, port,
        damaged,
        weights_only,
        many_launchers, duplicate_rank, no_host, loopback, stale_file, architecture, driver, cpu_torch, no_gpu, numpy, deepspeed_op,
        device_or_dtype,
    )  # fmt: skip
    return {function.__name__: function for function in functions}
