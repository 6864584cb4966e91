"""phalanx.tools.fit: the memory that a training step needs, per strategy and world size, without a GPU."""
