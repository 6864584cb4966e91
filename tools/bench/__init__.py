"""phalanx.tools.bench: bandwidth and latency of collectives and of data loading."""
