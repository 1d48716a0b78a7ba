"""Puts sharded collections in the place of unsharded ones, and back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule, ShardedTensor, ShardingEnv

from lightning_distrec._compat.fbgemm import fbgemm_kernels
from lightning_distrec._compat.torchrec import (
    attach_fused_optimizer,
    detach_fused_optimizer,
    free_unsharded_tables,
    free_weights,
    silence_torchrec,
)
from lightning_distrec.chunks import Chunk
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.data_parallel_tables import make_freezable
from lightning_distrec.sharding.initial_weights import (
    TableShard,
    copy_from_full,
    initialise,
    pieces_of,
    sharded_weights,
    spread,
)
from lightning_distrec.sharding.proxies import ShardedProxy, make_proxy
from lightning_distrec.sharding.quantized_comms import QuantizedComms
from lightning_distrec.sharding.row_gradients import LocalShard, give_gradients, local_shards_of
from lightning_distrec.sharding.sharders import ShardingByTable, sharder_of
from lightning_distrec.sharding.tables import Table

FusedArguments = Mapping[str, tuple[dict[str, Any], str]]
"""Full name of a table -> FBGEMM's arguments for its in-backward optimizer, and the label of its param group; tables
of one label share a kernel."""


class ShardedTables:
    """The tables of one module while they are sharded."""

    def __init__(
        self, root: nn.Module, tables: list[Table], plan: ShardingByTable, sharded: dict[str, ShardedModule]
    ) -> None:
        self.tables = tables
        self.plan = plan
        self.sharded = sharded
        """Path of a collection, or of a plain embedding -> torchrec's sharded module."""
        self.proxies: dict[str, ShardedProxy] = {}
        """Path -> what stands there in the module tree while the tables are sharded."""
        self.shards: dict[str, list[LocalShard]] = {}
        """Full name of a table -> this rank's part of it; one empty shard where it has none."""
        self.kernels: list[tuple[Any, list[LocalShard]]] = []
        """FBGEMM's kernels on this rank, each with the shards in its memory."""
        self.known_keys: dict[str, list[str]] = {}
        """Path -> the features in the order of the first call, which torchrec's module remembers for its life."""
        self._root = ref(root)  # the registry below is keyed by it, weakly

    def tables_of(self, path: str) -> list[Table]:
        """Return the tables of the collection at `path`, in its order."""
        return [table for table in self.tables if table.collection == path]

    def weights(self) -> dict[str, Tensor]:
        """Return the tables' weights by full name, as ShardedTensors (or whole, where every rank has all rows)."""
        return {
            name: weight
            for path, module in self.sharded.items()
            for name, weight in sharded_weights(module, self.tables_of(path)).items()
        }

    def pieces(self) -> dict[str, list[TableShard]]:
        """Return the tables' pieces on all ranks by full name."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        return {name: pieces_of(weight, num_ranks, rank) for name, weight in self.weights().items()}

    def pieces_of(self, name: str) -> list[TableShard]:
        """Return the pieces on all ranks of one table, by its full name."""
        table = next(table for table in self.tables if table.full_name == name)
        weight = sharded_weights(self.sharded[table.collection], [table])[name]
        return pieces_of(weight, dist.get_world_size(), dist.get_rank())

    def parameters(self) -> dict[str, list[nn.Parameter]]:
        """Return this rank's part of every table by full name, as optimizers step on it."""
        return {name: [shard.weight for shard in shards] for name, shards in self.shards.items()}

    def keys_in_tree(self) -> dict[str, str]:
        """Return key of a table in the root's state_dict -> its full name; a module with two names has two keys."""
        paths = self._module().named_modules(remove_duplicate=False)
        at = {id(module): path for path, module in self.proxies.items()}
        return {
            f"{path}.{table.key.removeprefix(f'{table.collection}.')}": table.full_name
            for path, module in paths
            if id(module) in at
            for table in self.tables_of(at[id(module)])
        }

    def sharded_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that only this rank has."""
        return [shard.weight for shards in self.shards.values() for shard in shards if not shard.replicated]

    def set_sparse_gradient(self, name: str, rows_only: bool) -> None:
        """Choose whether a table's gradient, where it is kept, holds the touched rows only."""
        for shard in self.shards[name]:
            shard.sparse = rows_only

    def keep_gradients(self, rows_only: Mapping[str, bool]) -> None:
        """Leave the gradients of these tables, by full name, on their shards, for the user's optimizer.

        All tables of a kernel are kept, or none. rows_only: full name -> whether only the touched rows' are kept.
        """
        for name, only in rows_only.items():
            self.set_sparse_gradient(name, only)
        kept = {id(shard) for name in rows_only for shard in self.shards[name]}
        for kernel, shards in self.kernels:
            if any(id(shard) in kept for shard in shards):
                assert all(id(shard) in kept for shard in shards)
                give_gradients(kernel, shards)

    @contextmanager
    def full_numel(self) -> Iterator[None]:
        """Inside of the context `numel` of a table's parameter says how many elements the whole table has."""
        parts = [(table, shard) for table in self.tables for shard in self.shards[table.full_name]]
        counted: set[str] = set()
        for table, shard in parts:
            size = 0 if table.full_name in counted else table.config.num_embeddings * table.config.embedding_dim
            counted.add(table.full_name)
            shard.weight.numel = partial(int, size)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for _, shard in parts:
                del shard.weight.numel

    def replicated(self) -> list[tuple[str, nn.Parameter]]:
        """Return the names and parameters of the root that every rank holds alike: all but the shards.

        And but embeddings with max_norm, which renorm the rows that a rank looks up, on that rank, under any DDP.
        """
        own = {id(weight) for weight in self.sharded_parameters()}
        for module in self._module().modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                own.add(id(module.weight))
        return [(name, p) for name, p in self._module().named_parameters() if id(p) not in own]

    def note_looked_up_tables(self, path: str, used: set[str] | None) -> None:
        """The lookup of the collection at `path` that begins now will put into `used` the tables that get gradients."""
        for table in self.tables_of(path):
            for shard in self.shards[table.full_name]:
                shard.used = used

    def learns(self, name: str) -> bool:
        """Whether the table's weight needs a gradient now: freezing and unfreezing is followed at every lookup."""
        return self.shards[name][0].weight.requires_grad

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

    def fused_state(self) -> dict[int, list[Tensor]]:
        """Return id of a shard -> FBGEMM's state of its optimizer, in the kernel's memory; see `state_keys`."""
        return {
            id(shard): list(state)
            for kernel, shards in self.kernels
            for shard, state in zip(shards, kernel.split_optimizer_states(), strict=False)  # none for SGD
        }

    def load(self, name: str, weight: Any) -> None:
        """Take this rank's part of a table, by its full name, out of `weight`: a whole tensor, or one in a file.

        Rows that `weight` does not have stay as they are.
        """
        pieces = self.pieces_of(name)
        if isinstance(weight, Tensor):
            copy_from_full(pieces, weight)
        else:
            weight.read_into(_chunks_of(pieces))

    def put_originals_back(self) -> None:
        """Put the unsharded collections, which hold no rows, back into the module; the shards stay here."""
        for table in self.tables:
            table.parameter.requires_grad_(self.learns(table.full_name))
        for original in self._originals().values():
            original.__dict__.pop("forward", None)
        _replace(self._module(), {self.proxies[path]: original for path, original in self._originals().items()})

    def put_proxies_back(self) -> None:
        """Undo `put_originals_back`."""
        for path, original in self._originals().items():
            original.forward = _refuse_forward(path)  # type: ignore[method-assign]
        _replace(self._module(), {original: self.proxies[path] for path, original in self._originals().items()})

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Take the tables out of the module tree inside of the context, for what must not reach them."""
        places: dict[nn.Module, nn.Module] = {module: nn.Module() for module in self.proxies.values()}
        _replace(self._module(), places)
        try:
            yield
        finally:
            _replace(self._module(), {place: module for module, place in places.items()})

    def hand_over(self, tables: list[Table]) -> dict[str, list[TableShard]]:
        """After `put_originals_back`: return the rows in pieces for the next sharding, by full name.

        tables: those of the next sharding. Where the user has put another collection in the place of one that was
        sharded here, it brings rows of its own, and ours are not returned.
        On GPUs the rows wait on the host and the shards are given up, so that the device never holds two sets of them.
        """
        originals = set(self._originals().values())
        kept = {table.full_name for table in tables if table.original in originals}
        pieces = {name: ps for name, ps in self.pieces().items() if name in kept}
        if any(p.tensor is not None and p.tensor.is_cuda for ps in pieces.values() for p in ps):
            pieces = {name: [_on_host(piece) for piece in ps] for name, ps in pieces.items()}
            self.sharded, self.proxies, self.shards, self.kernels = {}, {}, {}, []
            _by_module.pop(self._module(), None)
        return pieces

    def _originals(self) -> dict[str, nn.Module]:
        return {table.collection: table.original for table in self.tables}

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
    plan: ShardingByTable,
    fused: FusedArguments,
    device: torch.device,
    held: Mapping[str, list[TableShard]],
    seed: int,
    comms: QuantizedComms,
) -> ShardedTables:
    """Collective. Shard the tables by the plan, in place in `root`, and bring their rows to the shards.

    fused: for every table that is not data_parallel.
    held: rows of an earlier sharding by full name; other tables keep the rows of rank 0's unsharded weight, as DDP
    would, or get new ones by `seed` where they were built on meta.
    comms: the types in which rows and gradients travel.
    """
    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    # torchrec initialises shards, a different number of draws on each rank; the user's generators must stay alike.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        sharded = _make_shards(tables, plan, fused, env, device, comms)
        result = ShardedTables(root, tables, plan, sharded)
        _bring_rows(result, device, held, seed)
    for path, module in sharded.items():
        mine = result.tables_of(path)
        kernels = [(kernel, local_shards_of(kernel)) for kernel in fbgemm_kernels(module)]
        result.kernels += kernels
        result.shards |= _by_table(module, mine, [shard for _, shards in kernels for shard in shards])
        result.proxies[path] = _proxy(module, mine, result.shards)
    for name, pieces in result.pieces().items():
        _note_places(result.shards[name], pieces)
    for module in sharded.values():
        free_unsharded_tables(module)
    for table in tables:
        free_weights(table.module)
        if table.plain is not None:
            table.plain.weight = table.parameter
    result.put_proxies_back()
    _by_module[root] = result
    return result


def _make_shards(
    tables: list[Table],
    plan: ShardingByTable,
    fused: FusedArguments,
    env: ShardingEnv,
    device: torch.device,
    comms: QuantizedComms,
) -> dict[str, ShardedModule]:
    sharded: dict[str, ShardedModule] = {}
    for path in dict.fromkeys(table.collection for table in tables):
        mine = [table for table in tables if table.collection == path]
        for table in mine:
            if table.full_name in fused:
                attach_fused_optimizer(table.parameter, *fused[table.full_name])
        parameter_sharding = {table.name: plan[table.full_name] for table in mine}
        with silence_torchrec():
            sharded[path] = sharder_of(mine[0], comms).shard(mine[0].module, parameter_sharding, env, device, path)
        for table in mine:
            detach_fused_optimizer(table.parameter)
    return sharded


def _bring_rows(result: ShardedTables, device: torch.device, held: Mapping[str, list[TableShard]], seed: int) -> None:
    rank, pieces = dist.get_rank(), result.pieces()
    for table in result.tables:
        targets = pieces[table.full_name]
        if table.full_name in held:
            spread(held[table.full_name], targets, device)
        elif table.parameter.is_meta:
            initialise(table, targets, seed)
        else:
            rows, columns = table.parameter.shape
            spread([TableShard(0, 0, 0, rows, columns, table.parameter if rank == 0 else None)], targets, device)


def _replace(root: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Put each value wherever its key is in `root`: a collection with several names keeps them all."""
    for path, module in list(root.named_modules(remove_duplicate=False)):
        if module in new:
            parent, _, name = path.rpartition(".")
            setattr(root.get_submodule(parent), name, new[module])


