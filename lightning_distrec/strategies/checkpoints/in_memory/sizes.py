"""How much memory copies of the state need on each node, known before the first step makes the optimizers' state."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distrec.checkpoint.chunking import as_chunked
from lightning_distrec.checkpoint.in_memory.node_folder import NodeFolder
from lightning_distrec.checkpoint.plain_state import map_nested
from lightning_distrec.errors import ConfigError
from lightning_distrec.host_memory import free_host_bytes, host_memory_bytes

SLOTS = 2
"""The copy before stays until the one that is being taken is complete."""


def own_bytes(state: Mapping[str, Any], optimizers: Iterable[Optimizer], num_local_ranks: int) -> int:
    """Return the bytes that this rank writes of a copy, about.

    state: the module's and its optimizers' as it is saved. num_local_ranks: they share what all ranks hold alike. What
    an optimizer makes in its first step only is counted by its class.
    """
    sharded = alike = 0

    def count(value: Any, path: str) -> Any:
        nonlocal sharded, alike
        if (chunked := as_chunked(value)) is not None:
            sharded += sum(chunk.tensor.nbytes for chunk in chunked.chunks)
        elif isinstance(value, Tensor):
            alike += value.nbytes
        else:
            map_nested(value, path, count)
        return value

    count(dict(state), "")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in optimizer.state:
                    alike += _expected_bytes(optimizer, group, parameter)
    return sharded + alike // num_local_ranks


def _expected_bytes(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> int:
    from lightning_distrec.optimizers.state_sizes import UNKNOWN_TENSORS, state_numbers  # it loads torchrec

    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    numbers = state_numbers(optimizer, group, local)
    return (UNKNOWN_TENSORS * local.numel() if numbers is None else numbers) * local.itemsize


def check_memory(folder: NodeFolder, on_node: int, in_folder: int, slots: float) -> None:
    """Raise ConfigError: this node has too little memory.

    on_node: bytes that its ranks write of a copy. in_folder: bytes of one copy in the folder, with those of guests.
    slots: how many copies are there at once, with the differences between them.
    """
    used = folder.used_bytes()
    for where, needed, there in (
        (f"the file system of {folder.path}", round(slots * in_folder), folder.free_bytes() + used),
        ("the host", round(slots * in_folder) + on_node, min(free_host_bytes() + used, host_memory_bytes())),
    ):
        if needed > there:
            raise ConfigError(
                f"checkpoint: in_memory needs {needed:,} bytes on each node, {slots} copies of {in_folder:,}"
                f"{' and one on the way' if where == 'the host' else ''}, and {where} has {there:,}. Give it "
                "more, or more nodes; or set in_memory to null, and let ModelCheckpoint save to a disk."
            )
