"""Names, interfaces, InfiniBand and the rendezvous port of this host."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from typing import Any

from phalanx.tools.doctor.probes.isolation import Partial
from phalanx.tools.doctor.probes.scene import Scene

DEFAULT_PORT = 29500  # torchrun's
_LISTENING = "0A"


def probe_names(scene: Scene) -> Partial:
    """What this host's name and MASTER_ADDR resolve to. It may wait for a name server."""
    found: Partial = {"host_name": socket.gethostname()}
    addresses, error = resolve(found["host_name"])
    found.update(host_addresses=addresses) if error is None else found.update(host_error=error)
    master = scene.master_addr or scene.environ.get("MASTER_ADDR", "").strip()
    if master:
        addresses, error = resolve(master)
        found.update(master_addresses=addresses) if error is None else found.update(master_error=error)
    return {"network": found}


def resolve(name: str) -> tuple[list[str], str | None]:
    """The addresses of a name, in the resolver's order, and why there are none."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers)), None


def probe(scene: Scene) -> Partial:
    """Interfaces, InfiniBand, loopback and the port: all that answers at once."""
    found: Partial = {
        "interfaces": _interfaces(scene),
        "infiniband": _infiniband(scene),
        "nvidia_peermem": bool(re.search(r"^(nvidia_peermem|nv_peer_mem) ", _modules(scene), re.MULTILINE)),
    }
    if scene.is_this_machine:
        found["loopback_works"] = _loopback_works()
        found.update(_port(scene))
    return {"network": found}


def _modules(scene: Scene) -> str:
    return scene.read("/proc/modules") or ""


def _interfaces(scene: Scene) -> list[Partial]:
    addresses = _addresses() if scene.is_this_machine else {}
    return [
        {
            "name": name,
            "up": _is_up(scene, name),
            "mtu": scene.number(f"/sys/class/net/{name}/mtu"),
            "addresses": addresses.get(name, []),
        }
        for name in scene.names("/sys/class/net")
        if name != "bonding_masters"
    ]


def _is_up(scene: Scene, name: str) -> bool | None:
    """Loopback and tunnels say "unknown": then the flag counts."""
    state = scene.read(f"/sys/class/net/{name}/operstate")
    flags = scene.read(f"/sys/class/net/{name}/flags")
    if state == "down":
        return False
    if flags is None:
        return None if state is None else state == "up"
    return bool(int(flags, 16) & 1)


def _addresses() -> dict[str, list[str]]:
    import psutil  # type: ignore[import-untyped, unused-ignore]

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in kinds]
        for name, entries in psutil.net_if_addrs().items()
    }


def _infiniband(scene: Scene) -> list[Partial]:
    found = []
    for device in scene.names("/sys/class/infiniband"):
        for port in scene.names(f"/sys/class/infiniband/{device}/ports"):
            folder = f"/sys/class/infiniband/{device}/ports/{port}"
            found.append(
                {
                    "device": device,
                    "port": int(port) if port.isdigit() else None,
                    "state": _after_number(scene.read(f"{folder}/state")),
                    "physical_state": _after_number(scene.read(f"{folder}/phys_state")),
                    "rate": scene.read(f"{folder}/rate"),
                    "link_layer": scene.read(f"{folder}/link_layer"),
                }
            )
    return found


def _after_number(text: str | None) -> str | None:
    """``ACTIVE`` for ``4: ACTIVE``."""
    return None if text is None else text.partition(":")[2].strip() or text


def _loopback_works() -> bool:
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stack.enter_context(socket.create_connection(server.getsockname(), timeout=2))
        except OSError:
            return False
    return True


def rendezvous_port(scene: Scene) -> int | None:
    """The port that the job will use, torchrun's when nothing was said; None for a number that is none."""
    if scene.port is not None:
        return scene.port or None
    text = scene.environ.get("MASTER_PORT", "").strip()
    if not text:
        return DEFAULT_PORT
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 65536 else None


def _port(scene: Scene) -> Partial:
    port = rendezvous_port(scene)
    if port is None:
        return {}
    free = _is_free(port)
    found: Partial = {"port": port, "port_free": free}
    if free is False:
        owner = _owner(scene, port)
        if owner:
            found["port_owner"] = owner
    return found


def _is_free(port: int) -> bool | None:
    """Whether a store could listen there, tried for IPv6 and IPv4 as torch does."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as attempt:
                attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                attempt.bind((address, port))
                attempt.listen(1)
            return True
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
    return None


def _owner(scene: Scene, port: int) -> str | None:
    """The process that listens on the port, as far as this user may see it."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in (scene.read(f"/proc/net/{table}") or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{words[9]}]")
    for pid in (name for name in scene.names("/proc") if name.isdigit()) if inodes else ():
        for handle in scene.names(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(scene.path(f"/proc/{pid}/fd/{handle}")) in inodes:
                    return f"{scene.read(f'/proc/{pid}/comm')} (pid {pid})"
    return None


def addresses_by_interface() -> dict[str, list[str]]:
    """For the comparison over hosts: this host's addresses without loopback's."""
    found: dict[str, Any] = _addresses()
    return {name: entries for name, entries in found.items() if name != "lo" and entries}
