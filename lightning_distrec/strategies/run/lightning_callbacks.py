"""Lightning's own callbacks that walk a module's parameters: what they get when those are shards."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_distrec._compat.lightning import average_model, set_average_model
from lightning_distrec.sharding.shard_access import rewriting, write_back

if TYPE_CHECKING:  # torchrec, which modules without tables have no use for
    from lightning_distrec.sharding.sharded_tables import ShardedTables

FullState = Callable[[], dict[str, Any]]
"""Collective. Returns the module's state_dict, with full tables on rank 0."""


def adapt_callbacks(
    trainer: Trainer, module: LightningModule, tables: "ShardedTables | None", full_state: FullState
) -> None:
    """Let averages be kept shard by shard, and summaries count full tables; called after sharding."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            copies = WeightCopies(module, full_state)
            # Callback.setup has made it from the unsharded module.
            average = average_model(callback)
            if isinstance(average, AveragedModel):
                average.module = copies
            else:
                set_average_model(callback, copies)
        elif isinstance(callback, ModelSummary) and tables is not None:
            _count_full_tables(callback, tables)


class WeightCopies(nn.Module):
    """A copy of every parameter and buffer that this rank has, in the module's order; averages are kept in it.

    Element by element, an average of shards is the shard of the average. `state_dict` is that of the module with these
    values, with full tables on rank 0: collective, and it uses the module's own memory for a moment.
    """

    def __init__(self, module: nn.Module, full_state: FullState) -> None:
        super().__init__()
        self._source = (module,)  # in a tuple, so that it does not become a child
        self._full_state = full_state
        write_back()
        # Under names of their own: those of the module have dots, which parameters may not have.
        for i, parameter in enumerate(module.parameters()):
            copied: Any = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            if hasattr(parameter, "place"):  # a guarded shard (sharding/shard_weight.py); its copy is another
                copied.__class__, copied.place = type(parameter), parameter.place
            self.register_parameter(f"p{i}", copied)
        for i, buffer in enumerate(module.buffers()):
            self.register_buffer(f"b{i}", buffer.detach().clone())

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the copies. Whoever asks for them reads the module's parameters next."""
        write_back()
        return super().parameters(recurse)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Collective. Return the full state, under the names of the module that was copied."""
        # torch passes `destination` for children, and none for the root, which Lightning calls.
        destination = {} if destination is None else destination
        with self._exchanged():
            state = {key: value.clone() for key, value in self._full_state().items()}
        destination.update({f"{prefix}{key}": value for key, value in state.items()})
        return destination

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, _: Any, __: bool, missing: list[str], *error_lists: list[str]
    ) -> None:
        unexpected, errors = error_lists
        local_state = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        with self._exchanged():
            try:
                missing_keys, unexpected_keys = self._source[0].load_state_dict(local_state, strict=False)
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
    def _exchange(self) -> None:
        # Exchanged and not copied: the module's state_dict then has the averages, and a second exchange undoes it.
        trained = [*self._source[0].parameters(), *self._source[0].buffers()]
        with rewriting():
            for copy, other in zip([*self.parameters(), *self.buffers()], trained, strict=True):
                value = copy.detach().clone()
                copy.copy_(other)
                other.copy_(value)


def _count_full_tables(callback: ModelSummary, tables: "ShardedTables") -> None:
    def on_fit_start(trainer: Trainer, module: LightningModule) -> None:
        del callback.on_fit_start  # only once: the class's method serves later runs
        with _full_numel(tables):
            type(callback).on_fit_start(callback, trainer, module)

    callback.on_fit_start = on_fit_start  # type: ignore[method-assign, assignment]


@contextmanager
def _full_numel(tables: "ShardedTables") -> Iterator[None]:
    """Inside of the context `numel` of a table's parameter is that of the unsharded table."""
    # Lightning's model summary asks each parameter for numel(): an instance attribute hides Tensor's method.
    sized = [(table, shard) for table in tables.tables for shard in tables.shards[table.full_name]]
    counted: set[str] = set()
    for table, shard in sized:
        # Several shards of a table on this rank: the first has the table's size, the others 0.
        size = 0 if table.full_name in counted else table.config.num_embeddings * table.config.embedding_dim
        counted.add(table.full_name)
        shard.weight.numel = partial(int, size)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for _, shard in sized:
            del shard.weight.numel
