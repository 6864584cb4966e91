"""Says which rank of which node it is, and adds one number of each rank."""

import torch

from phalanx.dist import all_reduce_sum, init_world

world = init_world()
count = all_reduce_sum(torch.ones(()))
print(
    f"rank {world.rank} of {world.world_size} on node {world.node_rank}: the sum is {int(count)}", flush=True
)
