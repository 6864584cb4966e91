"""phalanx.tools.ckpt: look into checkpoints, compare, mend, convert and verify them; no pickled code ever runs."""
