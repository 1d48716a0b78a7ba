"""Puts sharded collections in the place of unsharded ones, and back."""

from collections.abc import Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule, ShardingEnv

from lightning_distrec._compat import attach_fused_optimizer, detach_fused_optimizer, forget_rows, torchrec_quiet
from lightning_distrec.errors import RowsElsewhereError, ShardingError
from lightning_distrec.sharding.initial_weights import (
    Piece,
    copy_from_whole,
    initialise,
    pieces_of,
    spread,
    table_weights,
)
from lightning_distrec.sharding.plan import Plan, sharder_of
from lightning_distrec.sharding.tables import Collection, Table

FusedArguments = Mapping[str, tuple[dict[str, Any], str]]
"""Full name of a table -> FBGEMM's arguments for its in-backward optimizer, and the label of its param group."""


class ShardedTables:
    """The tables of one module while they are sharded."""

    def __init__(self, root: nn.Module, tables: list[Table], plan: Plan, sharded: dict[str, ShardedModule]) -> None:
        self.tables = tables
        self.plan = plan
        self.sharded = sharded
        """Path of a collection -> torchrec's sharded module."""
        self.still: list[tuple[str, nn.Parameter]] = []
        """Tables whose weight needs no gradient by full name, and the weight that stands for it."""
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

    def refuse_unfrozen(self) -> None:
        """Raise ShardingError where a frozen table's weight was made to need a gradient since the start."""
        for name, weight in self.still:
            if weight.requires_grad:
                raise ShardingError(
                    f"table '{name}' was frozen when fit began, and was unfrozen while training, which its shards do "
                    "not follow. Unfreeze it before fit, or call fit again."
                )

    def step_out(self) -> None:
        """Put the unsharded collections, which hold no rows, back into the module; the shards stay here."""
        parameters = {table.full_name: table.parameter for table in self.tables}
        for name, weight in self.still:
            parameters[name].requires_grad_(weight.requires_grad)
        for original in self._originals().values():
            original.__dict__.pop("forward", None)
        _replace(self._module(), {self.sharded[path]: original for path, original in self._originals().items()})

    def step_in(self) -> None:
        """Undo `step_out`."""
        for path, original in self._originals().items():
            original.forward = _refuse_forward(path)  # type: ignore[method-assign]
        _replace(self._module(), {original: self.sharded[path] for path, original in self._originals().items()})

    def hand_over(self, tables: list[Table]) -> dict[str, list[Piece]]:
        """After `step_out`: return the rows in pieces for the next sharding, by full name.

        tables: those of the next sharding. Where the user has put another collection in the place of one that was
        sharded here, it brings rows of its own, and ours are not returned.
        On GPUs the rows wait on the host and the shards are given up, so that the device never holds two sets of them.
        """
        originals = set(self._originals().values())
        kept = {table.full_name for table in tables if table.module in originals}
        pieces = {name: ps for name, ps in self.pieces().items() if name in kept}
        if any(p.tensor is not None and p.tensor.is_cuda for ps in pieces.values() for p in ps):
            pieces = {name: [_on_host(piece) for piece in ps] for name, ps in pieces.items()}
            for module in self.sharded.values():
                module.__dict__.pop("forward", None)
            self.sharded = {}
            _by_module.pop(self._module(), None)
        return pieces

    def _originals(self) -> dict[str, Collection]:
        return {table.collection: table.module for table in self.tables}

    def _module(self) -> nn.Module:
        root = self._root()
        assert root is not None
        return root


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

    fused: for every table whose kernel updates it.
    held: rows of an earlier sharding by full name; other tables keep the rows of rank 0's unsharded weight, as DDP
    would, or get new ones by `seed` where they were built on meta.
    """
    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    # torchrec initialises shards, a different number of draws on each rank; the user's generators must stay alike.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        sharded = _make_shards(tables, plan, fused, env, device)
        result = ShardedTables(root, tables, plan, sharded)
        _bring_rows(result, device, held, seed)
    for table in tables:
        forget_rows(table.module)
    result.step_in()
    for path, module in sharded.items():
        result.still += _hold_still(module, [t for t in result.tables_of(path) if not t.parameter.requires_grad])
        _answer_as_unsharded(module, result.tables_of(path))
    _by_module[root] = result
    return result


def _make_shards(
    tables: list[Table], plan: Plan, fused: FusedArguments, env: ShardingEnv, device: torch.device
) -> dict[str, ShardedModule]:
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
    return sharded


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


def _replace(root: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put each value wherever its key is in `root`: a collection with several names keeps them all."""
    for path, module in list(root.named_modules(remove_duplicate=False)):
        if module in new:
            parent, _, name = path.rpartition(".")
            setattr(root.get_submodule(parent), name, new[module])


def refuse_foreign_shards(root: nn.Module) -> None:
    """Raise ShardingError where `root` holds tables that were sharded in another module, whose plan is not known."""
    present = sharded_tables_of(root)
    known = set(present.sharded.values()) if present is not None else set()
    for path, module in root.named_modules():
        if isinstance(module, ShardedModule) and module not in known:
            raise ShardingError(
                f"'{path}' was sharded as a part of another LightningModule. Train or evaluate it inside of that one, "
                "or load that one's checkpoint into the unsharded collections of this one."
            )


class _RowsAreElsewhere(nn.Module):
    """What `embedding_bags[name]` of a sharded collection is: it has a weight for optimizers, and none for reading."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise RowsElsewhereError(
                "the weight of a sharded table was read, but its rows are on several ranks. To use rows, look them up "
                "through the collection; to get the whole table, call trainer.save_checkpoint on every rank."
            )
        return super().__getattr__(name)


def _hold_still(sharded: ShardedModule, tables: list[Table]) -> list[tuple[str, nn.Parameter]]:
    """Give frozen tables weights without a gradient, so that it can be seen when user code asks for one."""
    still = []
    for table in tables:
        child = sharded.get_submodule(table.local_key.removesuffix(".weight"))
        weight = child.get_parameter("weight")
        held_still = nn.Parameter(weight.detach(), requires_grad=False)
        child.register_parameter("weight", held_still)
        still.append((table.full_name, held_still))
    return still


def _answer_as_unsharded(sharded: ShardedModule, tables: list[Table]) -> None:
    """Give a sharded collection what user code may ask of the unsharded one."""
    original = tables[0].module
    for name in ("embedding_bag_configs", "is_weighted", "embedding_configs", "need_indices", "embedding_dim"):
        if hasattr(original, name):
            setattr(sharded, name, getattr(original, name))
    children = sharded.embedding_bags if tables[0].pooled else sharded.embeddings
    for child in children.children():  # type: ignore[union-attr]
        if type(child) is nn.Module:
            child.__class__ = _RowsAreElsewhere


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
