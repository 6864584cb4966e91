"""Files made to run code, to exhaust memory or time, or to lead out of a folder: refused, with one message."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.tools.ckpt import BadCheckpoint, open_checkpoint
from phalanx.tools.ckpt.fixing import fix
from phalanx.tools.ckpt.like import Like
from phalanx.tools.ckpt.verifying import verify
from tests.conftest import ROOT
from tests.tools.ckpt.samples import trained, tutorial, write_all


def zipped(path: Path, pickled: bytes, method: int = zipfile.ZIP_STORED, **storages: bytes) -> Path:
    """A torch file with this pickle."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        for name, content in storages.items():
            archive.writestr(f"archive/data/{name.lstrip('_')}", content)
    return path


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_named_and_not_run(tmp_path: Path, legacy: bool) -> None:
    trace, path = tmp_path / "ran", tmp_path / "bad.pt"
    content = {"model": {"module.weight": torch.ones(2)}, "hook": Runs(trace)}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    contents = open_checkpoint(path, values=True)
    assert contents.code == ("posix.mkdir",)
    assert [entry.key for entry in contents.entries] == ["model.module.weight"]
    verify(path)
    fix(contents, Like({"weight": (2,)}), tmp_path / "fixed.pt", keep_other=True)
    fix(contents, Like({"weight": (2,)}), tmp_path / "bare.pt")
    assert not trace.exists()
    # What holds code still holds it when all of it is kept; the bare weights do not.
    assert open_checkpoint(tmp_path / "fixed.pt").code == ("posix.mkdir",)
    assert list(torch.load(tmp_path / "bare.pt", weights_only=True)) == ["weight"]
    assert not trace.exists()


def _text_opcodes(trace: Path) -> bytes:
    return b"cos\nmkdir\n(S'" + str(trace).encode() + b"'\ntR."


def _inst(trace: Path) -> bytes:
    return b"(S'" + str(trace).encode() + b"'\nios\nmkdir\n."


def _stack_global(trace: Path) -> bytes:
    name = str(trace).encode()
    return b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93X" + struct.pack("<I", len(name)) + name + b"\x85R."


@pytest.mark.parametrize("make", [_text_opcodes, _inst, _stack_global])
def test_every_way_to_name_a_function_is_only_a_name(tmp_path: Path, make: Callable[[Path], bytes]) -> None:
    trace = tmp_path / "ran"
    pickled = make(trace)
    pickletools.dis(pickled, out=open(os.devnull, "w"))  # noqa: SIM115 (it is a whole pickle)
    contents = open_checkpoint(zipped(tmp_path / "bad.pt", pickled))
    assert contents.code in (("posix.mkdir",), ("os.mkdir",))
    assert not trace.exists()


def _laughs() -> bytes:
    """Lists of ten times the list before: 10**40 strings when followed."""
    lists = b"".join(
        b"](" + b"h" + bytes([n]) + (b"h" + bytes([n])) * 9 + b"eq" + bytes([n + 1]) for n in range(40)
    )
    return b"\x80\x02](X\x01\x00\x00\x00aeq\x00" + lists + b"."


BOMBS: dict[str, Callable[[], bytes]] = {
    "lists within lists": _laughs,
    "ten million empty dicts": lambda: b"\x80\x02(" + b"}" * 10_000_000 + b"t.",
    "a million lists in one another": lambda: b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "ten million marks": lambda: b"\x80\x02" + b"(" * 10_000_000 + b".",
    "a long string that is not there": lambda: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"a.",
    "a long bytearray that is not there": lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 50) + b"a.",
    "a number of a million digits": lambda: b"\x80\x02L" + b"9" * 60_000 + b"L\n.",
    "a line without an end": lambda: b"\x80\x02L" + b"9" * 1_000_000,
    "an unknown protocol": lambda: b"\x80\xff}.",
    "the end": lambda: b"\x80\x02",
    "nothing on the stack": lambda: b"\x80\x02R.",
    "a reference to nothing": lambda: b"\x80\x02j\xff\xff\xff\x7f.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_pickle_bombs(tmp_path: Path, name: str) -> None:
    path = zipped(tmp_path / "bomb.pt", BOMBS[name](), zipfile.ZIP_DEFLATED)
    _read_in_bounds(path)


def _read_in_bounds(path: Path) -> None:
    """Inspect it in a process that may have 700 MB."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (700 << 20,) * 2)\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (30, 30))\n"
        "from phalanx.launch.entry import main; main(['ckpt', 'inspect', sys.argv[1]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr


def test_a_small_pickle_with_a_long_name_in_front_of_many(tmp_path: Path) -> None:
    inner = b"(" + b"".join(b"J" + struct.pack("<i", n) + b"]" for n in range(1000)) + b"d"
    pickled = b"\x80\x02}X" + struct.pack("<I", 1_000_000) + b"a" * 1_000_000 + inner + b"s."
    with pytest.raises(BadCheckpoint, match="exhaust memory"):
        open_checkpoint(zipped(tmp_path / "bomb.pt", pickled))


def test_time_is_linear(tmp_path: Path) -> None:
    """Four times the values take about four times the processor's time; with quadratic work it would be sixteen."""

    def seconds(count: int) -> float:
        tensor = pickle.dumps([[number] for number in range(count)], protocol=2)
        path = zipped(tmp_path / f"{count}.pt", tensor)
        best = 1e9
        for _ in range(3):
            start = time.process_time()
            open_checkpoint(path)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(80_000) / seconds(20_000) < 10


