"""Planning problems that others have published, and Zipf tables for many ranks."""

from dataclasses import replace

from recipes.criteo_dlrm.columns import MLPERF_BAG_SIZES, MLPERF_ROWS
from tests.benchmarks.planning_jobs import Job, Timed
from tests.support.planned_tables import TableSet, table_set

MLPERF_DIM, MLPERF_GLOBAL_BATCH = 128, 65_536
"""Tables of MLPerf's DLRM-DCNv2: num_embeddings_per_feature, multi_hot_sizes, embedding_dim and the
batch of the reference. Source: github.com/mlcommons/training,
recommendation_v2/torchrec_dlrm/README.MD."""
TORCHREC_ROWS, TORCHREC_DIM = 100, 12
"""Of each table in torchrec/distributed/planner/tests/test_planners.py: 4 tables (test_tw_solution)
and 3 (test_hidden_rw_solution) on 2 ranks. They have 10 columns there, which FBGEMM does not
take."""
TEN_MINUTES = 600

PROBLEMS = (
    *(
        Timed(Job(kind="mlperf", num_tables=26, num_ranks=ranks, memory_gb=memory), 10, TEN_MINUTES)
        for ranks, memory in ((8, 60), (16, 30), (64, 12))
    ),
    *(
        Timed(
            Job(kind="torchrec", num_tables=tables, num_ranks=2, ranks_on_node=2, memory_gb=16),
            1,
            TEN_MINUTES,
        )
        for tables in (4, 3)
    ),
    *(
        Timed(Job(kind="zipf", num_tables=1000, num_ranks=ranks, memory_gb=memory), 120, limit)
        for ranks, memory, limit in (
            (8, 64, TEN_MINUTES),
            (64, 16, TEN_MINUTES),
            (512, 8, 0),
            (4096, 8, 0),
        )
    ),
)
"""Aims are in seconds. torchrec's planner is not tried on more ranks than it did not end on."""


def published_tables(job: Job) -> TableSet:
    """Return the tables of a published problem, on the meta device."""
    if job.kind == "torchrec":
        sizes = [(TORCHREC_ROWS, TORCHREC_DIM)] * job.num_tables
        return table_set(sizes, job.num_ranks, job.ranks_on_node, job.memory_gb)
    sizes = [(rows, MLPERF_DIM) for rows in MLPERF_ROWS]
    tables = table_set(
        sizes,
        job.num_ranks,
        job.ranks_on_node,
        job.memory_gb,
        [float(ids) for ids in MLPERF_BAG_SIZES],
    )
    return replace(tables, batch_size=MLPERF_GLOBAL_BATCH // job.num_ranks)
