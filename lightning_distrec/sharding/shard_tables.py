"""Puts sharded collections in the place of unsharded ones, and back."""

from collections.abc import Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule, ShardingEnv

from lightning_distrec._compat import attach_fused_optimizer, detach_fused_optimizer, forget_rows, torchrec_quiet
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.initial_weights import (
    Piece,
    copy_from_whole,
    initialise,
    pieces_of,
    spread,
    table_weights,
)
from lightning_distrec.sharding.plan import Plan, sharder_of
from lightning_distrec.sharding.tables import Table

FusedArguments = Mapping[str, tuple[dict[str, Any], str]]
"""Full name of a table -> FBGEMM's arguments for its in-backward optimizer, and the label of its param group."""


class ShardedTables:
    """The tables of one module while they are sharded."""

    def __init__(self, root: nn.Module, tables: list[Table], plan: Plan, sharded: dict[str, ShardedModule]) -> None:
        self.tables = tables
        self.plan = plan
        self.sharded = sharded
        """Path of a collection -> torchrec's sharded module."""
        self._root = ref(root)  # the registry below is keyed by it, weakly

    def tables_of(self, path: str) -> list[Table]:
        """Return the tables of the collection at `path`, in its order."""
        return [table for table in self.tables if table.collection == path]

    def weights(self) -> dict[str, Tensor]:
        """Return the tables' weights by full name, as ShardedTensors (or whole, where every rank has all rows)."""
        return {
            name: weight
            for path, module in self.sharded.items()
            for name, weight in table_weights(module, self.tables_of(path)).items()
        }

    def pieces(self) -> dict[str, list[Piece]]:
        """Return the tables' pieces on all ranks by full name."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        return {name: pieces_of(weight, num_ranks, rank) for name, weight in self.weights().items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's part of every table by full name, as optimizers step on it; empty where it has none."""
        found: dict[str, nn.Parameter] = {}
        for path, module in self.sharded.items():
            named = dict(module.named_parameters())
            found |= {table.full_name: named[table.local_key] for table in self.tables_of(path)}
        return found

    def fused_optimizers(self) -> dict[str, Any]:
        """Return torchrec's optimizer of each fused table that has rows on this rank, by full name."""
        found: dict[str, Any] = {}
        for path, module in self.sharded.items():
            names = {table.local_key: table.full_name for table in self.tables_of(path)}
            for _, optimizer in module.fused_optimizer.optimizers:  # type: ignore[union-attr]
                found |= {names[key]: optimizer for key in optimizer.params}
        return found

    def fill_optimizer_state(self, values: Mapping[str, float]) -> None:
        """Start the fused optimizers' state of the given tables, by full name, from these values."""
        optimizers = self.fused_optimizers()
        keys = {table.full_name: table.local_key for table in self.tables}
        for name, value in values.items():
            if name in optimizers:
                for state in optimizers[name].state[optimizers[name].params[keys[name]]].values():
                    for shard in state.local_shards():
                        shard.tensor.fill_(value)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take this rank's part out of whole tables, by full name, each (num_rows, dim) and present on every rank.

        Raises ShardingError: a table is missing or has another shape.
        """
        pieces = self.pieces()
        for table in self.tables:
            name = table.full_name
            wanted = (table.config.num_embeddings, table.config.embedding_dim)
            if name not in weights or tuple(weights[name].shape) != wanted:
                found = tuple(weights[name].shape) if name in weights else "nothing"
                raise ShardingError(
                    f"table '{name}' is {wanted[0]} x {wanted[1]}, but there is {found} to load into it."
                )
            copy_from_whole(pieces[name], weights[name])

    def take_back(self) -> dict[str, list[Piece]]:
        """Put the unsharded collections back, without rows, and return the rows in pieces for the next sharding."""
        pieces = self.pieces()
        if any(p.tensor is not None and p.tensor.is_cuda for ps in pieces.values() for p in ps):
            # Rows wait on the host, so that the device never holds two sets of them.
            pieces = {name: [_on_host(piece) for piece in ps] for name, ps in pieces.items()}
        root = self._root()
        assert root is not None
        originals = {table.collection: table.module for table in self.tables}
        for path, module in self.sharded.items():
            module.__dict__.pop("forward", None)
            originals[path].__dict__.pop("forward", None)
            _replace(root, module, originals[path])
        self.sharded = {}
        _by_module.pop(root, None)
        return pieces


_by_module: WeakKeyDictionary[nn.Module, ShardedTables] = WeakKeyDictionary()


def sharded_tables_of(root: nn.Module) -> ShardedTables | None:
    """Return the tables that are sharded in `root`, by whichever strategy did it, or None."""
    return _by_module.get(root)


def shard_tables(
    root: nn.Module,
    tables: list[Table],
    plan: Plan,
    fused: FusedArguments,
    device: torch.device,
    held: Mapping[str, list[Piece]],
    seed: int,
) -> ShardedTables:
    """Collective. Shard the tables by the plan, in place in `root`, and bring their rows to the shards.

    fused: for every table whose kernel updates it. held: rows of an earlier sharding by full name; other tables keep
    the rows of rank 0's unsharded weight, as DDP would, or get new ones by `seed` where they were built on meta.
    """
    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    sharded: dict[str, ShardedModule] = {}
    for path in dict.fromkeys(table.collection for table in tables):
        mine = [table for table in tables if table.collection == path]
        for table in mine:
            if table.full_name in fused:
                attach_fused_optimizer(table.parameter, *fused[table.full_name])
        parameter_sharding = {table.name: plan[table.full_name] for table in mine}
        with torchrec_quiet():
            sharded[path] = sharder_of(mine[0]).shard(mine[0].module, parameter_sharding, env, device, path)
        for table in mine:
            detach_fused_optimizer(table.parameter)
    result = ShardedTables(root, tables, plan, sharded)
    _bring_rows(result, device, held, seed)
    for path, module in sharded.items():
        original = result.tables_of(path)[0].module
        _replace(root, original, module)
        forget_rows(original)
        original.forward = _refuse_forward(path)  # type: ignore[assignment]
    _by_module[root] = result
    return result


def _bring_rows(result: ShardedTables, device: torch.device, held: Mapping[str, list[Piece]], seed: int) -> None:
    rank, pieces = dist.get_rank(), result.pieces()
    for table in result.tables:
        targets = pieces[table.full_name]
        if table.full_name in held:
            spread(held[table.full_name], targets, device)
        elif table.parameter.is_meta:
            initialise(table, targets, seed)
        else:
            rows, columns = table.parameter.shape
            spread([Piece(0, 0, 0, rows, columns, table.parameter if rank == 0 else None)], targets, device)


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is a child in `root`: a collection that two modules share stays shared."""
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if child is old:
                setattr(module, name, new)


def _refuse_forward(path: str) -> Any:
    def forward(*args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingError(
            f"the unsharded collection of '{path}' was called while its tables are sharded. Call it through the module "
            f"(self.{path}), not through a reference that was kept elsewhere, in a list for example."
        )

    return forward


def _on_host(piece: Piece) -> Piece:
    tensor = None if piece.tensor is None else piece.tensor.cpu()
    return Piece(piece.rank, piece.row, piece.column, piece.num_rows, piece.num_columns, tensor)
