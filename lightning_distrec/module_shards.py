"""Which modules hold shards. Without torchrec and fbgemm: strategies that shard no tables ask,
too."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.fsdp import FSDPModule

# Weak, and beside the module: an attribute of the user's module would be copied and pickled with
# it.
tables_of_modules: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Module -> its ShardedTables, by whichever strategy they were sharded."""


def holds_shards(module: nn.Module | None) -> bool:
    """Return whether a module holds shards, of tables or under FSDP, or weights on the meta device:
    none can move."""
    if module is None:
        return False
    # By its modules: a step that has failed leaves full parameters in some of them.
    is_sharded = module in tables_of_modules or any(
        isinstance(part, FSDPModule) for part in module.modules()
    )
    # A part of another module may be sharded there: guarded weights have a place.
    return is_sharded or any(
        weight.is_meta or hasattr(weight, "place") for weight in module.parameters()
    )
