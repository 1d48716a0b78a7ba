"""Follows tables that are frozen or unfrozen while training, as fine-tuning callbacks and `toggle_optimizer` do."""

from collections.abc import Mapping

from torch.optim import Optimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.param_groups import param_group_of
from lightning_distrec.optimizers.translation import ELEMENTWISE, TableUpdate, sparse_form
from lightning_distrec.sharding.sharded_tables import ShardedTables


class Unfreezing:
    """Chooses the kind of gradient of tables that were frozen at the start, once they are unfrozen.

    updates: full name -> what updates the table since the start. Tables that learn from the start can be frozen and
    unfrozen at any time; their kind of gradient stays.
    """

    def __init__(self, shards: ShardedTables, updates: Mapping[str, TableUpdate]) -> None:
        self._shards = shards
        self._waiting = [name for name, update in updates.items() if update.kind == "frozen"]
        self._lazy = [name for name, update in updates.items() if update.kind == "fused_lazy"]

    def follow(self, optimizers: list[Optimizer]) -> None:
        """Choose the gradients of tables that were unfrozen since the last step; called on every rank.

        Raises OptimizerError: the optimizer that a table was given to is not exact on its shards.
        """
        for name in self._lazy:
            if not self._shards.learns(name):
                raise OptimizerError(
                    f"table '{name}' was frozen while training, but fused_lazy Adam still moves rows by their "
                    "momentum. Set embedding_update='auto' for it."
                )
        for name in list(self._waiting):
            if self._shards.learns(name):
                self._begin(name, optimizers)

    def _begin(self, name: str, optimizers: list[Optimizer]) -> None:
        shard = self._shards.shards[name][0]
        param_group = param_group_of(shard.weight, optimizers)
        if param_group is None:
            return  # no optimizer uses its gradient, which may stay sparse
        self._waiting.remove(name)
        sharding = self._shards.plan[name]
        kind = type(param_group.optimizer)
        has_dense_form = kind in ELEMENTWISE or (kind is RowWiseAdagrad and "column" not in sharding.sharding_type)
        sparse, obstacle = sparse_form(param_group)
        if (sparse is None and not has_dense_form) or sharding.compute_kernel.startswith("fused_uvm"):
            reason = obstacle or f"its kernel is {sharding.compute_kernel}, whose rows an optimizer cannot reach"
            raise OptimizerError(
                f"table '{name}' ({sharding.sharding_type}) was unfrozen and given to {kind.__name__}: {reason}. "
                "Let it learn from the start of fit, or call fit again with it unfrozen."
            )
        self._shards.set_sparse_gradient(name, sparse is not None)
