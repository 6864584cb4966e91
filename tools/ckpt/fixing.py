"""`phalanx ckpt fix`: a state dict's keys made those of another, in a new file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from phalanx.dist.key_matches import Match, first_lines, nothing_matched, renamed_metadata, shape_text
from phalanx.dist.key_rewrites import Pairing, sample_names
from phalanx.tools.ckpt.contents import Contents, Entry
from phalanx.tools.ckpt.errors import BadCheckpoint
from phalanx.tools.ckpt.like import Like
from phalanx.tools.ckpt.pickle_machine import PickleProblem
from phalanx.tools.ckpt.pickle_values import Call, Pairs
from phalanx.tools.ckpt.pickle_writing import PickleWriter
from phalanx.tools.ckpt.reading import ValueReader
from phalanx.tools.ckpt.torch_values import attributes_of, mapping_of, module_entries
from phalanx.tools.ckpt.weights import Weights, match_weights, pick
from phalanx.tools.ckpt.writing import (
    TorchWriter,
    add_storage,
    new_file,
    ordered,
    state_dict_root,
    write_safetensors,
)
from phalanx.tools.ckpt.zip_writing import ZipWriter


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What came of it.

    Attributes:
        output: The file written; None when nothing needed to be, or could be.
        match: What was found, as `phalanx.dist.match_state_dict` tells it.
        left_out: Entries of the source that are not in the file (a moving average, the optimizer).
        changed: Whether any key is another one now.
    """

    output: Path | None
    match: Match
    left_out: list[str] = field(default_factory=list)
    changed: bool = True


def fix(
    contents: Contents,
    like: Like,
    output: Path,
    *,
    entry: str | None = None,
    rules: Sequence[tuple[str, str]] = (),
    partial: bool = False,
    keep_other: bool = False,
    force: bool = False,
) -> Fixed:
    """Write `contents` with the keys of `like`.

    The file holds a bare state dict. Where `like` keeps its weights in the same entry, or with `keep_other`, it holds
    everything that the source does, and only the keys within that entry are others.

    Args:
        contents: From `open_checkpoint`.
        like: From `read_like`.
        output: The file to write; its name ends with ``.safetensors`` or one of torch's endings.
        entry: The entry that holds the weights, where it is not the one that fits best.
        rules: ``(regular expression, replacement)`` for keys that were renamed.
        partial: Write what fits, though keys are missing, unexpected or of another shape.
        keep_other: Keep the rest of the file.
        force: Replace `output`.

    Raises:
        BadCheckpoint: The keys do not fit; the message lists what is missing and unexpected.
    """
    weights = pick(contents, like.shapes, entry)
    match, pairing = match_weights(weights, like.shapes, rules)
    entries, match = _with_twins(match, like)
    match = _without_second_names(match, weights)
    _refuse_misfit(contents, weights, match, pairing, like, partial)
    bad = {entry.key for entry in match.state_dict.values() if not entry.readable and entry.count}
    if bad:
        first = next(entry for entry in entries.values() if entry.key in bad)
        raise BadCheckpoint(contents.path, f"{first.key!r} cannot be copied: {first.problem or first.note}.")
    if partial:
        wrong = {mismatch.key for mismatch in match.mismatched}
        entries = {key: found for key, found in entries.items() if key not in wrong}
    module = isinstance(weights.value, Call) and module_entries(weights.value) is not None
    structure = contents.root is not None and not module and (keep_other or _same_form(weights, like))
    with new_file(output, force) as out:
        if output.suffix == ".safetensors":
            write_safetensors(out, entries, _plain_metadata(contents))
            structure = False
        elif structure and weights.container:
            _write_whole(out, contents, weights, match)
        else:
            _write_bare(out, entries, weights, match)
    left_out = (
        [] if structure else [*match.averaged, *match.other_containers, *_other_names(contents, weights)]
    )
    return Fixed(output=output, match=match, left_out=left_out, changed=bool(match.renamed))


def _same_form(weights: Weights, like: Like) -> bool:
    return bool(weights.container) and like.container == weights.container


def _other_names(contents: Contents, weights: Weights) -> list[str]:
    if not isinstance(contents.other, dict) or contents.format == "safetensors":
        return []
    return [name for name in contents.other if name not in (weights.container, "$type")]


def _plain_metadata(contents: Contents) -> dict[str, str]:
    """A safetensors file's own notes, without phalanx's tables, which go by the old names."""
    if contents.format != "safetensors" or not isinstance(contents.other, dict):
        return {}
    return {
        key: value
        for key, value in contents.other.items()
        if key not in ("aliases", "memory_formats", "format")
    }


def _with_twins(match: Match, like: Like) -> tuple[dict[str, Entry], Match]:
    """Names that `like` has for one tensor are all found when one of them is."""
    entries: dict[str, Entry] = {}
    missing = []
    for key in like.shapes:
        found = match.state_dict.get(key)
        for twin in like.twins.get(key, ()):
            found = found or match.state_dict.get(twin)
        if found is None:
            missing.append(key)
        else:
            entries[key] = found
    fields = {**vars(match), "missing": missing, "state_dict": OrderedDict(entries)}
    return entries, Match(**fields)


def _without_second_names(match: Match, weights: Weights) -> Match:
    """A name that is wanted no more, of a tensor that is there under its other name, is nothing unexpected."""
    taken = {(entry.pieces, entry.shape) for entry in match.state_dict.values() if entry.pieces}
    unexpected = []
    for key in match.unexpected:
        entry = weights.entries[key]
        if (entry.pieces, entry.shape) not in taken:
            unexpected.append(key)
    return Match(**{**vars(match), "unexpected": unexpected})


