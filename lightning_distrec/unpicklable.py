"""Shards must not be pickled: whoever loads the pickle would lack the rows of the other ranks, without an error."""

from functools import partial
from typing import Any, NoReturn

from lightning_distrec.errors import ShardingError

WAYS_OUT = (
    "Call trainer.strategy.full_state_dict() on every rank, and save what rank 0 gets; trainer.save_checkpoint; or, "
    "after the run, trainer.strategy.unshard() on every rank, which turns the module back into an ordinary one."
)


def refuse_pickling(shard: Any, name: str) -> Any:
    """Let pickle, and so torch.save, raise ShardingError for this tensor. name: whose shard it is, for the message."""
    # pickle looks __reduce_ex__ up on the object, so that neither the tensor's class nor its copies change.
    shard.__reduce_ex__ = partial(_refuse, name)
    return shard


def _refuse(name: str, _protocol: Any) -> NoReturn:
    raise ShardingError(f"'{name}' was pickled (by torch.save, say), and this rank has only a shard of it. {WAYS_OUT}")


def refuse_module(action: str, path: str, *_: Any) -> NoReturn:
    """Raise ShardingError. action: what was tried with a module that holds shards at `path`."""
    raise ShardingError(f"a sharded module cannot be {action}: this rank has only shards of '{path}'. {WAYS_OUT}")
