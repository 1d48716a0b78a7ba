"""Partitions optimizer state (ZeRO stage 1): one rank updates each parameter and sends the others its new value.

After "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". The user's optimizer stays as it is:
torch's optimizers skip parameters without a gradient, so those of other ranks have none while it steps.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.step_hooks import collect_parameters, register_update_pre_hook

CHUNK_BYTES = 16 * 2**20
"""About how much of each rank's parameters is sent at a time."""
# By name: older versions of torch lack some of them.
PARTITIONED = tuple(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
    if hasattr(torch.optim, name)
)
"""Optimizers that update each parameter from its own gradient and state alone."""


class ZeroPartition:
    """Which rank updates which parameter: the largest first, each is assigned to the rank with the fewest elements.

    All ranks ask for the same parameters in the same order.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_elements = [0] * num_ranks
        self._rank_of: dict[Tensor, int] = {}

    def assign(self, parameters: Sequence[Tensor]) -> None:
        """Assign ranks to those that have none yet."""
        # `sorted` keeps the order of equal sizes, so that all ranks assign alike without a message.
        for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
            self.rank_of(parameter)

    def rank_of(self, parameter: Tensor) -> int:
        """Return the rank that updates this parameter."""
        if parameter not in self._rank_of:
            smallest = self._num_elements.index(min(self._num_elements))
            self._rank_of[parameter] = smallest
            self._num_elements[smallest] += parameter.numel()
        return self._rank_of[parameter]


def updates_by_parameter(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to update each parameter from its own gradient and state alone."""
    # torch wraps `step` of each class once more, for its hooks and profiler.
    is_known = inspect.unwrap(type(optimizer).step) in [inspect.unwrap(kind.step) for kind in PARTITIONED]
    return is_known or not optimizer.param_groups  # Lightning has one without groups where there is no optimizer


def check_partitionable(optimizer: Optimizer, sparse: dict[Tensor, str]) -> None:
    """Raise OptimizerError where an optimizer's parameters cannot be partitioned. sparse: weight -> name."""
    kind = type(optimizer)
    if not updates_by_parameter(optimizer):
        raise OptimizerError(
            f"zero_optimizer=True: {kind.__name__} is not known to update each parameter from its own gradient alone, "
            f"so that its state cannot be partitioned over ranks. Use one of "
            f"{', '.join(kind.__name__ for kind in PARTITIONED)}, or set zero_optimizer=False."
        )
    sparse_name = next((sparse[p] for p in collect_parameters([optimizer]) if p in sparse), None)
    if sparse_name is not None:
        raise OptimizerError(
            f"zero_optimizer=True: '{sparse_name}' has sparse gradients, and all of its rows would be sent after every "
            "step. Set sparse=False for it, use strategy='torchrec_sharded', which shards it, or set "
            "zero_optimizer=False."
        )


def partition_steps(optimizer: Optimizer, partition: ZeroPartition, rank: int) -> Callable[[], None]:
    """Let every step update on each rank the parameters assigned to it, and then broadcast them; returns an undo.

    Steps are collective from then on. State that the optimizer has made for other ranks' parameters is dropped.
    """
    partition.assign([p for p in collect_parameters([optimizer]) if p.requires_grad])
    for parameter in [p for p in optimizer.state if partition.rank_of(p) != rank]:  # Adagrad makes it when constructed
        del optimizer.state[parameter]
    hidden: list[tuple[Tensor, Tensor | None]] = []

    def hide() -> None:
        # Groups may have been added, or unfrozen, since the last step.
        partition.assign([p for p in collect_parameters([optimizer]) if p.requires_grad])
        for parameter in collect_parameters([optimizer]):
            if parameter.grad is not None and partition.rank_of(parameter) != rank:
                hidden.append((parameter, parameter.grad))
                # Optimizers pass over parameters without a gradient, which makes no state for them either.
                parameter.grad = None

    def restore_and_send(*_: Any) -> None:
        for parameter, gradient in hidden:
            parameter.grad = gradient
        hidden.clear()
        _broadcast([p for p in collect_parameters([optimizer]) if p.requires_grad], partition, rank)

    handles = (register_update_pre_hook(optimizer, hide), optimizer.register_step_post_hook(restore_and_send))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


@torch.no_grad()
def _broadcast(parameters: list[Tensor], partition: ZeroPartition, rank: int) -> None:
    """Collective. Send every rank's parameters to all ranks, a chunk of each at a time, so that all links are busy."""
    parameters_by_rank: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        parameters_by_rank.setdefault(partition.rank_of(parameter), []).append(parameter)
    # A chunk of every rank in flight: one rank's link alone would bound the time. Same order on all ranks.
    for chunks in zip_longest(*(_chunks(source, parameters_by_rank[source]) for source in sorted(parameters_by_rank))):
        in_flight = []
        for source, chunk in filter(None, chunks):
            if source == rank:
                values = torch.cat([p.detach().reshape(-1) for p in chunk])
            else:
                values = chunk[0].new_empty(sum(p.numel() for p in chunk))
            in_flight.append((source, chunk, values, dist.broadcast(values, source, async_op=True)))
        for source, chunk, values, work in in_flight:
            # Over NCCL this makes the stream wait, and not the host.
            work.wait()
            if source != rank:
                for parameter, value in zip(chunk, values.split([p.numel() for p in chunk]), strict=True):
                    parameter.copy_(value.view(parameter.shape))


def _chunks(source: int, parameters: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield `source` with parameters of one type and device that are sent at once."""
    chunk: list[Tensor] = []
    num_bytes = 0
    for parameter in parameters:
        matches = not chunk or (parameter.dtype, parameter.device) == (chunk[0].dtype, chunk[0].device)
        if chunk and not (matches and num_bytes + parameter.nbytes <= CHUNK_BYTES):
            yield source, chunk
            chunk, num_bytes = [], 0
        chunk.append(parameter)
        num_bytes += parameter.nbytes
    if chunk:
        yield source, chunk
