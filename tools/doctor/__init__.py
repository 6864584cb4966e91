"""phalanx.tools.doctor: facts of a machine, and what in them breaks a multi-GPU job."""
