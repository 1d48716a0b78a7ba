"""Tables while they are sharded: their shards, kernels and proxies, and the module that they belong
to."""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakSet, ref

from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule

from lightning_distrec._compat.torch import apply_in_backward, in_backward_optimizers
from lightning_distrec._compat.torchrec_modules import fill_weight
from lightning_distrec.errors import ShardingError
from lightning_distrec.module_shards import tables_of_modules
from lightning_distrec.sharding.initial_weights import (
    TableShard,
    chunks_of,
    copy_from_full,
    gather_rows,
    sharded_weights,
    table_shards,
)
from lightning_distrec.sharding.mapping.state import AnyMapping
from lightning_distrec.sharding.proxies import ShardedProxy, replace_modules, replaced
from lightning_distrec.sharding.row_gradients import LocalShard, give_gradients
from lightning_distrec.sharding.sharders import ShardingByTable
from lightning_distrec.sharding.sharding_groups import ShardingGroups, do_nothing
from lightning_distrec.sharding.tables import Table
from lightning_distrec.sharding.weights.shard_access import SharedState, rewriting


class ShardedTables:
    """The tables of one module while they are sharded."""

    def __init__(
        self,
        root: nn.Module,
        tables: list[Table],
        plan: ShardingByTable,
        sharded: dict[str, ShardedModule],
        groups: ShardingGroups,
    ) -> None:
        self.tables = tables
        self.plan = plan
        self.groups = groups
        self.synchronize: Callable[[], None] = do_nothing
        """Collective. Makes replicas equal, where steps may pass before they are; a fit sets it."""
        self.sharded = sharded
        """Path of a collection, or of a plain embedding -> torchrec's sharded module."""
        self.proxies: dict[str, ShardedProxy] = {}
        """Path -> what stands there in the module tree while the tables are sharded."""
        self.shards: dict[str, list[LocalShard]] = {}
        """Full name of a table -> this rank's shards of it; one empty shard where it has none."""
        self.kernels: list[tuple[Any, list[LocalShard]]] = []
        """FBGEMM's kernels on this rank, each with the shards in its memory."""
        self.mappings: dict[str, AnyMapping] = {}
        """Full name of a table -> this rank's part of the mapping of its ids; none where ids are
        numbers of rows."""
        self.collisions: dict[nn.Module, nn.Module] = {}
        """torchrec's ManagedCollisionCollection -> what stands for it in the module tree."""
        self.fused_tables: list[str] = []
        """Full names of the tables that every backward updates, where their optimizer steps in one
        process."""
        self.known_keys: dict[str, list[str]] = {}
        """Path -> the features in the order of the first call, which torchrec's module remembers
        for its life."""
        self.state = SharedState(groups.sharding)
        self.originals = {table.collection: table.original for table in tables}
        """Path -> the unsharded collection, which holds no rows."""
        self._root = ref(root)  # weak, as the keys of `tables_of_modules` are
        _sharded.update(sharded.values())

    def tables_of(self, path: str) -> list[Table]:
        """Return the tables of the collection at `path`, in its order."""
        return [table for table in self.tables if table.collection == path]

    def weights(self) -> dict[str, Tensor]:
        """Return the tables' weights by full name, as ShardedTensors (plain tensors of
        data-parallel tables)."""
        weights: dict[str, Tensor] = {}
        for path, module in self.sharded.items():
            weights |= sharded_weights(module, self.tables_of(path))
        return weights

    def table_shards(self) -> dict[str, list[TableShard]]:
        """Return the tables' shards on all ranks by full name."""
        return {name: table_shards(weight, self.groups) for name, weight in self.weights().items()}

    def parameters(self) -> dict[str, list[nn.Parameter]]:
        """Return this rank's shards of every table by full name, as optimizers step on them."""
        parameters = {}
        for name, shards in self.shards.items():
            parameters[name] = [shard.weight for shard in shards]
        return parameters

    def keys_in_tree(self) -> dict[str, str]:
        """Return key of a table in the root's state_dict -> its full name; a module with two names
        has two keys."""
        paths = self._module().named_modules(remove_duplicate=False)
        proxy_paths = {id(module): path for path, module in self.proxies.items()}
        keys = {}
        for path, module in paths:
            if id(module) in proxy_paths:
                for table in self.tables_of(proxy_paths[id(module)]):
                    keys[f"{path}.{table.original_key}"] = table.full_name
        return keys

    def sharded_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that only this rank has."""
        shards = [shard for shards in self.shards.values() for shard in shards]
        return [shard.weight for shard in shards if not shard.replicated]

    def replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the names and parameters of the root that are the same on all ranks: all but the
        shards."""
        local_only = set(map(id, self.sharded_parameters()))
        parameters = []
        for name, p in self._module().named_parameters():
            if id(p) not in local_only:
                parameters.append((name, p))
        return parameters

    def keep_gradients(self, sparse: Mapping[str, bool]) -> None:
        """Leave the gradients of these tables on their shards, for the user's optimizer.

        All tables of a kernel are kept, or none. sparse: full name -> whether only the touched
        rows' are kept.
        """
        for name, touched_only in sparse.items():
            for shard in self.shards[name]:
                shard.sparse = touched_only
        self.keep_gradients_if(sparse.keys(), lambda: True)

    def keep_gradients_if(self, names: Set[str], are_kept: Callable[[], bool]) -> list[Any]:
        """Leave the gradients of these fused tables on their shards where `are_kept` says so in
        backward.

        names: all tables of their kernels. Returns the handles of hooks.
        """
        held = {id(shard) for name in names for shard in self.shards[name]}
        handles = []
        for kernel, shards in self.kernels:
            if any(id(shard) in held for shard in shards):
                # The hook replaces the output of a kernel for all of its tables.
                assert all(id(shard) in held for shard in shards)
                handles.append(give_gradients(kernel, shards, are_kept))
        return handles

    def note_used_tables(self, path: str, used: set[str] | None) -> None:
        """Let the lookup of the collection at `path` that begins now find which tables get
        gradients in `used`."""
        for table in self.tables_of(path):
            for shard in self.shards[table.full_name]:
                shard.used = used

    def learns(self, name: str) -> bool:
        """Whether the table's weight needs a gradient now: freezing and unfreezing is followed at
        every lookup."""
        return self.shards[name][0].weight.requires_grad

    def fused_optimizers(self) -> dict[str, Any]:
        """Return torchrec's optimizer of each fused table that has rows on this rank, by full
        name."""
        optimizers: dict[str, Any] = {}
        for path, module in self.sharded.items():
            names = {table.local_key: table.full_name for table in self.tables_of(path)}
            for _, optimizer in module.fused_optimizer.optimizers:  # type: ignore[union-attr]
                optimizers |= {names[key]: optimizer for key in optimizer.params}
        return optimizers

    def fill_optimizer_state(self, values: Mapping[str, float]) -> None:
        """Start the fused optimizers' state of the given tables, by full name, from these
        values."""
        states = self.fused_state()
        for name, value in values.items():
            for shard in self.shards[name]:
                for state in states.get(id(shard), ()):
                    state.fill_(value)

    def fused_state(self) -> dict[int, list[Tensor]]:
        """Return id of a shard -> FBGEMM's state of its optimizer, in the kernel's memory; see
        `state_keys`."""
        states = {}
        for kernel, shards in self.kernels:
            # none for SGD
            for shard, state in zip(shards, kernel.split_optimizer_states(), strict=False):
                states[id(shard)] = list(state)
        return states

    def load(self, name: str, weight: Any) -> None:
        """Load this rank's shards of a table by full name from a full tensor or one in a file, the
        rows that it has."""
        shards = table_shards(self._weight(name), self.groups)
        with rewriting():
            if isinstance(weight, Tensor):
                copy_from_full(shards, weight)
            else:
                weight.read_into(chunks_of(shards))

    def full_weight(self, name: str, first: int, last: int) -> Tensor:
        """Collective. Return rows `first` to `last` (not included) of a table, by full name, on
        every host."""
        # Replicas may differ between two synchronisations, and ranks of all groups must return the
        # same rows.
        self.synchronize()
        weight = self._weight(name)
        device = self.shards[name][0].weight.device
        return gather_rows(table_shards(weight, self.groups), first, last, weight.dtype, device)

    def put_originals_back(self) -> None:
        """Put the unsharded collections, which hold no rows, back into the module; the shards stay
        here."""
        for table in self.tables:
            # User code may have frozen the table while a proxy was in its place.
            table.parameter.requires_grad_(self.learns(table.full_name))
        for original in self.originals.values():
            original.__dict__.pop("forward", None)  # see `put_proxies_back`
        back = {new: original for original, new in self.collisions.items()}
        back |= {self.proxies[path]: original for path, original in self.originals.items()}
        replace_modules(self._module(), back)

    def put_proxies_back(self) -> None:
        """Put the proxies into the module, at first and to undo `put_originals_back`."""
        tables_of_modules[self._module()] = self
        for path, original in self.originals.items():
            # User code that kept a reference to the original would look up rows that it does not
            # hold: its forward is hidden by one that raises, on this object only.
            original.forward = _refuse_forward(path)  # type: ignore[method-assign]
        proxies = {original: self.proxies[path] for path, original in self.originals.items()}
        replace_modules(self._module(), proxies | self.collisions)

    def refuse_replaced(self) -> None:
        """Raise ShardedWeightError: user code has put a module in the place of one that has a
        table's shards."""
        for proxy in self.proxies.values():
            held = set(map(id, proxy.parameters()))
            for name in (table.full_name for table in self.tables_of(proxy.path)):
                shards = [shard.weight for shard in self.shards[name] if not shard.replicated]
                if any(id(weight) not in held or not hasattr(weight, "place") for weight in shards):
                    raise replaced(f"module of the sharded table '{name}'")

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Inside of the context the tables are not in the module tree, for what must not reach
        them."""
        # Not deleted: with a placeholder, the children keep their order in the tree.
        proxies: list[nn.Module] = list(self.proxies.values())
        placeholders = [nn.Module() for _ in proxies]
        replace_modules(self._module(), dict(zip(proxies, placeholders, strict=True)))
        try:
            yield
        finally:
            replace_modules(self._module(), dict(zip(placeholders, proxies, strict=True)))

    def take_rows(self, tables: list[Table]) -> dict[str, list[TableShard]]:
        """After `put_originals_back`: return the rows for the next sharding, by full name.

        tables: those of the next sharding. Where the user has put another collection in the place
        of one that was sharded here, it brings rows of its own, and ours are not returned.
        """
        originals = set(self.originals.values())
        staying = {table.full_name for table in tables if table.original in originals}
        rows = {}
        for name, shards in self.table_shards().items():
            if name in staying:
                # Rows wait on the host, so that the device never holds two sets of them, nor the
                # optimizers' state.
                rows[name] = [shard.to_be_moved() for shard in shards]
        self._free_shards()
        return rows

    def fall_back(self) -> None:
        """After a set-up has failed that began with these tables: put the proxies back, if the rows
        are still here."""
        if self.sharded:
            self.put_proxies_back()
        elif sharded_tables_of(self._module()) is None:
            _without_rows.add(self._module())

    def unshard(self, rows: Mapping[str, Tensor]) -> None:
        """Put the unsharded collections back into the module for good. The shards are freed.

        rows: the unsharded weights by their key in the root's state_dict; others have none, and are
        on meta.
        """
        self.put_originals_back()
        for table in self.tables:
            if table.key in rows:
                weight = rows[table.key].to(table.parameter.dtype)
                placeholder = table.parameter
                fill_weight(table.module, table.local_key, weight, placeholder.requires_grad)
                # Without a hook of its own it would stay as it is in a fit in one process.
                apply_in_backward(in_backward_optimizers(placeholder), table.parameter)
            if table.plain is not None:
                table.plain.weight = table.parameter
            # train() and eval() have reached the proxy only.
            table.original.train(self.proxies[table.collection].training)
        self._free_shards()

    def _weight(self, name: str) -> Tensor:
        table = next(table for table in self.tables if table.full_name == name)
        return sharded_weights(self.sharded[table.collection], [table])[name]

    def _free_shards(self) -> None:
        # Proxies hold bound methods of torchrec's modules, and with them the kernels' memory: all
        # must go.
        self.sharded = {}
        self.proxies = {}
        self.shards = {}
        self.kernels = []
        tables_of_modules.pop(self._module(), None)

    def _module(self) -> nn.Module:
        root = self._root()
        assert root is not None
        return root


_sharded: WeakSet[nn.Module] = WeakSet()
"""TorchRec's sharded modules that are in memory."""
_without_rows: WeakSet[nn.Module] = WeakSet()
"""Modules whose rows went with a set-up that failed while it moved them."""


