"""Which ranks share one copy of the parameters: the mesh of a fully sharded module."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions, Replicas


def make_mesh(
    options: FSDPOptions, device: torch.device, ranks_on_node: Sequence[int], timeout: timedelta
) -> DeviceMesh:
    """Collective. Return a mesh of all ranks: (data_parallel,), or (replicate, shard) with more than one replica.

    Consecutive ranks share one replica of the parameters.
    ranks_on_node: for each rank, the number of ranks on its node.
    Raises ConfigError: the ranks cannot be divided evenly among replicas; nothing to offload from.
    """
    if options.cpu_offload and device.type != "cuda":
        raise ConfigError(
            f"cpu_offload=true: the ranks compute on {device.type}, so everything is on the host already. Remove it."
        )
    num_ranks, replicas = len(ranks_on_node), num_replicas(options.replicas, ranks_on_node)
    if replicas == 1:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("data_parallel",))
    # By hand, because groups that init_device_mesh makes have torch's default timeout.
    ranks = torch.arange(num_ranks).view(replicas, -1)
    groups = [dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout)[0] for members in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device.type, ranks.tolist(), mesh_dim_names=("replicate", "shard"))


def num_replicas(replicas: Replicas, ranks_on_node: Sequence[int]) -> int:
    """Return the number of replicas. Raises ConfigError: the ranks cannot be divided evenly among them.

    ranks_on_node: for each rank, the number of ranks on its node.
    """
    num_ranks = len(ranks_on_node)
    if replicas == "nodes":
        if len(set(ranks_on_node)) > 1:
            counts = ", ".join(map(str, sorted(set(ranks_on_node))))
            raise ConfigError(
                f"replicas='nodes': nodes have unequal numbers of ranks ({counts}), so that their replicas of the "
                "parameters cannot be sharded alike. Set a number of replicas."
            )
        return num_ranks // ranks_on_node[0]
    if num_ranks % replicas:
        raise ConfigError(
            f"replicas={replicas}: {num_ranks} ranks cannot be divided evenly among them. Use a divisor of {num_ranks}."
        )
    return replicas
