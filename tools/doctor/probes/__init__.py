"""phalanx.tools.doctor.probes: reading a machine, one probe a file; each runs in a process of its own."""

__all__: list[str] = []
