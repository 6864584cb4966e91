"""Names, interfaces and ports between nodes."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.tools.doctor.facts import Facts, InterfaceFacts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.judging import fail, fine, proven, suspected, symptom_weight, warn
from phalanx.tools.doctor.reading import env, nodes, nvidia_gpus, says


def check_host_name(facts: Facts) -> Finding | None:
    """Gloo and the TCP store tell peers the address of this host's own name."""
    cause, title = "hostname-resolves-to-loopback", "this host's own name resolves to a loopback address"
    network = facts.network
    name = (network and network.host_name) or "$(hostname)"
    fix = (
        f"in /etc/hosts give {name} the address other nodes reach: sudo sed -i 's/^127\\.0\\.[01]\\.1\\(.*\\b{name}\\b\\)/<address>\\1/' /etc/hosts",
        "or: export GLOO_SOCKET_IFNAME=<interface> NCCL_SOCKET_IFNAME=<interface> and an address as MASTER_ADDR",
    )
    addresses = (network and network.host_addresses) or ()
    looped = bool(addresses) and all(address.startswith("127.") or address == "::1" for address in addresses)
    several = (nodes(facts) or 0) > 1 or says(
        facts,
        r"(?:two|2|several|multiple|second|other|multi)[- ]?(?:nodes?|machines?|hosts?)|nnodes[ =]{1,3}[2-9]",
    )
    if looped and (several or symptom_weight(facts, cause) >= 60):
        return proven(facts, cause, title, (f"{name} is {', '.join(addresses)}",), fix, 87)
    if network and network.host_error:
        return (fail if several else warn)(
            "hostname-unresolvable",
            "this host's own name does not resolve",
            (network.host_error,),
            (
                f"echo '<address> {name}' | sudo tee -a /etc/hosts",
                "export GLOO_SOCKET_IFNAME=lo   (one node)",
            ),
            69 if several else 37,
        )
    if looped and nodes(facts) is None and not facts.live:
        return warn(cause, title, (f"{name} is {', '.join(addresses)}",), fix, 60)
    return suspected(facts, cause, title, fix, refuted=bool(addresses) and not looped)


def check_loopback(facts: Facts) -> Finding | None:
    """Ranks of one node meet over 127.0.0.1."""
    if facts.network and facts.network.loopback_works is False:
        return fail(
            "loopback-broken",
            "a connection to 127.0.0.1 does not work",
            ("ranks of one node meet there",),
            ("sudo ip link set lo up; look at the firewall: sudo iptables -L INPUT",),
            83,
        )
    return None


def check_interfaces(facts: Facts) -> Iterator[Finding]:
    """NCCL takes prefixes, `=` and `^`; gloo takes exact names and nothing else."""
    known = facts.network.interfaces if facts.network else None
    if not known:
        return
    value = env(facts).get("NCCL_SOCKET_IFNAME")
    if value:
        chosen = [entry for entry in known if nccl_matches(value, entry.name)]
        yield from _chosen(facts, "nccl-socket-ifname-wrong", "NCCL_SOCKET_IFNAME", value, chosen, known)
    value = env(facts).get("GLOO_SOCKET_IFNAME")
    if value:
        names = [part.strip() for part in value.split(",")]
        chosen = [entry for entry in known if entry.name in names]
        if any(part.startswith(("^", "=")) for part in names):
            yield fail(
                "gloo-socket-ifname-wrong",
                "GLOO_SOCKET_IFNAME takes exact names: ^ and = are NCCL's",
                (f"GLOO_SOCKET_IFNAME={value}",),
                (f"export GLOO_SOCKET_IFNAME={_usable(known)}",),
                85,
            )
        else:
            missing = [name for name in names if name not in {entry.name for entry in known}]
            yield from _chosen(
                facts,
                "gloo-socket-ifname-wrong",
                "GLOO_SOCKET_IFNAME",
                value,
                [] if missing else chosen,
                known,
            )


