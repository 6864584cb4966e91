"""Run by test_hostile in a process of its own: mutated files, read under a watch on everything Python may do.

    python -m tests.tools.ckpt.mutations FOLDER COUNT SEED

Prints JSON: how many files were refused and read, and what was done that must never be.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.tools.ckpt import BadCheckpoint, open_checkpoint
from phalanx.tools.ckpt.inspecting import inspect_json, statistics_of
from phalanx.tools.ckpt.verifying import verify

FORBIDDEN = ("pickle.find_class", "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen",
             "socket.connect", "ctypes.dlopen", "import")  # fmt: skip
LIMIT_BYTES = 1 << 30


def mutated(content: bytes, random_: random.Random) -> bytes:
    """Bits flipped, bytes replaced, parts cut out, doubled or swapped; most changes near the pickle and the end."""
    data = bytearray(content)
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        kind = random_.randrange(6)
        place = (
            random_.randrange(min(len(data), 2000))
            if random_.random() < 0.6
            else random_.randrange(len(data))
        )
        if kind == 0:
            data[place] ^= 1 << random_.randrange(8)
        elif kind == 1:
            data[place] = random_.choice(
                b"\x00\xff(.]}RbuetPQ\x80\x81\x93\x8d\x8b" + bytes([random_.randrange(256)])
            )
        elif kind == 2:
            del data[place : place + random_.randrange(1, 40)]
        elif kind == 3:
            data[place:place] = data[place : place + random_.randrange(1, 200)]
        elif kind == 4:
            del data[len(data) - random_.randrange(len(data)) :]
        else:
            data[place : place + 4] = random_.choice(
                (b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f")
            )
        if len(data) < 20:
            break
    return bytes(data)


def main(folder: Path, count: int, seed: int) -> dict[str, Any]:
    sources = [path for path in sorted(folder.iterdir()) if path.is_file()]
    contents = {path: path.read_bytes() for path in sources}
    for path in sources:  # everything is imported now: from here on an import is a file's doing
        statistics_of(open_checkpoint(path, values=True))
        verify(path)
    for codec in ("unicode_escape", "raw_unicode_escape"):
        b"x".decode(codec)
    broken: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in FORBIDDEN and len(broken) < 20:
            broken.append(f"{event} {args!r:.200}")

    sys.addaudithook(watch)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    random_ = random.Random(seed)
    refused = slowest = 0.0
    target = folder / "mutated"
    target.mkdir()
    for number in range(count):
        source = sources[number % len(sources)]
        path = target / source.name
        path.write_bytes(mutated(contents[source], random_))
        start = time.process_time()
        try:
            json.dumps(inspect_json(open_checkpoint(path)))
            if number % 4 == 0:
                statistics_of(open_checkpoint(path, values=True))
                verify(path)
        except BadCheckpoint as error:
            refused += 1
            if "\n" in str(error).replace("\nFix: ", ""):
                broken.append(f"more than one message: {error}")
        slowest = max(slowest, time.process_time() - start)
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return {
        "refused": int(refused),
        "read": count - int(refused),
        "broken": broken,
        "slowest_s": slowest,
        "peak_kb": peak,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