def _refuse_misfit(
    contents: Contents, weights: Weights, match: Match, pairing: Pairing, like: Like, partial: bool
) -> None:
    name = str(contents.path)
    if not match.matched:
        raise BadCheckpoint(
            name,
            _after_name(name, nothing_matched(name, weights.entries, like.shapes, pairing, match.container))
            .replace("The model would have kept its initial values.", "Nothing was written.")
            .replace("rules=[(pattern, new)]", "--rule 'PATTERN=NEW'")
            .replace("the model's", "the wanted")
            .replace("  model:     ", "  wanted:    "),
        )
    problems = []
    if match.mismatched:
        shapes = [
            f"{m.key} {shape_text(m.source_shape)} -> {shape_text(m.target_shape)}" for m in match.mismatched
        ]
        problems.append(f"{len(shapes)} of another shape (file -> wanted): {first_lines(shapes)}")
    if match.missing:
        problems.append(f"{len(match.missing)} missing: {sample_names(match.missing)}")
    if match.unexpected:
        problems.append(f"{len(match.unexpected)} unexpected: {sample_names(match.unexpected)}")
    if problems and not partial:
        lines = [f"{match.matched} of {len(like.shapes)} keys found; nothing was written."]
        lines += [f"  {problem}" for problem in problems]
        lines += [f"  (weights taken from the entry {match.container!r})"] if match.container else []
        lines += (
            [f"Rules that changed no key: {sample_names(match.unused_rules)}"] if match.unused_rules else []
        )
        hint = pairing.hint.replace("pass rules=[", "--rule with [") if pairing.hint and match.missing else ""
        lines += [hint[0].upper() + hint[1:]] if hint else []
        fix = "is this the checkpoint of that model? If it is meant, --partial writes what fits"
        raise BadCheckpoint(name, "\n".join(lines), fix=fix)


def _after_name(name: str, message: str) -> str:
    return message.removeprefix(name).lstrip(": ")


def _write_bare(out: IO[bytes], entries: Mapping[str, Entry], weights: Weights, match: Match) -> None:
    writer = TorchWriter(entries)
    writer.write(out, state_dict_root(writer, entries, _renamed(weights, match)))


def bare_root(writer: TorchWriter, entries: Mapping[str, Entry], weights: Weights) -> Call:
    """The description of a state dict with its own keys and version entries."""
    metadata = _metadata_of(weights.value)
    return state_dict_root(writer, entries, None if metadata is None else ordered(list(metadata.items())))


def _renamed(weights: Weights, match: Match) -> Call | None:
    """The version entries of sub-modules, under their new names."""
    metadata = _metadata_of(weights.value)
    if metadata is None:
        return None
    names = {key: match.renamed.get(key, key) for key in weights.entries if key not in match.unexpected}
    return ordered(list(renamed_metadata(metadata, names).items()))


def _metadata_of(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, Call):
        return None
    for name, found in attributes_of(value):
        if name == "_metadata":
            return {key: entry for key, entry in mapping_of(found) or [] if isinstance(key, str)}
    return None


def _write_whole(out: IO[bytes], contents: Contents, weights: Weights, match: Match) -> None:
    """The same file but for the keys of one dict in it, whatever else it holds."""
    if contents.facts.get("container", contents.format) not in ("torch-zip", "torch-legacy"):
        raise BadCheckpoint(contents.path, f"of the kind {contents.format}: only its weights can be written.")
    target = weights.value
    assert isinstance(target, Call | Pairs)
    before, states, args = target.pairs, getattr(target, "states", []), getattr(target, "args", ())
    dropped = {*match.unexpected, *match.averaged}
    pairs = [
        (match.renamed.get(key, key), value) for key, value in mapping_of(target) or [] if key not in dropped
    ]
    metadata = _renamed(weights, match)
    try:
        target.pairs = pairs
        if isinstance(target, Call):
            target.args = ()
            target.states = states if metadata is None else [Pairs([("_metadata", metadata)])]
        pickled = PickleWriter(_five_parts).dump(contents.root)
    except PickleProblem as error:
        raise BadCheckpoint(contents.path, f"its pickle {error}: it cannot be written again.") from None
    finally:
        target.pairs = before
        if isinstance(target, Call):
            target.states, target.args = states, args
    archive = ZipWriter(out)
    archive.add("archive/data.pkl", pickled)
    archive.add("archive/.format_version", b"1")
    archive.add("archive/.storage_alignment", b"64")
    archive.add("archive/byteorder", b"big" if contents.facts.get("byteorder") == "big" else b"little")
    with ValueReader() as reader:
        for key, extent in contents.storages.items():
            add_storage(archive, f"archive/data/{key}", extent, None, reader)
    archive.add("archive/version", b"3\n")
    archive.finish()


def _five_parts(parts: Any) -> Any:
    """A storage's id as the zip format has it; the legacy one has a sixth part, which says it is no view."""
    if isinstance(parts, tuple) and len(parts) == 6 and parts[0] == "storage":
        if parts[5] is not None:
            raise PickleProblem("has storages that are views of storages, of torch before 0.4")
        return parts[:5]
    return parts


def default_output(path: Path) -> Path:
    """``model.fixed.pt`` beside ``model.pt``."""
    if path.is_dir():
        return path.with_name(f"{path.name}.fixed.pt")
    name = path.name.removesuffix(".index.json")
    stem, dot, suffix = name.rpartition(".")
    return path.with_name(f"{stem}.fixed.{suffix}" if dot and stem else f"{name}.fixed.pt")