def sharded_tables_of(root: nn.Module) -> ShardedTables | None:
    """Return the tables that are sharded in `root`, or None."""
    return tables_of_modules.get(root)


def has_unused_shards(root: nn.Module) -> bool:
    """Return whether shards are in memory that are not those of `root`."""
    tables = sharded_tables_of(root)
    return not _sharded <= set(tables.sharded.values() if tables is not None else ())


def refuse_foreign_shards(root: nn.Module) -> None:
    """Raise ShardingError: a table of `root` was sharded in another module, or lost its rows in a
    failed set-up."""
    if root in _without_rows:
        raise ShardingError(
            "an earlier set-up of this module failed while rows moved to other shards, and they "
            "are lost. Build the module again, and load a checkpoint into it."
        )
    tables = sharded_tables_of(root)
    proxies = set(tables.proxies.values()) if tables is not None else set()
    for path, module in root.named_modules():
        if isinstance(module, ShardedProxy) and module not in proxies:
            raise ShardingError(
                f"'{path}' was sharded as a part of another LightningModule. Train or evaluate it "
                "inside of that one, or load that one's checkpoint into the unsharded collections "
                "of this one."
            )


def _refuse_forward(path: str) -> Any:
    def forward(*args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingError(
            f"the unsharded collection of '{path}' was called while its tables are sharded. Call "
            f"it through the module (self.{path}), not through a reference that was kept "
            "elsewhere, in a list for example."
        )

    return forward
