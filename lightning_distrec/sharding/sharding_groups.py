"""Which ranks share a node, which shard the tables with each other, and which have the same shards
as replicas."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_distrec._compat.gloo import one_socket_thread
from lightning_distrec._compat.torch_distributed import split_ranks
from lightning_distrec.errors import ConfigError
from lightning_distrec.option_values import plain_fields
from lightning_distrec.ranks import Ranks

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingEnv


@dataclass(frozen=True, kw_only=True)
class ShardingGroupOptions:
    """Tables are sharded within groups of ranks, and each group has a replica of all of them."""

    size: int | None = None
    """Ranks of a group, numbered consecutively: those of a node, or of some nodes. None: all ranks
    are one group."""
    sync_interval: int = 1
    """Steps from one synchronisation of the replicas to the next. 1 is exact: groups exchange the
    gradients of rows before every update. Above 1 each group updates its replica by its own
    batches, and the rows that any group has touched are averaged at every such step, with their
    optimizer state: other numbers than one process has."""

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("size", "sync_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"sharding_groups: {name}={value!r} must be a whole number above 0."
                )
        if self.size is None and self.sync_interval != 1:
            raise ConfigError(
                f"sharding_groups: sync_interval={self.sync_interval} needs a size; now there is "
                "one group."
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
            f"sharding_groups: size={size} does not divide the {num_ranks} ranks of the job."
        )
    return size


@dataclass(frozen=True, eq=False)
class ShardingGroups:
    """The groups as one rank sees them. Ranks of a group are numbered consecutively.

    The rank at one position of each group has the same shards as those at that position of the
    others.
    """

    rank: int
    num_ranks: int
    size: int
    sync_interval: int = 1
    """Steps from one synchronisation to the next; 1: gradients are exchanged before every
    update."""
    sharding: Any = field(default=None, repr=False)
    """Process group of the ranks that shard tables with this one; None: the default one, of all
    ranks."""
    replicas: Any = field(default=None, repr=False)
    """Process group of the ranks that have the same shards as this one; None where there is one
    group."""
    ids: Any = field(default=None, repr=False)
    """As `sharding`, for ids that are sent ahead; None: they share that one."""

    @property
    def num_replicas(self) -> int:
        """How many groups there are."""
        return self.num_ranks // self.size

    @property
    def first_rank(self) -> int:
        """The first rank of this rank's group."""
        return self.rank - self.rank % self.size

    @property
    def is_first(self) -> bool:
        """Whether this rank's group writes what all groups have."""
        return self.rank < self.size

    @property
    def members(self) -> range:
        """The ranks of this rank's group."""
        return range(self.first_rank, self.first_rank + self.size)

    @property
    def exchanges_gradients(self) -> bool:
        """Whether groups exchange gradients of rows before every update."""
        return self.num_replicas > 1 and self.sync_interval == 1

    def same_shards(self, rank: int) -> range:
        """Return the ranks that have the same shards as `rank`, itself among them."""
        return range(rank % self.size, self.num_ranks, self.size)

    def environment(self) -> "ShardingEnv":
        """Return what torchrec's sharders take: the ranks among which tables are sharded, counted
        within the group."""
        # not loaded by strategies without tables
        from torchrec.distributed.types import ShardingEnv

        if self.sharding is None:
            return ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
        # Without a process group at first: torchrec would make a device mesh of all ranks for it,
        # which nothing needs.
        env = ShardingEnv(self.size, self.rank - self.first_rank)
        env.process_group = self.sharding
        return env


def do_nothing() -> None:
    """Leave replicas as they are: there is one, or they are equal."""


# Fits that follow each other use the same groups, which have sockets and threads of their own.
_made: tuple[Any, dict[int, tuple[Any, Any, Any]]] | None = None


def make_groups(options: ShardingGroupOptions, ranks: Ranks, timeout: timedelta) -> ShardingGroups:
    """Collective. Return the groups, made once. Raises ConfigError on every rank: they cannot be
    made alike."""
    per_rank = ranks.all_gather((options.size, options.sync_interval))
    if len(set(per_rank)) > 1:
        raise ConfigError(
            f"sharding_groups: ranks have unequal (size, sync_interval): {per_rank}. Give all the "
            "same."
        )
    size = checked_size(options, ranks.num_ranks)
    # `size` and the number of ranks are alike on all ranks: all return here or none.
    if size == ranks.num_ranks:
        return ShardingGroups(ranks.rank, ranks.num_ranks, size)
    made = _process_groups(size, ranks, timeout)
    return ShardingGroups(ranks.rank, ranks.num_ranks, size, options.sync_interval, *made)