def test_zip_bombs(tmp_path: Path) -> None:
    path = zipped(tmp_path / "bomb.pt", b"\x80\x02}.", zipfile.ZIP_DEFLATED, _0=b"\0" * (100 << 20))
    with pytest.raises(BadCheckpoint, match="zip bomb"):
        open_checkpoint(path)
    pickled = b"\x80\x02(" + b"N" * (100 << 20) + b"t."
    path = zipped(tmp_path / "pickle.pt", pickled, zipfile.ZIP_DEFLATED)
    with pytest.raises(BadCheckpoint, match=r"zip bomb|at most"):
        open_checkpoint(path)


def test_overlapping_records(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.pt", b"\x80\x02}.", _0=b"x" * 1000)
    content = path.read_bytes()
    begin = content.index(b"PK\x01\x02")
    end = content.index(b"PK\x05\x06")
    last = content.rindex(b"PK\x01\x02")
    copies = b"".join(content[last:end].replace(b"data/0", b"data/" + bytes([65 + n])) for n in range(20))
    count = 3 + 20
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, end - begin + len(copies), begin, 0)
    path.write_bytes(content[:end] + copies + tail)
    with pytest.raises(BadCheckpoint, match="overlap"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["../secret.pt", "/etc/passwd", "a/../../secret.pt", "link.pt", ""])
def test_names_that_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"weight": torch.ones(1)}, tmp_path / "secret.pt")
    (folder / "link.pt").symlink_to(tmp_path / "secret.pt")
    index = {"weight_map": {"weight": name}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "latest").write_text(name)
    for path in (folder, folder / "pytorch_model.bin.index.json"):
        with pytest.raises(BadCheckpoint, match=r"outside|makes no sense"):
            open_checkpoint(path)


def test_a_dcp_index_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.ones(4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    index = tmp_path / "dcp" / ".metadata"
    content = index.read_bytes()
    assert b"__0_0.distcp" in content
    index.write_bytes(content.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(BadCheckpoint, match="outside the folder"):
        open_checkpoint(tmp_path / "dcp")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack("<Q", 1 << 62) + b"{", "its header would have"),
        (struct.pack("<Q", 1 << 24) + b"{", "is cut"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "no JSON"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 20) + b'{"a": 1, "a": 2}    ', "twice"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "makes no sense"),
        (b"\0\0", "too few"),
    ],
)
def test_safetensors_headers(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(header)
    with pytest.raises(BadCheckpoint, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "bare.safetensors"])
def test_every_cut_is_named(tmp_path: Path, name: str) -> None:
    path = write_all(tmp_path)[name]
    content = path.read_bytes()
    for length in range(0, len(content), 61):
        path.write_bytes(content[:length])
        try:
            problems = verify(path).problems
        except BadCheckpoint as error:
            problems = [str(error)]
        assert problems, f"{name} cut to {length} of {len(content)} bytes"


def test_what_a_key_does_to_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"\x1b]0;owned\x07\x1b[2J.weight\n": torch.ones(1)}, path)
    program = [sys.executable, "-m", "phalanx", "ckpt", "inspect", str(path)]
    done = subprocess.run(
        program, capture_output=True, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert b"\x1b" not in done.stdout
    assert b"\\x1b]0;owned\\x07" in done.stdout
    assert done.stdout.count(b"\n") == 2


def test_tensors_that_reach_out_of_their_storage(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.zeros(3)}, path)
    contents = path.read_bytes()
    assert contents.count(b"K\x03\x85") == 1
    path.write_bytes(contents.replace(b"K\x03\x85", b"K\x7f\x85"))
    assert "reaches beyond" in open_checkpoint(path).entries[0].problem
    with pytest.raises(BadCheckpoint, match="cannot be copied"):
        fix(open_checkpoint(path), Like({"weight": (127,)}), tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()


def test_an_expanded_tensor_is_not_written_out(tmp_path: Path) -> None:
    """A terabyte that is one number in the file."""
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, path)
    contents = open_checkpoint(path)
    assert contents.total_bytes == 4
    from phalanx.tools.ckpt.converting import convert

    with pytest.raises(BadCheckpoint, match="expanded"):
        convert(contents, tmp_path / "b.safetensors", "safetensors")
    assert not list(tmp_path.glob("*b.safetensors*"))


def test_ten_thousand_mutated_files(tmp_path: Path) -> None:
    """No code runs, nothing crashes, memory stays bounded: watched by an audit hook, in a process of its own."""
    folder = tmp_path / "samples"
    folder.mkdir()
    write_all(folder)
    words = [sys.executable, "-m", "tests.tools.ckpt.mutations", str(folder), "10000", str(time.time_ns())]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    assert found["broken"] == [], words
    assert found["refused"] > 5000
    assert found["read"] > 300
    assert found["peak_kb"] < 300_000


def test_mutated_folders(tmp_path: Path) -> None:
    """Each file of a folder cut and changed in turn: refused or described, never a crash."""
    import random

    import torch.distributed.checkpoint as dcp

    model, optimizer = trained()
    folder = tmp_path / "dcp"
    dcp.save(tutorial(model, optimizer), checkpoint_id=folder, no_dist=True)
    random_ = random.Random(0)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for _ in range(150):
            data = bytearray(content)
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
            if random_.random() < 0.3:
                del data[random_.randrange(len(data)) :]
            path.write_bytes(data)
            try:
                verify(folder)
                open_checkpoint(folder, values=True)
            except BadCheckpoint:
                continue
        path.write_bytes(content)
    assert verify(folder).problems == []
