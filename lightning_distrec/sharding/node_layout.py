"""Which ranks share a node."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True)
class NodeLayout:
    """The ranks, and which of them share a node."""

    node_of_rank: tuple[int, ...]
    """Rank -> its node, numbered by first appearance."""
    num_replicas: int = field(default=1, compare=False)
    """How many groups of ranks like these there are, each with a replica of the tables."""

    @classmethod
    def from_node_sizes(cls, *ranks_by_node: int) -> "NodeLayout":
        """Return a layout of nodes with these numbers of ranks, in order."""
        return cls(tuple(node for node, number in enumerate(ranks_by_node) for _ in range(number)))

    @classmethod
    def equal(cls, num_ranks: int, ranks_on_node: int) -> "NodeLayout":
        """Return `num_ranks` ranks on nodes of `ranks_on_node` each; the last node may have fewer."""
        return cls(tuple(rank // ranks_on_node for rank in range(num_ranks)))

    @classmethod
    def gathered(cls, reported: Sequence[tuple[int, int]]) -> "NodeLayout":
        """Return the layout from what each rank reports: the number of its node, and how many ranks are on it.

        Where a launcher gives all ranks the same node number, the ranks per node still separate the nodes.
        """
        numbers = list(dict.fromkeys(node for node, _ in reported))
        layout = cls(tuple(numbers.index(node) for node, _ in reported))
        if all(
            layout.ranks_by_node[node] == local_size
            for node, (_, local_size) in zip(layout.node_of_rank, reported, strict=True)
        ):
            return layout
        in_blocks: list[int] = []
        while len(in_blocks) < len(reported):
            local_size = max(1, min(reported[len(in_blocks)][1], len(reported) - len(in_blocks)))
            in_blocks += [in_blocks[-1] + 1 if in_blocks else 0] * local_size
        return cls(tuple(in_blocks))

    def group_layout(self, size: int) -> "NodeLayout":
        """Return the layout of each group of `size` consecutive ranks. Raises ConfigError: they have unequal ones."""
        groups = [self.node_of_rank[first : first + size] for first in range(0, self.num_ranks, size)]
        numbered = {tuple(list(dict.fromkeys(nodes)).index(node) for node in nodes) for nodes in groups}
        if len(numbered) > 1:
            raise ConfigError(
                f"sharding_groups: size={size} makes groups that lie on unequal numbers of ranks of their nodes (the "
                f"nodes have {', '.join(map(str, self.ranks_by_node))} ranks), and one plan is made for all groups. "
                "Choose the ranks of a node, of some nodes, or a divisor of a node's."
            )
        return NodeLayout(numbered.pop(), self.num_ranks // size)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.node_of_rank)

    @property
    def ranks_by_node(self) -> tuple[int, ...]:
        """Number of ranks on each node."""
        counts = Counter(self.node_of_rank)
        return tuple(counts[node] for node in range(len(counts)))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(set(self.node_of_rank))

    @property
    def ranks_on_node(self) -> int:
        """Number of ranks on the largest node."""
        return max(self.ranks_by_node)

    @property
    def alike(self) -> bool:
        """Whether nodes are as torchrec expects: equal numbers of ranks, numbered consecutively."""
        return self == NodeLayout.from_node_sizes(*self.ranks_by_node) and len(set(self.ranks_by_node)) == 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node as plans count them: all ranks where nodes are not alike."""
        return self.ranks_on_node if self.alike else self.num_ranks

    def ranks_on_same_node(self, rank: int) -> list[int]:
        """Return the other ranks on a rank's node."""
        return [r for r, node in enumerate(self.node_of_rank) if node == self.node_of_rank[rank] and r != rank]

    def ranks_on_other_nodes(self, rank: int) -> list[int]:
        """Return the ranks on other nodes than a rank's."""
        return [r for r, node in enumerate(self.node_of_rank) if node != self.node_of_rank[rank]]