def _process_groups(size: int, ranks: Ranks, timeout: timedelta) -> tuple[Any, Any, Any]:
    """Collective. Return the process groups of this rank: of its group, of its replicas, and for
    ids sent ahead."""
    global _made
    # Groups are gone with the default group of which they were made.
    if _made is None or _made[0] is not dist.group.WORLD:
        _made = (dist.group.WORLD, {})
    if size not in _made[1]:
        sharding = [list(range(first, first + size)) for first in range(0, ranks.num_ranks, size)]
        replicas = [list(range(first, ranks.num_ranks, size)) for first in range(size)]
        # gloo runs groups side by side. NCCL's would wait for each other on the device in an order
        # of its own.
        with one_socket_thread():
            ahead = split_ranks(sharding, timeout) if dist.get_backend() == "gloo" else None
            _made[1][size] = (split_ranks(sharding, timeout), split_ranks(replicas, timeout), ahead)
    return _made[1][size]


def _numbered(nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes, numbered by first appearance."""
    numbers = list(dict.fromkeys(nodes))
    return tuple(map(numbers.index, nodes))


@dataclass(frozen=True)
class NodeLayout:
    """The ranks, and which of them share a node."""

    node_of_rank: tuple[int, ...]
    """Rank -> its node, numbered by first appearance."""
    # Not compared: `alike` and saved plans compare the layout of one group.
    num_replicas: int = field(default=1, compare=False)
    """How many groups of ranks like these there are, each with a replica of the tables."""

    @classmethod
    def from_node_sizes(cls, *ranks_by_node: int) -> "NodeLayout":
        """Return a layout of nodes with these numbers of ranks, in order."""
        return cls(tuple(node for node, number in enumerate(ranks_by_node) for _ in range(number)))

    @classmethod
    def equal(cls, num_ranks: int, ranks_on_node: int) -> "NodeLayout":
        """Return `num_ranks` ranks on nodes of `ranks_on_node` each; the last node may have
        fewer."""
        return cls(tuple(rank // ranks_on_node for rank in range(num_ranks)))

    @classmethod
    def gathered(cls, reported: Sequence[tuple[int, int]]) -> "NodeLayout":
        """Return the layout of what each rank reports: its node's number, and how many ranks are on
        that node."""
        layout = cls(_numbered([node for node, _ in reported]))
        if layout.local_sizes == [local_size for _, local_size in reported]:
            return layout
        # Launchers number the ranks of a node consecutively.
        in_blocks: list[int] = []
        while len(in_blocks) < len(reported):
            local_size = max(1, min(reported[len(in_blocks)][1], len(reported) - len(in_blocks)))
            in_blocks += [in_blocks[-1] + 1 if in_blocks else 0] * local_size
        return cls(tuple(in_blocks))

    def group_layout(self, size: int) -> "NodeLayout":
        """Return the layout of each group of `size` consecutive ranks. Raises ConfigError: they
        have unequal ones."""
        numbered = set()
        for first in range(0, self.num_ranks, size):
            numbered.add(_numbered(self.node_of_rank[first : first + size]))
        if len(numbered) > 1:
            raise ConfigError(
                f"sharding_groups: size={size} makes groups that lie on unequal numbers of ranks "
                f"of their nodes (the nodes have {', '.join(map(str, self.ranks_by_node))} ranks), "
                "and one plan is made for all groups. Choose the ranks of a node, of some nodes, "
                "or a divisor of a node's."
            )
        return NodeLayout(numbered.pop(), self.num_ranks // size)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.node_of_rank)

    @property
    def ranks_by_node(self) -> tuple[int, ...]:
        """Number of ranks on each node."""
        return tuple(map(self.node_of_rank.count, range(self.num_nodes)))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(set(self.node_of_rank))

    @property
    def local_sizes(self) -> list[int]:
        """For each rank, the number of ranks on its node."""
        return [self.ranks_by_node[node] for node in self.node_of_rank]

    @property
    def ranks_on_node(self) -> int:
        """Number of ranks on the largest node."""
        return max(self.ranks_by_node)

    @property
    def alike(self) -> bool:
        """Whether nodes are as torchrec expects: equal numbers of ranks, numbered consecutively."""
        return (
            self == NodeLayout.from_node_sizes(*self.ranks_by_node)
            and len(set(self.ranks_by_node)) == 1
        )

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node as plans count them: all ranks where nodes are not alike."""
        return self.ranks_on_node if self.alike else self.num_ranks

    def ranks_on_same_node(self, rank: int) -> list[int]:
        """Return the other ranks on a rank's node."""
        far_ranks = set(self.ranks_on_other_nodes(rank))
        return [r for r in range(self.num_ranks) if r != rank and r not in far_ranks]

    def ranks_on_other_nodes(self, rank: int) -> list[int]:
        """Return the ranks on other nodes than a rank's."""
        return [r for r, node in enumerate(self.node_of_rank) if node != self.node_of_rank[rank]]
