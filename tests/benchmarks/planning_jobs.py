"""What is planned in benchmarks: tables drawn from a seed, or of published problems, and the ranks
that they go to."""

from dataclasses import dataclass, replace
from typing import Literal

from recipes.criteo_dlrm.columns import MLPERF_BAG_SIZES, MLPERF_ROWS
from tests.support.planned_tables import KINDS, Kind, TableSet, draw_tables, table_set

RANKS_ON_NODE = 8
MLPERF_DIM, MLPERF_GLOBAL_BATCH = 128, 65_536
"""Tables of MLPerf's DLRM-DCNv2: num_embeddings_per_feature, multi_hot_sizes, embedding_dim and the
batch of the reference. Source: github.com/mlcommons/training,
recommendation_v2/torchrec_dlrm/README.MD."""
TORCHREC_ROWS, TORCHREC_DIM = 100, 12
"""Of each table in torchrec/distributed/planner/tests/test_planners.py: 4 tables (test_tw_solution)
and 3 (test_hidden_rw_solution) on 2 ranks. They have 10 columns there, which FBGEMM does not
take."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of a planner, in plain numbers, so that another process can read it."""

    kind: Kind | Literal["mlperf", "torchrec"]
    num_tables: int
    num_ranks: int
    ranks_on_node: int = RANKS_ON_NODE
    memory_gb: float
    """What tables may take of a rank's GPU, in 10^9 bytes; its share of the host's memory is 128 of
    them."""
    seed: int = 0
    row_factor: int = 1
    """How many times as many rows each table has as were drawn."""

    def __str__(self) -> str:
        return f"{self.kind}, {self.num_tables:,} x {self.num_ranks:,}"

    def tables(self) -> TableSet:
        """Return the tables, on the meta device."""
        ranks = (self.num_ranks, self.ranks_on_node, self.memory_gb)
        if self.kind == "torchrec":
            return table_set([(TORCHREC_ROWS, TORCHREC_DIM)] * self.num_tables, *ranks)
        if self.kind == "mlperf":
            sizes = [(num_rows, MLPERF_DIM) for num_rows in MLPERF_ROWS]
            pooling = [float(num_ids) for num_ids in MLPERF_BAG_SIZES]
            batch_size = MLPERF_GLOBAL_BATCH // self.num_ranks
            return replace(table_set(sizes, *ranks, pooling), batch_size=batch_size)
        drawn = draw_tables(self.kind, self.num_tables, *ranks, self.seed, "cuda")
        if self.row_factor == 1:
            return drawn
        sizes, pooling = [], []
        for table in drawn.tables:
            config = table.config
            sizes.append((config.num_embeddings * self.row_factor, config.embedding_dim))
            options = drawn.constraints[table.full_name].options
            pooling.append(options.pooling_factor or 1.0)
        return table_set(sizes, *ranks, pooling)


@dataclass(frozen=True)
class Timed:
    """A job whose planning time has an aim."""

    job: Job
    aim_seconds: float
    default_limit_seconds: float
    """How long torchrec's planner may take; 0 where it is not even tried."""


TEN_MINUTES = 600
TIMED = (
    Timed(Job(kind="uniform", num_tables=100, num_ranks=64, memory_gb=8), 5, 240),
    Timed(Job(kind="uniform", num_tables=500, num_ranks=64, memory_gb=24), 25, 0),
    Timed(Job(kind="uniform", num_tables=1000, num_ranks=1024, memory_gb=8), 120, 0),
)
PROBLEMS = (
    Timed(Job(kind="mlperf", num_tables=26, num_ranks=8, memory_gb=60), 10, TEN_MINUTES),
    Timed(Job(kind="mlperf", num_tables=26, num_ranks=16, memory_gb=30), 10, TEN_MINUTES),
    Timed(Job(kind="mlperf", num_tables=26, num_ranks=64, memory_gb=12), 10, TEN_MINUTES),
    Timed(
        Job(kind="torchrec", num_tables=4, num_ranks=2, ranks_on_node=2, memory_gb=16),
        1,
        TEN_MINUTES,
    ),
    Timed(
        Job(kind="torchrec", num_tables=3, num_ranks=2, ranks_on_node=2, memory_gb=16),
        1,
        TEN_MINUTES,
    ),
    Timed(Job(kind="zipf", num_tables=1000, num_ranks=8, memory_gb=64), 120, TEN_MINUTES),
    Timed(Job(kind="zipf", num_tables=1000, num_ranks=64, memory_gb=16), 120, 0),
    Timed(Job(kind="zipf", num_tables=1000, num_ranks=512, memory_gb=8), 120, 0),
    Timed(Job(kind="zipf", num_tables=1000, num_ranks=4096, memory_gb=8), 120, 0),
)
"""torchrec's planner is not tried on more ranks than it did not end on."""

SHAPES = ((10, 2, 2), (16, 4, 2), (24, 8, 8), (32, 16, 8), (40, 64, 8))
"""Tables, ranks, ranks on a node: small enough for torchrec's planner to come to an end."""
SLACK = 1.6
"""How much memory all ranks together have, over what the rows of all tables take."""
LEAST_GB = 1.0


def compared_jobs() -> list[Job]:
    """Return 20 sets of tables, of each kind and for 2 to 64 ranks, that both planners are
    given."""
    jobs = []
    for seed, (num_tables, num_ranks, ranks_on_node) in enumerate(SHAPES, start=1):
        for kind in KINDS:
            job = Job(
                kind=kind,
                num_tables=num_tables,
                num_ranks=num_ranks,
                ranks_on_node=ranks_on_node,
                memory_gb=LEAST_GB,
                seed=seed,
            )
            tables = job.tables().tables
            num_bytes = sum(table.parameter.nbytes for table in tables)
            memory_gb = max(LEAST_GB, round(SLACK * num_bytes / num_ranks / 1e9, 1))
            jobs.append(replace(job, memory_gb=memory_gb))
    return jobs
