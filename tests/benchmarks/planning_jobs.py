"""What is planned in benchmarks: tables drawn from a seed, and the ranks that they go to."""

from dataclasses import dataclass
from typing import Literal

from tests.support.planned_tables import KINDS, Kind, TableSet, draw_tables, table_set

RANKS_ON_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of a planner, in plain numbers, so that another process can be told of it."""

    kind: Kind | Literal["mlperf", "torchrec"]
    num_tables: int
    num_ranks: int
    ranks_on_node: int = RANKS_ON_NODE
    memory_gb: float
    """What tables may take of a rank's GPU, in 10^9 bytes; its share of the host's memory is 128 of
    them."""
    seed: int = 0
    rows_times: int = 1
    """How many times as many rows each table has as were drawn."""

    def __str__(self) -> str:
        return f"{self.num_tables:,} tables ({self.kind}) on {self.num_ranks:,} ranks"

    def tables(self) -> TableSet:
        """Return the tables, on the meta device."""
        if self.kind in ("mlperf", "torchrec"):
            from tests.benchmarks.planning_problems import published_tables  # which has jobs itself

            return published_tables(self)
        drawn = draw_tables(
            self.kind,
            self.num_tables,
            self.num_ranks,
            self.ranks_on_node,
            self.memory_gb,
            self.seed,
            "cuda",
        )
        if self.rows_times == 1:
            return drawn
        sizes = [
            (t.config.num_embeddings * self.rows_times, t.config.embedding_dim)
            for t in drawn.tables
        ]
        pooling = [
            drawn.constraints[t.full_name].options.pooling_factor or 1.0 for t in drawn.tables
        ]
        return table_set(sizes, self.num_ranks, self.ranks_on_node, self.memory_gb, pooling)


@dataclass(frozen=True)
class Timed:
    """A job whose planning time has an aim."""

    job: Job
    aim_seconds: float
    default_limit_seconds: float
    """How long torchrec's planner may take; 0 where it is not even tried."""


TIMED = (
    Timed(Job(kind="uniform", num_tables=100, num_ranks=64, memory_gb=8), 5, 240),
    Timed(Job(kind="uniform", num_tables=500, num_ranks=64, memory_gb=24), 25, 0),
    Timed(Job(kind="uniform", num_tables=1000, num_ranks=1024, memory_gb=8), 120, 0),
)

SHAPES = ((10, 2, 2), (16, 4, 2), (24, 8, 8), (32, 16, 8), (40, 64, 8))
"""Tables, ranks, ranks on a node: small enough for torchrec's planner to come to an end."""
SLACK = 1.6
"""How much memory all ranks together have, over what the rows of all tables take."""
LEAST_GB = 1.0


def compared_jobs() -> list[Job]:
    """Return 20 sets of tables, of each kind and for 2 to 64 ranks, that both planners are
    given."""
    jobs = []
    for seed, (num_tables, num_ranks, on_node) in enumerate(SHAPES, start=1):
        for kind in KINDS:
            shape = (num_tables, num_ranks, on_node)
            rows = draw_tables(kind, *shape, memory_gb=LEAST_GB, seed=seed).tables
            num_bytes = sum(
                table.parameter.numel() * table.parameter.element_size() for table in rows
            )
            memory = max(LEAST_GB, round(SLACK * num_bytes / num_ranks / 1e9, 1))
            jobs.append(
                Job(
                    kind=kind,
                    num_tables=num_tables,
                    num_ranks=num_ranks,
                    ranks_on_node=on_node,
                    memory_gb=memory,
                    seed=seed,
                )
            )
    return jobs
