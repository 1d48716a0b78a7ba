"""Each parameter is updated, and its optimizer's state kept, by one rank; the others get its new value.

After "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stage 1. The user's optimizer stays as it
is: all of torch's pass over parameters without a gradient, so those of others are without one while it steps.
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

CHUNK_BYTES = 16 * 2**20
"""About so much of each rank's parameters travels at a time."""
KNOWN = tuple(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
    if hasattr(torch.optim, name)
)
"""Optimizers that update each parameter from its own gradient and state alone."""


class ZeroPartition:
    """Which rank updates which parameter: the largest first, each is given to the rank that has least.

    All ranks ask for the same parameters in the same order.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_elements = [0] * num_ranks
        self._of: dict[Tensor, int] = {}

    def give(self, parameters: Sequence[Tensor]) -> None:
        """Find owners for those that have none yet."""
        for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
            self.of(parameter)

    def of(self, parameter: Tensor) -> int:
        """Return the rank that updates this parameter."""
        if parameter not in self._of:
            least = self._num_elements.index(min(self._num_elements))
            self._of[parameter] = least
            self._num_elements[least] += parameter.numel()
        return self._of[parameter]


def refuse_to_share_out(optimizer: Optimizer, sparse: dict[Tensor, str]) -> None:
    """Raise OptimizerError where an optimizer's parameters cannot be shared out. sparse: weight -> name."""
    kind = type(optimizer)
    # A subclass may wrap its parent's method anew, for hooks.
    if inspect.unwrap(kind.step) not in [inspect.unwrap(known.step) for known in KNOWN]:
        raise OptimizerError(
            f"zero_optimizer=True: {kind.__name__} is not known to update each parameter from its own gradient alone, "
            f"so that its parameters cannot be shared out among ranks. Use one of "
            f"{', '.join(known.__name__ for known in KNOWN)}, or set zero_optimizer=False."
        )
    found = next((sparse[p] for p in _parameters(optimizer) if p in sparse), None)
    if found is not None:
        raise OptimizerError(
            f"zero_optimizer=True: '{found}' has sparse gradients, and all of its rows would travel after every step. "
            "Set sparse=False for it, use strategy='torchrec_sharded', which shards it, or set zero_optimizer=False."
        )


def share_out(optimizer: Optimizer, owners: ZeroPartition, rank: int) -> Callable[[], None]:
    """Let every step update on each rank the parameters that it owns, and then send them; returns an undo.

    Steps are collective from then on. State that the optimizer has made for others' parameters is dropped.
    """
    owners.give([p for p in _parameters(optimizer) if p.requires_grad])
    for parameter in [p for p in optimizer.state if owners.of(p) != rank]:  # Adagrad's is there from the beginning
        del optimizer.state[parameter]
    hidden: list[tuple[Tensor, Tensor | None]] = []

    def hide() -> None:
        owners.give([p for p in _parameters(optimizer) if p.requires_grad])  # groups may have been added, or unfrozen
        for parameter in _parameters(optimizer):
            if parameter.grad is not None and owners.of(parameter) != rank:
                hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            hide()
            return None

        def then_hide() -> Any:
            result = closure()  # clips by the norm of all gradients
            hide()
            return result

        return ((args[0], then_hide, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": then_hide})

    def after(*_: Any) -> None:
        for parameter, gradient in hidden:
            parameter.grad = gradient
        hidden.clear()
        _send([p for p in _parameters(optimizer) if p.requires_grad], owners, rank)

    handles = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@torch.no_grad()
def _send(parameters: list[Tensor], owners: ZeroPartition, rank: int) -> None:
    """Collective. Give all ranks the owners' values, some of every owner's at a time, so that all links are busy."""
    of_rank: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        of_rank.setdefault(owners.of(parameter), []).append(parameter)
    for together in zip_longest(*(_chunks(owner, of_rank[owner]) for owner in sorted(of_rank))):
        travelling = []
        for owner, chunk in filter(None, together):
            if owner == rank:
                values = torch.cat([p.detach().reshape(-1) for p in chunk])
            else:
                values = chunk[0].new_empty(sum(p.numel() for p in chunk))
            travelling.append((owner, chunk, values, dist.broadcast(values, owner, async_op=True)))
        for owner, chunk, values, work in travelling:
            work.wait()
            if owner != rank:
                for parameter, value in zip(chunk, values.split([p.numel() for p in chunk]), strict=True):
                    parameter.copy_(value.view(parameter.shape))


def _chunks(owner: int, parameters: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield parameters of one type and device that travel together."""
    chunk: list[Tensor] = []
    num_bytes = 0
    for parameter in parameters:
        alike = not chunk or (parameter.dtype, parameter.device) == (chunk[0].dtype, chunk[0].device)
        if chunk and not (alike and num_bytes + parameter.nbytes <= CHUNK_BYTES):
            yield owner, chunk
            chunk, num_bytes = [], 0
        chunk.append(parameter)
        num_bytes += parameter.nbytes
    if chunk:
        yield owner, chunk