def nccl_matches(value: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME takes an interface: a list of prefixes, `=` exact, `^` all but those.

    >>> nccl_matches("eth", "eth0"), nccl_matches("=eth", "eth0"), nccl_matches("^docker,lo", "eth0")
    (True, False, True)
    """
    excluded = value.startswith("^")
    rest = value[1:] if excluded else value
    exact = rest.startswith("=")
    parts = [part.strip() for part in (rest[1:] if exact else rest).split(",") if part.strip()]
    found = any(name == part if exact else name.startswith(part) for part in parts)
    return found != excluded


def _usable(known: tuple[InterfaceFacts, ...]) -> str:
    for entry in known:
        if (
            entry.up is not False
            and entry.name != "lo"
            and not entry.name.startswith(("docker", "br-", "veth", "virbr"))
        ):
            return entry.name
    return "lo"


def _chosen(
    facts: Facts,
    cause: str,
    variable: str,
    value: str,
    chosen: list[InterfaceFacts],
    known: tuple[InterfaceFacts, ...],
) -> Iterator[Finding]:
    fix = (f"export {variable}={_usable(known)}",)
    names = "interfaces: " + ", ".join(entry.name for entry in known[:12])
    if not chosen:
        yield fail(cause, f"{variable}={value} names no interface of this machine", (names,), fix, 84)
    elif all(entry.up is False for entry in chosen):
        yield fail(cause, f"the interface of {variable}={value} is down", (names,), fix, 82)
    elif all(entry.name == "lo" for entry in chosen) and (nodes(facts) or 1) > 1:
        yield fail(
            cause,
            f"{variable}={value} is the loopback, and the job has {nodes(facts)} nodes",
            (names,),
            fix,
            81,
        )


def check_infiniband(facts: Facts) -> Iterator[Finding]:
    """Ports that are down send NCCL to slower ways, or into retries."""
    ports = (facts.network and facts.network.infiniband) or ()
    down = [port for port in ports if port.state and not port.state.upper().endswith("ACTIVE")]
    if down and len(down) < len(ports):
        evidence = [f"{port.device}:{port.port or 1} {port.state}" for port in down[:6]]
        good = ",".join(port.device for port in ports if port not in down)
        yield warn(
            "infiniband-port-down",
            "some InfiniBand or RoCE ports are down",
            evidence,
            (f"export NCCL_IB_HCA={good}", "ibstat"),
            36,
        )
    elif down and ports and (nodes(facts) or 1) > 1:
        yield warn(
            "infiniband-port-down",
            "no InfiniBand or RoCE port is up",
            [f"{port.device} {port.state}" for port in down[:4]],
            ("ibstat; export NCCL_IB_DISABLE=1 to go over TCP meanwhile",),
            51,
        )
    if (
        ports
        and facts.network
        and facts.network.nvidia_peermem is False
        and (nodes(facts) or 1) > 1
        and nvidia_gpus(facts)
    ):
        yield warn(
            "gpudirect-rdma-off",
            "nvidia_peermem is not loaded: GPUDirect RDMA may be off",
            (),
            ("sudo modprobe nvidia_peermem   (not needed where dma-buf is in use)",),
            17,
        )


def check_mtu(facts: Facts) -> Finding | None:
    """A small MTU costs bandwidth; a different one on two nodes stalls large messages."""
    small = [
        entry
        for entry in (facts.network and facts.network.interfaces) or ()
        if entry.up
        and entry.mtu
        and entry.mtu < 1400
        and entry.name != "lo"
        and not entry.name.startswith(
            ("docker", "veth", "br-", "tun", "wg", "tailscale", "cali", "flannel", "utun")
        )
    ]
    if not small or (nodes(facts) or 1) < 2:
        return None
    return warn(
        "small-mtu",
        "an interface has a small MTU",
        [f"{entry.name}: {entry.mtu}" for entry in small[:4]],
        (f"sudo ip link set {small[0].name} mtu 1500   (on all nodes alike)",),
        27,
    )


def check_rendezvous(facts: Facts) -> Iterator[Finding]:
    """The address and the port where ranks meet."""
    network = facts.network
    if network is None:
        return
    if network.port_free is False:
        owner = f"held by {network.port_owner}" if network.port_owner else "another process listens there"
        # torchrun's default, which nobody asked for: phalanx run takes another by itself.
        asked = network.port != 29500 or "MASTER_PORT" in env(facts) or (nodes(facts) or 1) > 1
        yield (fail if asked else warn)(
            "port-in-use",
            f"rendezvous port {network.port} is taken",
            (owner,),
            (
                "export MASTER_PORT=0 with torchrun --standalone, or another port: torchrun --master-port 29501",
            ),
            85 if asked else 30,
        )
    address = env(facts).get("MASTER_ADDR")
    if network.master_error:
        yield fail(
            "master-addr-unresolvable",
            f"MASTER_ADDR={address or ''} does not resolve",
            (network.master_error,),
            ("export MASTER_ADDR=<address of the first node>",),
            85,
        )
    looped = [
        text
        for text in (*(network.master_addresses or ()), address or "")
        if text.startswith("127.") or text in ("localhost", "::1")
    ]
    if looped and (nodes(facts) or 1) > 1:
        yield fail(
            "master-addr-is-loopback",
            f"MASTER_ADDR is this machine's loopback, and the job has {nodes(facts)} nodes",
            (f"{address} is {looped[0]}",),
            ("export MASTER_ADDR=<the first node's address, as the other nodes reach it>",),
            83,
        )
    elif network.port_free:
        yield fine("port-in-use", f"rendezvous port {network.port} is free")
