"""phalanx.tools.facts: tables of what fits what: torch, CUDA, drivers, architectures, GPUs, variables, Xid codes."""
