"""Parameters that every rank keeps in full next to sharded ones, and their gradients."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from rich.filesize import decimal
from torch import nn
from torch.distributed.tensor import DTensor

LARGE_BYTES = 2**20
"""Minimum size of replicated parameters that the log reports."""


def choose_replicated(module: nn.Module, blocks: Iterable[nn.Module], automatic: bool) -> dict[str, nn.Parameter]:
    """Return name -> parameter of those that fully_shard leaves out.

    These are scalars, which it refuses, and in manual optimization what is in no block: several backwards may run in
    one step there, and the first would free it.
    """
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if not parameter.dim() or (not automatic and id(parameter) not in in_blocks)
    }


def log_replicated(replicated: dict[str, nn.Parameter], log: Callable[[str], None]) -> None:
    """Report large replicated parameters."""
    large = {name: p for name, p in replicated.items() if p.numel() * p.itemsize >= LARGE_BYTES}
    if large:
        size = decimal(sum(p.numel() * p.itemsize for p in large.values()))
        log(
            f"fsdp_tuned: {', '.join(large)} ({size}) are in no block, and are replicated on every rank: in manual "
            "optimization, backward would free them in the middle of a step. To shard them, name their modules in wrap."
        )


class ReplicatedParameters:
    """Averages the gradients of the parameters that each rank has in full, as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
        self.host_group: Any = None
        """Where ranks report what they have used: on the host, which would wait for backward on a GPU otherwise."""

    def average_gradients(self) -> None:
        """Collective where there are such parameters. Average their gradients after a backward.

        A parameter that any rank has used gets a gradient on all ranks; ranks that have not used it count as 0.
        """
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not trained or dist.get_world_size() == 1:
            return
        used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        dist.all_reduce(used, group=self.host_group)
        for parameter, num_ranks in zip(trained, used.tolist(), strict=True):
            if not num_ranks:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(dist.get_world_size())
            dist.all_reduce(parameter.grad)
