"""Parameters that every rank keeps whole beside sharded ones, and their gradients."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from rich.filesize import decimal
from torch import nn
from torch.distributed.tensor import DTensor

LARGE_BYTES = 2**20
"""From where on a parameter that is kept whole is worth a word."""


def choose_replicated(module: nn.Module, blocks: Iterable[nn.Module], automatic: bool) -> dict[str, nn.Parameter]:
    """Return name -> parameter of what fully_shard does not cut: single numbers, which it refuses, and, where several
    backwards may run in one step (manual optimization), what is in none of the blocks, since a backward frees it.
    """
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if not parameter.dim() or (not automatic and id(parameter) not in in_blocks)
    }


def log_replicated(whole: dict[str, nn.Parameter], tell: Callable[[str], None]) -> None:
    """Tell of the large ones."""
    large = [name for name, parameter in whole.items() if parameter.numel() * parameter.itemsize >= LARGE_BYTES]
    if large:
        size = decimal(sum(whole[name].numel() * whole[name].itemsize for name in large))
        tell(
            f"fsdp_tuned: {', '.join(large)} ({size}) are in no block, and are whole on every rank: in manual "
            "optimization, backward would free them in the middle of a step. Name the modules that have them: wrap."
        )


class ReplicatedParameters:
    """The gradients of parameters that each rank has whole are averaged, as under DDP."""

    def __init__(self, module: nn.Module | None = None) -> None:
        parameters = [] if module is None else list(module.parameters())
        self._parameters = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]

    def average(self) -> None:
        """Collective where there are such parameters. Average their gradients, after a backward.

        One that some rank has used gets a gradient on all ranks; the others count as 0 there.
        """
        learning = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not learning or dist.get_world_size() == 1:
            return
        device = learning[0].device
        used = torch.tensor([parameter.grad is not None for parameter in learning], dtype=torch.int32, device=device)
        dist.all_reduce(used)
        for parameter, count in zip(learning, used.tolist(), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(dist.get_world_size())
            dist.all_reduce(parameter.grad)
