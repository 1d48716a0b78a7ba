"""What is asked of full tables: their weights, and the norms of their gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_distrec.errors import ConfigError, OptimizerError
from lightning_distrec.sharding.row_gradients import LocalShard
from lightning_distrec.sharding.sharded_tables import ShardedTables, sharded_tables_of
from lightning_distrec.sharding.weights.shard_access import rewriting, without_guards
from lightning_distrec.strategies.run.checkpoint_hooks import (
    Rows,
    check_call,
    check_memory,
    rows_of,
)
from lightning_distrec.strategies.run.strategy import AnyRun, DistRecStrategy
from lightning_distrec.strategies.tables.mapped_tables import mapping_counts
from lightning_distrec.strategies.tables.run_tables import RunTables


class FullTables(DistRecStrategy[AnyRun]):
    """A strategy with tables, that returns full weights and norms of full gradients."""

    @property
    def run_tables(self) -> RunTables | None:
        """The sharded tables of the run in progress, for callbacks to look at; None without
        tables."""
        tables = getattr(self._run, "tables", None)
        return tables if isinstance(tables, RunTables) else None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        _make_equal(self.module)
        return state

    @override
    def full_state_dict(self) -> dict[str, Any]:
        _make_equal(self.module)
        return super().full_state_dict()

    @override
    @without_guards
    def full_parameter(self, name: str, rows: Rows = None) -> Tensor:
        shards = sharded_tables_of(self.module)
        tables = {} if shards is None else {table.full_name: table for table in shards.tables}
        full_name = name if shards is None else shards.keys_in_tree().get(name, name)
        if shards is None or full_name not in tables:
            return super().full_parameter(name, rows)
        ranks = self.session.consensus
        # All ranks must ask for the same rows: this raises on all of them before one waits in the
        # exchange.
        check_call(full_name, rows, tables, ranks)
        config = tables[full_name].config
        first, last = rows_of(full_name, rows, config.num_embeddings)
        itemsize = shards.shards[full_name][0].weight.dtype.itemsize
        check_memory(
            full_name, (last - first) * config.embedding_dim * itemsize, self.num_local_ranks, ranks
        )
        return shards.full_weight(full_name, first, last)

    @without_guards
    def gradient_norms(
        self, norm_type: float | str = 2.0, group_separator: str = "/"
    ) -> dict[str, float]:
        """Collective. Return the norm of every parameter's gradient, and of all of them, in full,
        on every rank.

        The dict is that of lightning.pytorch.utilities.grad_norm in one process, for self.log_dict
        in on_before_optimizer_step. Raises OptimizerError: a table is updated inside of backward
        and has no gradient.
        """
        order = float(norm_type)
        tables = self.run_tables
        if order <= 0:
            raise ConfigError(f"gradient_norms: norm_type={order} must be above 0.")
        if tables is not None and tables.fused_tables:
            raise OptimizerError(
                f"gradient_norms: table '{tables.fused_tables[0]}' has no gradient, because it is "
                "updated inside of backward. Override on_before_optimizer_step, or set "
                "embedding_update='sparse' or 'dense'."
            )
        table_shards: dict[str, list[LocalShard]] = {}
        table_norms: dict[str, float] = {}
        table_by_weight: dict[int, str] = {}
        if tables is not None:
            for name, shards in tables.shards.shards.items():
                if not shards[0].replicated:
                    table_shards[name] = shards
                    table_by_weight |= {id(shard.weight): name for shard in shards}
            table_norms = _table_norms(table_shards, order, tables.shards.groups.sharding)
        norms: dict[str, float] = {}
        for name, parameter in self.module.named_parameters():
            table = table_by_weight.get(id(parameter))
            if table is not None:
                # a table of several shards has one norm, by the name of the first
                if table in table_norms:
                    norms[f"grad_{order}_norm{group_separator}{name}"] = table_norms.pop(table)
            elif parameter.grad is not None:
                norms[f"grad_{order}_norm{group_separator}{name}"] = _norm(parameter.grad, order)
        if norms:
            norms[f"grad_{order}_norm_total"] = float(
                torch.tensor(list(norms.values())).norm(order)
            )
        return norms

    def dynamic_id_counts(self) -> dict[str, tuple[int, ...]]:
        """Collective. Return the numbers of each table that maps ids to rows, over all ranks; see
        `mapping_counts`."""
        tables = sharded_tables_of(self.module)
        return {} if tables is None else mapping_counts(tables.mappings, self.session.consensus)

    @without_guards
    @torch.no_grad()
    def scale_rows(self, name: str, max_norm: float | None = None) -> bool:
        """Collective for tables with shards of columns. Scale a table's rows to norm 1, or down to
        `max_norm`.

        name: the weight's name in the module, or the table's. Returns whether it is a sharded
        table.
        """
        tables = sharded_tables_of(self.module)
        name = name if tables is None else tables.keys_in_tree().get(name, name)
        if tables is None or name not in tables.shards:
            return False
        with rewriting():
            _scale(tables, name, max_norm)
        return True

    def refuse_to_scale(self, name: str, max_norm: float | None) -> None:
        """Raise ConfigError: rows of a table are to have norm 1, and groups of ranks average
        them."""
        tables = sharded_tables_of(self.module)
        if (
            tables is None
            or max_norm is not None
            or tables.keys_in_tree().get(name, name) not in tables.shards
        ):
            return
        groups = tables.groups
        if groups.num_replicas > 1 and not groups.exchanges_gradients:
            raise ConfigError(
                f"NormalizeRows: rows of '{name}' are to have norm 1, but with "
                f"sync_interval={groups.sync_interval} groups average rows, and a mean of such "
                "rows is shorter. Set max_norm, which means keep, or sync_interval=1."
            )


def _scale(tables: ShardedTables, name: str, max_norm: float | None) -> None:
    shards = [shard for shard in tables.shards[name] if shard.weight.numel()]
    row_norms = [torch.linalg.vector_norm(shard.weight, dim=1) for shard in shards]
    if "column" in tables.plan[name].sharding_type:
        (table,) = [table for table in tables.tables if table.full_name == name]
        weight = tables.shards[name][0].weight
        num_rows = table.config.num_embeddings
        squares = torch.zeros(num_rows, dtype=torch.float64, device=weight.device)
        places = [slice(shard.row, shard.row + len(shard.weight)) for shard in shards]
        for place, norms in zip(places, row_norms, strict=True):
            squares[place] += norms.double().square()
        # A row's columns are on several ranks: its norm is known from all of them only.
        dist.all_reduce(squares, group=tables.groups.sharding)
        full = squares.sqrt().to(weight.dtype)
        row_norms = [full[place] for place in places]
    for shard, norms in zip(shards, row_norms, strict=True):
        norms = norms.unsqueeze(1).clamp_min(1e-12)
        if max_norm is None:
            shard.weight.div_(norms)
        else:
            shard.weight.mul_((max_norm / norms).clamp(max=1.0))


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _norm(gradient: Tensor, order: float) -> float:
    norm = torch.linalg.vector_norm(_values(gradient), order)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _table_norms(
    table_shards: dict[str, list[LocalShard]], order: float, group: Any
) -> dict[str, float]:
    """Collective. Return the norms of the tables that have a gradient on any rank."""
    if not table_shards:
        return {}
    device = next(iter(table_shards.values()))[0].weight.device
    # Every rank has an entry for every table, also where it has no shard: all gather tensors of one
    # shape. -1: it has no gradient.
    norms = torch.full((len(table_shards),), -1.0, dtype=torch.float64, device=device)
    for i, shards in enumerate(table_shards.values()):
        gradients = [shard.weight.grad for shard in shards if shard.weight.grad is not None]
        parts = [norms.new_zeros(())]
        for values in map(_values, gradients):
            if values.numel():
                parts.append(torch.linalg.vector_norm(values, order, dtype=torch.float64))
        if gradients:
            norms[i] = torch.linalg.vector_norm(torch.stack(parts), order)
    rank_norms = [torch.empty_like(norms) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rank_norms, norms, group=group)
    gathered = torch.stack(rank_norms)
    totals = torch.linalg.vector_norm(gathered.clamp(min=0), order, dim=0).tolist()
    has_gradient = (gathered >= 0).any(0).tolist()
    return {name: totals[i] for i, name in enumerate(table_shards) if has_gradient[i]}


def _make_equal(root: nn.Module) -> None:
    """Collective where replicas of the tables in `root` differ. Make them equal."""
    tables = sharded_tables_of(root)
    if tables is not None:
        tables.synchronize()
