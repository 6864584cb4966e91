"""phalanx.tools.explain: the root cause in a failed run's logs."""
