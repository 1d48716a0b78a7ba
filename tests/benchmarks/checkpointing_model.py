"""What is saved and loaded: torchrec's DLRM with Adagrad, its tables and their state filled with
numbers known again.

What a row holds follows from its place in its table and a seed, so that whatever was saved by some
ranks can be checked bitwise by others, however they cut it.
"""

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.distributed.types import ShardedTensor

from lightning_distrec.checkpoint.contents import read_contents
from lightning_distrec.checkpoint.lazy_tensors import collect_tensors, read_blocks
from lightning_distrec.chunks import LazyTensor
from tests.benchmarks.performance_model import (
    DIM,
    LEARNING_RATE,
    NUM_TABLES,
    Batches,
    as_dict,
    make_net,
    table_bytes,
)

ROWS, QUICK_ROWS = 2**19, 49 * 2**9
"""Of each of the 8 tables: 1 GiB of weights and 1 GiB of state; 49 MiB of each."""
BATCHES, ENDLESS = 32, 2**17
"""Different batches, and how many the loader has."""
_ROWS_AT_ONCE = 4096
_FACTOR, _FRACTION, _ONE = 0x5851F42D, 0x7FFFFF, 0x3F800000
"""Any odd number; the 23 bits behind the point of a float32; 1.0."""


def tensor_bytes(num_rows: int) -> int:
    """Return the bytes of all tables and of their Adagrad state."""
    return 2 * table_bytes(num_rows)


class SavedDLRM(pl.LightningModule):
    """The net as one would train it; its tables are made by the strategy, on the ranks that hold
    them."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = make_net(self.num_rows)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert self.net is not None
        logits = self.net(batch["dense"], batch["ids"]).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=LEARNING_RATE)


def endless_loader(num_rows: int, rank: int) -> DataLoader[Any]:
    """Return a loader that outlasts every measurement; the trainer is stopped."""
    return Batches(num_rows, BATCHES, rank).loader(as_dict, ENDLESS)


def sharded_tensors(trainer: pl.Trainer) -> dict[str, ShardedTensor]:
    """Return torchrec's own state of the tables and of their optimizers, in the shards' memory:
    what dcp.save takes.

    Of a table that has no rows on this rank, the optimizer has no state here.
    """
    state: dict[str, Any] = {}
    for path, module in trainer.strategy.run_tables.shards.sharded.items():  # type: ignore[attr-defined]
        for key, value in module.state_dict().items():
            state[f"{path}.{key}"] = value
        for table, values in module.fused_optimizer.state_dict()["state"].items():
            for key, value in values.items():
                state[f"optimizer.{table}.{key}"] = value
    return {name: value for name, value in state.items() if isinstance(value, ShardedTensor)}


def local_shards(tensors: dict[str, ShardedTensor]) -> list[Tensor]:
    """Return this rank's shards."""
    return [shard.tensor.detach() for tensor in tensors.values() for shard in tensor.local_shards()]


def fill(tensors: dict[str, ShardedTensor], seed: int) -> None:
    """Give this rank's shards what is to be found again."""
    for name, tensor in tensors.items():
        for shard in tensor.local_shards():
            for rows, row in _blocks(shard.tensor.detach(), shard.metadata.shard_offsets[0]):
                _known(rows, name, seed, row, shard.metadata.shard_offsets[1])


def must_hold(tensors: dict[str, ShardedTensor], seed: int, label: str) -> None:
    """Raise AssertionError where this rank's shards do not hold what `fill` wrote on any ranks.
    what: for the error."""
    for name, tensor in tensors.items():
        for shard in tensor.local_shards():
            offsets = shard.metadata.shard_offsets
            _must_be_known(shard.tensor.detach(), name, seed, offsets[0], offsets[1], label)


def must_be_saved(path: Path, seed: int, rank: int, num_ranks: int) -> None:
    """Raise AssertionError where our folder does not hold what `fill` wrote; each rank looks at
    some of the tensors."""
    tensors = tables_in(path)
    assert len(tensors) == 2 * NUM_TABLES, f"{path} holds {len(tensors)} tensors of tables"
    for name, whole in list(tensors.items())[rank::num_ranks]:
        row = 0
        for piece in read_blocks(whole):
            _must_be_known(piece, name, seed, row, 0, str(path))
            row += len(piece)
        assert row == whole.shape[0], f"{path}: '{name}' has {row} rows"


def tables_in(path: Path) -> dict[str, LazyTensor]:
    """Return the tables in our folder, and their state, by the names that they have there."""
    tensors = collect_tensors(read_contents(path).checkpoint)
    return {name: whole for name, whole in tensors.items() if "t_f" in name and whole.shape}


def _must_be_known(tensor: Tensor, name: str, seed: int, row: int, column: int, label: str) -> None:
    expected = torch.empty(_ROWS_AT_ONCE, tensor.shape[1])
    for rows, first in _blocks(tensor, row):
        _known(expected[: len(rows)], name, seed, first, column)
        is_same = torch.equal(rows.view(torch.int32), expected[: len(rows)].view(torch.int32))
        assert is_same, f"{label}: '{name}' is not what was saved, from row {first} on"


def _blocks(tensor: Tensor, row: int) -> Iterator[tuple[Tensor, int]]:
    """Yield some rows at a time, which stay in the cache, and the number of the first of them in
    the whole table."""
    for first in range(0, len(tensor), _ROWS_AT_ONCE):
        yield tensor[first : first + _ROWS_AT_ONCE], row + first


def _known(out: Tensor, name: str, seed: int, row: int, column: int) -> None:
    """Write floats from 1 to 2 that follow from the place in the table, its name and the seed."""
    number = (zlib.crc32(_plain_name(name).encode()) + 7919 * seed) % 2**20
    bits = out.view(torch.int32)
    rows = torch.arange(row, row + out.shape[0], dtype=torch.int32).mul_(DIM).add_(number)
    columns = torch.arange(column, column + out.shape[1], dtype=torch.int32)
    torch.add(rows.unsqueeze(1), columns, out=bits)
    bits.mul_(_FACTOR).bitwise_and_(_FRACTION).bitwise_or_(_ONE)


def _plain_name(name: str) -> str:
    """Return which table a tensor belongs to, and whether it is its weight, for names of ours and
    of torchrec's."""
    table = re.search(r"t_f\d+", name)
    assert table is not None, name
    kind = "state" if "sum" in name or "momentum" in name else "weight"
    return f"{table[0]} {kind}"