def refuse_foreign_shards(root: nn.Module) -> None:
    """Raise ShardingError where `root` holds tables that were sharded in another module, whose plan is not known."""
    present = sharded_tables_of(root)
    known = set(present.proxies.values()) if present is not None else set()
    for path, module in root.named_modules():
        if isinstance(module, (ShardedProxy, ShardedModule)) and module not in known:
            raise ShardingError(
                f"'{path}' was sharded as a part of another LightningModule. Train or evaluate it inside of that one, "
                "or load that one's checkpoint into the unsharded collections of this one."
            )


def _by_table(sharded: ShardedModule, tables: list[Table], shards: list[LocalShard]) -> dict[str, list[LocalShard]]:
    """Return this rank's part of each table of a collection, by full name; `shards` are those in kernels."""
    found: dict[str, list[LocalShard]] = {table.full_name: [] for table in tables}
    full_names = {table.name: table.full_name for table in tables}
    for shard in shards:
        found[full_names[shard.table]].append(shard)
    for table in tables:
        mine = found[table.full_name]
        weight = sharded.get_parameter(table.local_key)
        if not mine and weight.numel():  # data_parallel: torchrec's DDP has its hands on this very parameter
            mine.append(LocalShard(table.name, make_freezable(weight), sparse=False, replicated=True))
        elif not mine:
            empty = torch.empty(0, table.config.embedding_dim, device=weight.device)  # optimizers ask for columns
            mine.append(LocalShard(table.name, nn.Parameter(empty)))
        for shard in mine:
            shard.weight.requires_grad_(table.parameter.requires_grad)
    return found


