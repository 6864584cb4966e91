"""phalanx.recipes: training jobs that people copy from."""

__all__: list[str] = []
