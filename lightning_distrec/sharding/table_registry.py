"""Which modules of this process have sharded tables, by whichever strategy they were sharded."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn
from torchrec.distributed.types import ShardedModule

from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.proxies import ShardedProxy

if TYPE_CHECKING:
    from lightning_distrec.sharding.sharded_tables import ShardedTables

_tables: "WeakKeyDictionary[nn.Module, ShardedTables]" = WeakKeyDictionary()


def register_tables(root: nn.Module, tables: "ShardedTables") -> None:
    """Let `sharded_tables_of` return these tables for `root`."""
    _tables[root] = tables


def forget_tables(root: nn.Module) -> None:
    """Note that the tables of `root` are not sharded any more."""
    _tables.pop(root, None)


def sharded_tables_of(root: nn.Module) -> "ShardedTables | None":
    """Return the tables that are sharded in `root`, or None."""
    return _tables.get(root)


def all_sharded_tables() -> "list[ShardedTables]":
    """Return the tables that are sharded in all modules of this process."""
    return list(_tables.values())


def refuse_foreign_shards(root: nn.Module) -> None:
    """Raise ShardingError where `root` holds tables that were sharded in another module, whose plan is not known."""
    tables = sharded_tables_of(root)
    proxies = set(tables.proxies.values()) if tables is not None else set()
    for path, module in root.named_modules():
        if isinstance(module, (ShardedProxy, ShardedModule)) and module not in proxies:
            raise ShardingError(
                f"'{path}' was sharded as a part of another LightningModule. Train or evaluate it inside of that one, "
                "or load that one's checkpoint into the unsharded collections of this one."
            )
