"""The L2 term of tables, of which each rank has its shards only."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.sharding.table_registry import all_sharded_tables
from lightning_distrec.sharding.weights.shard_access import write_back


def sharded_l2(module: nn.Module) -> Tensor:
    """Collective where tables are sharded. Return the sum of squares of the weights of all tables in `module`, ().

    module: an nn.Embedding, an nn.EmbeddingBag, a collection of torchrec's or one table of it, such as
    `self.tables.embedding_bags["user"]`, or a module that contains some. They may be sharded or not.
    The value is that of the full tables, the same on every rank; its gradients are those of this rank's shards. Its
    square root is their norm. A table with such a term moves in every row, which no update inside of backward does: set
    embedding_update="sparse" or "dense" for it.
    Raises ShardingError: there are no tables in `module`.
    """
    shards = {
        id(shard.weight): (shard, tables)
        for tables in all_sharded_tables()
        for table_shards in tables.shards.values()
        for shard in table_shards
    }
    kinds = (nn.Embedding, nn.EmbeddingBag)
    unsharded = {
        id(p) for child in module.modules() if isinstance(child, kinds) for p in child.parameters(recurse=False)
    }
    parameters = [p for p in module.parameters() if id(p) in shards or id(p) in unsharded]
    if not parameters:
        raise ShardingError(f"sharded_l2: {type(module).__name__} has no embedding tables.")
    local_shards = [shards[id(p)] for p in parameters if id(p) in shards and not shards[id(p)][0].replicated]
    own_ids = {id(shard.weight) for shard, _ in local_shards}
    # DDP, or that of torchrec's data-parallel tables, averages the gradients of weights that every rank has.
    terms = [p.float().square().sum() for p in parameters if id(p) not in own_ids]
    if local_shards:
        weights = [shard.weight for shard, _ in local_shards]
        terms.append(_SumOfSquares.apply(local_shards[0][1], *weights))
    return torch.stack(terms).sum()


class _SumOfSquares(torch.autograd.Function):
    """Returns the sum of squares over the shards of all ranks; gradients are those of this rank's."""

    @staticmethod
    def forward(ctx: Any, tables: ShardedTables, *weights: Tensor) -> Tensor:
        ctx.tables = tables
        write_back()
        ctx.save_for_backward(*weights)
        norms = [torch.linalg.vector_norm(weight, dtype=torch.float64) for weight in weights]
        total = torch.stack(norms).square().sum()
        dist.all_reduce(total, group=tables.groups.sharding)
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Ranks with unequal batches weight their losses, and the mean of all weights is 1; a shard has one rank's term.
        factor = 2.0 * gradient / ctx.tables.loss_weight
        weights: tuple[Tensor, ...] = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        return None, *[
            (factor * weight).to(weight.dtype) if needs else None for weight, needs in zip(weights, needed, strict=True)
        ]
