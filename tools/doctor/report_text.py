"""Facts out of a pasted report: whatever mix of tools' output, tracebacks and prose it is."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from phalanx.tools.doctor.draft import Draft
from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.facts_json import to_json
from phalanx.tools.doctor.report_clean import LONGEST_TEXT, clean_lines
from phalanx.tools.doctor.report_environments import without_working_ones
from phalanx.tools.doctor.report_gpus import gpu_name, is_gpu_line
from phalanx.tools.doctor.report_labels import LABELS, PLAIN_LABELS, key_of, read_value, split_label
from phalanx.tools.doctor.report_loose import is_own, own_facts, parse_object, read_object
from phalanx.tools.doctor.report_prose import gpu_in_prose, read_prose
from phalanx.tools.doctor.report_query import QueryReader
from phalanx.tools.doctor.report_tables import read_table_line
from phalanx.tools.doctor.symptoms import matters

MOST_MESSAGES = 400
MOST_EXAMINED = 2_000  # distinct lines of a long text, at either end
_NUMBERS = re.compile(r"[0-9]+")
_SEVERAL = re.compile(r" and | in |~/")  # a value that is told rather than printed
# What a report should hold so that the common causes can be told: the name shown, and the facts behind it.
WANTED = (
    ("torch version", ("torch.version",)),
    ("CUDA of the torch build", ("torch.cuda", "torch.hip")),
    ("whether CUDA is available", ("torch.cuda_available",)),
    ("torchvision version", ("torchvision.version",)),
    ("Python version", ("python.version",)),
    ("operating system", ("platform.os", "platform.system")),
    ("NVIDIA driver", ("driver.version", "driver.cuda")),
    ("GPUs", ("gpus",)),
    ("CUDA toolkit (nvcc)", ("compilers.nvcc",)),
    ("packages", ("packages",)),
    ("environment variables", ("env",)),
    ("shared memory", ("limits.shm_total_bytes",)),
    ("error messages", ("messages",)),
)


@dataclass(frozen=True)
class ReadReport:
    """Facts that a report gave, and the names of those it gave and lacked."""

    facts: Facts
    found: tuple[str, ...]
    lacked: tuple[str, ...]


def facts_from_text(text: str) -> ReadReport:
    """Read a report: collect_env, `accelerate env`, `ds_report`, nvidia-smi, lists, logs, prose, or JSON.

    Never raises, and takes time linear in the text.

    >>> facts_from_text("PyTorch version: 1.6.0\\nCUDA used to build PyTorch: 10.2").facts.torch.cuda
    '10.2'
    """
    data = parse_object(text) if len(text) <= LONGEST_TEXT else None
    if data is not None and is_own(data):
        facts = own_facts(data)
        return _report(replace(facts, live=False))
    draft = Draft()
    if data is not None:
        read_object(draft, data)
    else:
        _read_lines(draft, without_working_ones(clean_lines(text)))
    return _report(draft.facts())


def _read_lines(draft: Draft, lines: list[str]) -> None:
    words: list[str] = []
    in_gpus = False
    query = QueryReader()
    for position, line in enumerate(lines):
        if query.read(draft, line):
            continue
        listed = is_gpu_line(line) if "(UUID" not in line else None
        if listed:
            for index in listed[0]:
                gpu_name(draft, index, listed[1])
            continue
        if (
            in_gpus
            and line.strip()
            and not line.lstrip().startswith("MIG ")
            and not split_label(line)
            and len(line) < 80
            and not line.startswith("[")
        ):
            read_value(draft, "gpus", re.sub(r"^\s{0,8}GPU (\d{1,2}) ", r"GPU \1: ", line).strip())
            continue
        in_gpus = False
        if read_table_line(draft, line):
            continue
        pair = split_label(line)
        if pair is not None:
            key = key_of(pair[0])
            in_gpus = key == "gpumodelsandconfiguration" or (key in ("gpu", "gpus") and not pair[1])
            read_value(draft, pair[0], pair[1])
            if not in_gpus:
                _on_next_line(draft, pair, lines[position + 1] if position + 1 < len(lines) else "")
        read_prose(draft, line)
        if pair is None or key_of(pair[0]) not in PLAIN_LABELS or _SEVERAL.search(pair[1]):
            words.append(line)
    _interactive(draft, lines)
    if not draft.gpus:
        _gpu_from_prose(draft, words)
    draft.messages.extend(_kept(words))


def _on_next_line(draft: Draft, pair: tuple[str, str], following: str) -> None:
    """A label without a value has it on the next line, as issue forms do."""
    following = following.strip()
    if not pair[1] and following and split_label(following) is None and len(following) < 60:
        read_value(draft, pair[0], following.strip("'\"`"))


_ASKED = {
    "torch.__version__": "torchversion",
    "torch.version.cuda": "torchcuda",
    "torch.cuda.is_available()": "cudaavailable",
    "torch.cuda.get_arch_list()": "torcharchlist",
    "torch.cuda.nccl.version()": "nccl",
    "torch.backends.cudnn.version()": "cudnnfound",
    "torch.cuda.get_device_name(0)": "gpuname",
    "torch.cuda.get_device_name()": "gpuname",
    "torch.cuda.get_device_capability()": "computecapability",
    "torchvision.__version__": "torchvisionversion",
    "numpy.__version__": "numpyversion",
    "np.__version__": "numpyversion",
}


def _interactive(draft: Draft, lines: list[str]) -> None:
    """An interpreter session: a question, its answer on the next line (or after an arrow or a colon)."""
    for position, line in enumerate(lines):
        question = line.strip().removeprefix(">>>").strip().removeprefix("print(").strip()
        name = next((name for name in _ASKED if question.startswith(name)), None)
        if name is None:
            continue
        rest = question[len(name) :].lstrip(") ").lstrip("=:->#").strip().strip("'\"`")
        answer = rest or (lines[position + 1].strip().strip("'\"`") if position + 1 < len(lines) else "")
        label = _ASKED[name]
        if label in LABELS and (answer or rest == ""):
            read_value(draft, label, None if answer in ("", "None") and label == "torchcuda" else answer)
        elif label == "numpyversion" and answer[:1].isdigit():
            draft.package("numpy", answer)


def _gpu_from_prose(draft: Draft, words: list[str]) -> None:
    name = gpu_in_prose(words[:2_000])
    if name is not None:
        draft.gpu(None, name=name)


def _kept(words: list[str]) -> list[str]:
    """The lines that checks draw on; of a long text those that show a symptom, and the beginning.

    Lines that differ in their numbers alone, of which logs are made, count once.
    """
    if len(words) <= MOST_MESSAGES:
        return words
    shapes: dict[str, str] = {}
    for line in words:
        shapes.setdefault(_NUMBERS.sub("0", line), line)
    distinct = list(shapes.values())
    if len(distinct) > 2 * MOST_EXAMINED:
        distinct = [*distinct[:MOST_EXAMINED], *distinct[-MOST_EXAMINED:]]
    telling = [line for line in distinct if matters(line)]
    return [
        *words[: MOST_MESSAGES // 2],
        *telling[: MOST_MESSAGES // 2],
        *telling[MOST_MESSAGES // 2 :][-MOST_MESSAGES // 2 :],
    ]


def _report(facts: Facts) -> ReadReport:
    known = to_json(facts)
    paths = {
        f"{group}.{name}" for group, values in known.items() if isinstance(values, dict) for name in values
    }
    paths |= set(known)
    found = tuple(name for name, needed in WANTED if paths & set(needed))
    lacked = tuple(name for name, needed in WANTED if not paths & set(needed))
    return ReadReport(facts, found, lacked)
