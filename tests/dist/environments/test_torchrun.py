"""What torchrun's variables say beside Slurm's."""

from __future__ import annotations

import pytest

from phalanx.dist.environments import torchrun


def test_loopback_is_fine_where_the_agents_of_all_slurm_nodes_have_met() -> None:
    """Several slurmd on one machine, as in a test cluster."""
    environ = {"SLURM_STEP_NUM_NODES": "2", "GROUP_WORLD_SIZE": "2"}
    torchrun.refuse_loopback_across_nodes(environ, "127.0.0.1")
    with pytest.raises(ValueError, match="every node would reach only itself"):
        torchrun.refuse_loopback_across_nodes({**environ, "GROUP_WORLD_SIZE": "1"}, "127.0.0.1")
