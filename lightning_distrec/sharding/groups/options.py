"""The options of two-dimensional parallelism: how many ranks share the tables, and how often replicas meet."""

from dataclasses import dataclass

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ShardingGroupOptions:
    """Tables are sharded within groups of ranks, and each group has a replica of all of them."""

    size: int | None = None
    """Ranks of a group, numbered consecutively: those of a node, or of some nodes. None: all ranks are one group."""
    sync_interval: int = 1
    """Steps from one synchronisation of the replicas to the next. 1 is exact: groups exchange the gradients of rows
    before every update. Above 1 each group updates its replica by its own batches, and the rows that any group has
    touched are averaged at every such step, with their optimizer state: other numbers than one process has."""

    def __post_init__(self) -> None:
        for name in ("size", "sync_interval"):
            value = getattr(self, name)
            if (name, value) != ("size", None) and (type(value) is not int or value < 1):
                raise ConfigError(f"sharding_groups: {name}={value!r} must be a whole number above 0.")
        if self.size is None and self.sync_interval != 1:
            raise ConfigError(
                f"sharding_groups: sync_interval={self.sync_interval} needs a size: without one all ranks are one "
                "group, and there is nothing to synchronise."
            )

    @property
    def exchanges_gradients(self) -> bool:
        """Whether groups exchange gradients of rows before every update."""
        return self.size is not None and self.sync_interval == 1


def checked_size(options: ShardingGroupOptions, num_ranks: int) -> int:
    """Return how many ranks a group has. Raises ConfigError: `num_ranks` cannot be divided so."""
    size = num_ranks if options.size is None else options.size
    if num_ranks % size:
        raise ConfigError(
            f"sharding_groups: size={size} does not divide the {num_ranks} ranks of the job. Choose a divisor."
        )
    return size
