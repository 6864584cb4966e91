"""``python -m phalanx.tools.doctor.host_peer``: one host of several, answering questions over its standard streams.

A question is a JSON object on one line, and so is its answer, behind a word that no banner of a login shell
starts with. What it may be asked: its facts, its time, to listen on a port, to reach others, to resolve names.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.tools.doctor.facts_json import to_json
from phalanx.tools.doctor.gather import gather
from phalanx.tools.doctor.probes.isolation import collect, start_function
from phalanx.tools.doctor.probes.network import addresses_by_interface, resolve
from phalanx.tools.doctor.probes.scene import Scene

MARK = "phalanx-doctor "
Answer = dict[str, Any]


@dataclass
class Peer:
    """What one host keeps between questions: the sockets that it listens on."""

    listening: list[socket.socket] = field(default_factory=list)

    def answer(self, question: Mapping[str, Any]) -> Answer:
        """The answer to one question; what goes wrong in it is an answer too."""
        asked: Mapping[str, Callable[[Mapping[str, Any]], Answer]] = {
            "hello": lambda _: hello(),
            "time": lambda _: {"time": time.time()},
            "facts": ask_facts,
            "listen": self.listen,
            "reach": ask_reach,
            "resolve": ask_resolve,
        }
        try:
            return asked[str(question.get("ask"))](question)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def listen(self, question: Mapping[str, Any]) -> Answer:
        """Listen as a rendezvous would; connections are taken by the kernel, nobody needs to accept them."""
        port = int(question["port"])
        problem = "no address family to listen with"
        for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
            try:
                server = socket.create_server(
                    (address, port), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
                )
            except (OSError, ValueError) as error:
                problem = str(error)
                continue
            self.listening.append(server)
            return {"listening": port}
        return {"error": problem}


def hello() -> Answer:
    """Who this is: two names of one machine are told apart from two machines."""
    from phalanx import __version__

    machine = [_text("/proc/sys/kernel/random/boot_id"), str(_inode("/proc/self/ns/net"))]
    return {
        "version": __version__,
        "host_name": socket.gethostname(),
        "machine": "/".join(machine),
        "addresses": addresses_by_interface(),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def ask_facts(question: Mapping[str, Any]) -> Answer:
    """This host's facts; the probes are forked from this process, which has one thread."""
    output_dir = question.get("output_dir")
    scene = Scene(
        output_dir=Path(output_dir) if output_dir else None,
        port=question.get("port"),
        nnodes=question.get("nnodes"),
        local_world_size=question.get("local_world_size"),
        loader_workers=question.get("loader_workers"),
    )
    facts = gather(scene, timeout_s=float(question["timeout_s"]), torch=bool(question.get("torch", True)))
    return {"facts": to_json(facts)}


def ask_resolve(question: Mapping[str, Any]) -> Answer:
    """What names mean here, each within the time; a name server that is gone costs no more than that."""
    names = [str(name) for name in question["names"]]
    limit = float(question["timeout_s"])
    children = [start_function(name, partial(_meaning, name), limit) for name in names]
    collect(children)
    found = {}
    for child in children:
        found[child.name] = next(child.answers(), {"addresses": [], "error": f"no answer within {limit:g} s"})
    return {"names": found}


def _meaning(name: str) -> Answer:
    addresses, error = resolve(name)
    return {"addresses": addresses, "error": error}


def ask_reach(question: Mapping[str, Any]) -> Answer:
    """Whether each target's port can be connected to: by its name, or else by which of its addresses."""
    limit = float(question["timeout_s"])
    targets: Sequence[Mapping[str, Any]] = question["targets"]
    children = [
        start_function(str(target["name"]), partial(_reach, target, limit), 3 * limit) for target in targets
    ]
    collect(children)
    return {
        "reached": {
            child.name: next(child.answers(), {"error": f"no answer within {3 * limit:g} s"})
            for child in children
        }
    }


def _reach(target: Mapping[str, Any], limit: float) -> Answer:
    error = _connect(str(target["name"]), int(target["port"]), limit)
    if error is None:
        return {"by": "name"}
    for address in target["addresses"]:
        if _connect(str(address), int(target["port"]), limit) is None:
            return {"by": address, "name_error": error}
    return {"error": error}


def _connect(address: str, port: int, limit: float) -> str | None:
    try:
        socket.create_connection((address, port), timeout=limit).close()
    except TimeoutError:
        return f"no answer within {limit:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None


def main() -> None:
    """Answer until the questions end: when the asking side is gone, so is this."""
    out = os.dup(1)
    os.dup2(2, 1)  # what imports print is no answer
    peer = Peer()
    for line in sys.stdin:
        try:
            question = json.loads(line)
        except ValueError:
            continue
        answer = peer.answer(question)
        os.write(out, (MARK + json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main()
