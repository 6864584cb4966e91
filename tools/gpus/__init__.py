"""phalanx.tools.gpus: the GPUs of one or several nodes, and who holds them."""
