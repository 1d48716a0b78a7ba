"""Tells torchrec what the cluster environment knows: how many ranks run on this node."""

import os

from lightning.fabric.plugins.environments import ClusterEnvironment, TorchElasticEnvironment


def publish_local_world_size(environment: ClusterEnvironment | None, ranks_on_node: int) -> int:
    """Set LOCAL_WORLD_SIZE to the number of ranks on this node and return it.

    torchrun sets the variable itself; neither Lightning's launcher nor srun does. Unset, torchrec takes 8 wherever the
    world size divides by 8 (torchrec/distributed/comm.py, get_local_size), so that 4 nodes of 4 ranks would be
    planned as 2 nodes of 8.
    """
    if isinstance(environment, TorchElasticEnvironment) and "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_on_node)
    return ranks_on_node
