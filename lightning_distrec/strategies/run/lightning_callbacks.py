"""Lightning's own callbacks that average a module's parameters: what they get when those are
shards."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_distrec._compat.lightning import AVERAGE, PRUNED
from lightning_distrec.errors import UnsupportedError
from lightning_distrec.sharding.weights.shard_access import rewriting, without_guards, write_back

FullState = Callable[[], dict[str, Any]]
"""Collective. Returns the module's state_dict, with full tables on rank 0."""


def adapt_callbacks(trainer: Trainer, module: LightningModule, full_state: FullState) -> None:
    """Let averages be kept shard by shard; called after sharding. Raises UnsupportedError: shards
    would be pruned."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            copies = WeightCopies(module, full_state)
            # Callback.setup has made it from the unsharded module.
            average = getattr(callback, AVERAGE)
            if isinstance(average, AveragedModel):
                average.module = copies
            else:
                setattr(callback, AVERAGE, copies)
        elif isinstance(callback, ModelPruning):
            refuse_pruned_shards(getattr(callback, PRUNED), module)


def refuse_pruned_shards(pruned: Iterable[tuple[nn.Module, str]], root: nn.Module) -> None:
    """Raise UnsupportedError: a parameter that is to be pruned is sharded. pruned: modules, and
    names in them."""
    modules = set(root.modules())
    for module, name in pruned:
        # A table's module has been replaced; which values are the smallest depends on the shards of
        # all ranks.
        if module not in modules or isinstance(getattr(module, name), DTensor):
            raise UnsupportedError(
                f"ModelPruning would prune '{name}' of {type(module).__name__}, which is sharded "
                "over the ranks: masks are made of a whole weight. Name layers that are not in "
                "parameters_to_prune, or use 'ddp_tuned'."
            )


class WeightCopies(nn.Module):
    """A copy of every parameter and buffer that this rank has, in the module's order; averages are
    kept in it.

    Element by element, an average of shards is the shard of the average. `state_dict` is that of
    the module with these values, with full tables on rank 0: collective, and it uses the module's
    own memory for a moment.
    """

    @without_guards
    def __init__(self, module: nn.Module, full_state: FullState) -> None:
        super().__init__()
        self._source = (module,)  # in a tuple, so that it does not become a child
        self._full_state = full_state
        write_back()
        # Under names of their own: those of the module have dots, which parameters may not have.
        for i, parameter in enumerate(module.parameters()):
            copied: Any = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            # a guarded shard (sharding/weights/shard_weight.py); its copy is another
            if hasattr(parameter, "place"):
                copied.__class__ = type(parameter)
                copied.place = parameter.place
            self.register_parameter(f"p{i}", copied)
        for i, buffer in enumerate(module.buffers()):
            self.register_buffer(f"b{i}", buffer.detach().clone())

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the copies. Whoever asks for them reads the module's parameters next."""
        write_back()
        return super().parameters(recurse)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Collective. Return the full state, under the names of the module that was copied."""
        # torch passes `destination` for children, and none for the root, which Lightning calls.
        destination = {} if destination is None else destination
        with self._exchanged():
            state = {key: value.clone() for key, value in self._full_state().items()}
        destination.update({f"{prefix}{key}": value for key, value in state.items()})
        return destination

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        _: Any,
        __: bool,
        missing: list[str],
        *error_lists: list[str],
    ) -> None:
        unexpected, errors = error_lists
        local_state = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        with self._exchanged():
            try:
                missing_keys, unexpected_keys = self._source[0].load_state_dict(
                    local_state, strict=False
                )
            except RuntimeError as error:
                errors.append(str(error))
                return
        missing += [f"{prefix}{key}" for key in missing_keys]
        unexpected += [f"{prefix}{key}" for key in unexpected_keys]

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    @without_guards
    def _exchange(self) -> None:
        # Exchanged and not copied: the module's state_dict then has the averages, and a second
        # exchange undoes it.
        trained = [*self._source[0].parameters(), *self._source[0].buffers()]
        with rewriting():
            for copy, other in zip([*self.parameters(), *self.buffers()], trained, strict=True):
                value = copy.detach().clone()
                copy.copy_(other)
                other.copy_(value)