def _note_places(shards: list[LocalShard], pieces: list[TableShard]) -> None:
    """Tell this rank's shards of a table which rectangle of it they are."""
    at = {piece.tensor.data_ptr(): piece for piece in pieces if piece.tensor is not None and piece.tensor.numel()}
    for shard in shards:
        if shard.weight.numel():
            piece = at[shard.weight.data_ptr()]
            shard.row, shard.column = piece.row, piece.column


def _proxy(sharded: ShardedModule, tables: list[Table], shards: Mapping[str, list[LocalShard]]) -> ShardedProxy:
    path = tables[0].collection
    prefix = f"{path}."
    keys = {table.key.removeprefix(prefix): table.local_key for table in tables}
    weights = {t.key.removeprefix(prefix): [shard.weight for shard in shards[t.full_name]] for t in tables}
    return make_proxy(tables[0].original, path, sharded, keys, weights, partial(_load, sharded))


def _chunks_of(pieces: list[TableShard]) -> list[Chunk]:
    return [Chunk((p.row, p.column), p.tensor) for p in pieces if p.tensor is not None and p.tensor.numel()]


@torch.no_grad()
def _load(sharded: ShardedModule, name: str, value: Any) -> str:
    """Load one table of `sharded`, by its name in the state_dict; `value` whole, in a file, or sharded in this way."""
    target = sharded.state_dict()[name]
    if tuple(value.size()) != tuple(target.size()):
        return f"the table is {tuple(target.size())}, but there is {tuple(value.size())} to load into it."
    pieces = pieces_of(target, dist.get_world_size(), dist.get_rank())
    if isinstance(value, Tensor) and not isinstance(value, ShardedTensor):
        copy_from_full(pieces, value)
        return ""
    if not isinstance(value, ShardedTensor):
        try:
            value.read_into(_chunks_of(pieces))
        except ValueError as error:
            return f"{error}; load a checkpoint of trainer.save_checkpoint."
        return ""
    mine = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
    for piece in pieces:
        if piece.tensor is None:
            continue
        source = mine.get((piece.row, piece.column))
        if source is None or source.shape != piece.tensor.shape:
            return "the table was cut otherwise when this was saved; load a checkpoint of trainer.save_checkpoint."
        piece.tensor.copy_(source)
    return ""


def _refuse_forward(path: str) -> Any:
    def forward(*args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingError(
            f"the unsharded collection of '{path}' was called while its tables are sharded. Call it through the module "
            f"(self.{path}), not through a reference that was kept elsewhere, in a list for example."
        )

    return forward


def _on_host(piece: TableShard) -> TableShard:
    tensor = None if piece.tensor is None else piece.tensor.cpu()
    return TableShard(piece.rank, piece.row, piece.column, piece.num_rows, piece.num_columns, tensor)
