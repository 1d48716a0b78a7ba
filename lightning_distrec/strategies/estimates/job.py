"""Where a module is to train."""

from dataclasses import dataclass

from lightning_distrec.strategies.estimates.module_sizes import ParameterSize

TRUE_ITEMSIZE = {"16-true": 2, "bf16-true": 2, "64-true": 8}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Ranks, nodes, memory and precision."""

    num_ranks: int
    num_nodes: int
    memory_bytes: int
    """Memory of one rank."""
    precision: str = "32-true"

    def itemsize(self, parameter: ParameterSize) -> int:
        """Return the bytes of one element of a parameter in this precision."""
        return TRUE_ITEMSIZE.get(self.precision, parameter.itemsize)

    @property
    def sent_share(self) -> float:
        """The share of a collective's bytes that leaves a rank: all but its own shard."""
        return (self.num_ranks - 1) / self.num_ranks
