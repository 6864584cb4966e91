"""phalanx.launch: the `phalanx` command, and how it starts ranks."""

__all__: list[str] = []
