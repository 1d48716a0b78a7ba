"""What groups of ranks with a replica of the tables each change about a fit's set-up."""

from collections.abc import Iterable, Mapping

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_distrec.checkpoint.options import CheckpointOptions
from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.translation import TableUpdate
from lightning_distrec.sharding.groups.options import ShardingGroupOptions
from lightning_distrec.sharding.groups.sharding_groups import ShardingGroups
from lightning_distrec.sharding.planning.table_options import TableOptions

AVERAGES = (StochasticWeightAveraging, WeightAveraging)


def why_kept(groups: ShardingGroups | ShardingGroupOptions) -> str:
    """Return why the gradients of tables must be kept for the optimizers; "" where they need not."""
    return "sharding_groups exchange gradients" if groups.exchanges_gradients else ""


def warn_of_replicas(groups: ShardingGroups) -> list[str]:
    """Return the warning that the tables are not those of one process."""
    if groups.num_replicas == 1 or groups.exchanges_gradients:
        return []
    return [
        f"sharding_groups: sync_interval={groups.sync_interval} is not exact. Each of {groups.num_replicas} groups "
        "updates its replica of the tables by its own batches, and the rows that they have touched are averaged once "
        f"in {groups.sync_interval} steps. sync_interval=1 has the numbers of one process."
    ]


def refuse_with_groups(
    groups: ShardingGroups,
    updates: Mapping[str, TableUpdate],
    options: Mapping[str, TableOptions],
    callbacks: Iterable[Callback],
) -> None:
    """Raise ConfigError where a table's options, or a callback, do not go together with the groups."""
    if groups.num_replicas == 1:
        return
    fused = [name for name, update in updates.items() if update.in_backward]
    if groups.exchanges_gradients and fused:
        raise ConfigError(
            f"table '{fused[0]}' is updated inside of backward, because embedding_update asks for it, but with "
            "sharding_groups and sync_interval=1 the groups exchange gradients before the update. Set "
            "embedding_update='auto', or a larger sync_interval, which is not exact."
        )
    gathered = [name for name in updates if options[name].gathered_weight]
    if gathered and not groups.exchanges_gradients:
        raise ConfigError(
            f"table '{gathered[0]}' has gathered_weight=True, but with sync_interval={groups.sync_interval} each group "
            "has other weights. Set sync_interval=1, or replicated=True for the table."
        )
    averages = [type(callback).__name__ for callback in callbacks if isinstance(callback, AVERAGES)]
    if averages and not groups.exchanges_gradients:
        raise ConfigError(
            f"the callback {averages[0]} averages weights of which each group has others at "
            f"sync_interval={groups.sync_interval}, so that groups would have other averages. Set sync_interval=1, or "
            "remove it."
        )


def refuse_with_checkpoints(groups: ShardingGroupOptions, checkpoint: CheckpointOptions) -> None:
    """Raise ConfigError where checkpoints take what each rank has, and replicas would be missed or saved twice."""
    if groups.size is not None and checkpoint.incremental is not None:
        raise ConfigError(
            "sharding_groups does not go together with checkpoint={'incremental': ...}, which follows the rows of each "
            "rank and knows of no replicas. Remove one of them."
        )
