"""What checkpoints need to know of sharded tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_distrec.errors import CheckpointError

if TYPE_CHECKING:  # they load torchrec, which modules without tables have no use for
    from lightning_distrec.optimizers.translation import TableUpdate
    from lightning_distrec.sharding.sharded_tables import ShardedTables


class SavedTables(Protocol):
    """The sharded tables of a run, with what updates them."""

    @property
    def shards(self) -> ShardedTables:
        """The tables' shards on this rank."""

    @property
    def updates(self) -> Mapping[str, TableUpdate]:
        """Full name of a table -> what updates it."""

    @property
    def table_optimizers(self) -> list[Optimizer]:
        """The optimizers of tables alone."""

    @property
    def all_optimizers(self) -> list[Optimizer]:
        """Those of configure_optimizers, and those of tables alone."""

    def plan_files(self) -> dict[str, bytes]:
        """Return name -> content of the files that a checkpoint has about the plan."""

    def num_fused_steps(self, name: str) -> int:
        """Return how often the optimizer of a table that is updated inside of backward has stepped."""

    def set_fused_steps(self, name: str, num_steps: int) -> None:
        """Continue counting the steps of a table's optimizer from here."""


if TYPE_CHECKING:  # they load torchrec, which modules without tables do not need
    from lightning_distrec.sharding.row_gradients import LocalShard
    from lightning_distrec.sharding.tables import Table


def class_name(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class with its module."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def describe(shards: list[LocalShard], optimizer: Optimizer) -> dict[str, tuple[str, Any]] | None:
    """Return key -> how its value lies along the table, and its type or value; None if this rank has no rows."""
    shard = next((shard for shard in shards if shard.weight.numel()), None)
    if shard is None:
        return None
    described = {}
    rows, columns = shard.weight.shape
    kinds = {(rows, columns): "elements", (rows, 1): "columns of 1", (rows,): "rows"}
    for key, value in optimizer.state.get(shard.weight, {}).items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            described[key] = ("value", value.cpu() if isinstance(value, Tensor) else value)
        elif tuple(value.shape) in kinds:
            described[key] = (kinds[tuple(value.shape)], value.dtype)
        else:
            raise CheckpointError(
                f"table '{shard.table}': {class_name(optimizer)} keeps '{key}' of shape {tuple(value.shape)} for a "
                f"shard of {rows} x {columns}, which belongs to no rows of it and cannot be saved. Save with "
                "save_weights_only=True, or give the table another optimizer."
            )
    return described


def offsets_in_table(shard: LocalShard, dims: int, kind: str) -> tuple[int, ...]:
    """Return where a shard's state begins in that of the full table."""
    return (shard.row,) if dims == 1 else (shard.row, shard.column if kind == "elements" else 0)


def as_columns(tensor: Tensor) -> Tensor:
    """Return a tensor with one number per row as a column; one with two dimensions as it is."""
    return tensor.detach() if tensor.dim() == 2 else tensor.detach().unsqueeze(1)


def with_dims(tensor: Tensor, dims: int) -> Tensor:
    """Return FBGEMM's state of a shard with as many dimensions as the saved one has."""
    return tensor.detach().view(-1) if dims == 1 else as_columns(tensor)


def layout_of(name: str, key: str, shape: Sequence[int], table: Table, grow: bool) -> str:
    """Return how a saved tensor lies along the table. Raises CheckpointError: it has other rows or columns."""
    rows, dim = table.config.num_embeddings, table.config.embedding_dim
    fits = shape[0] == rows or (grow and shape[0] < rows)
    if fits and len(shape) == 1:
        return "rows"
    if fits and len(shape) == 2 and shape[1] in (dim, 1):
        return "elements" if shape[1] == dim else "columns of 1"
    raise CheckpointError(
        f"'{name}' is {rows} x {dim}, but the checkpoint's optimizer state '{key}' of it is {tuple(shape)}."
    )
