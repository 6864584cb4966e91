"""phalanx.tools: programs that say what is wrong, and what fits."""

__all__: list[str] = []
