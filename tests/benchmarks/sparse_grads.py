"""How long backward takes with a table's sparse gradient exchanged as torch does, as rows, and as a
dense tensor.

python -m tests.benchmarks.sparse_grads

Prints a table in Markdown: medians of two gloo ranks of one thread each, the ways in turns at every
step.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_distrec.strategies.data_parallel.gradient_exchange import sparse_hook
from tests.support.ranks import run_on_ranks

SHAPES = (
    (100, 64, 1024),
    (1000, 64, 8192),
    (10_000, 64, 1024),
    (10_000, 64, 8192),
    (10_000, 64, 65_536),
)
SHAPES += ((100_000, 64, 8192), (100_000, 16, 65_536))
"""Rows, columns, and ids that each rank looks up."""
STEPS, UNCOUNTED = 14, 3


def measure() -> dict[tuple[int, int, int], dict[str, float]]:
    """Collective. Return the milliseconds of each way, by shape."""
    dist.init_process_group("gloo")
    return {shape: _of_shape(*shape) for shape in SHAPES}


def _of_shape(num_rows: int, dim: int, num_ids: int) -> dict[str, float]:
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(num_rows, (STEPS, num_ids // 8, 8))
    ways = {}
    for way in ("torch's", "sparse", "dense"):
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.EmbeddingBag(num_rows, dim, sparse=True, mode="sum"), nn.Linear(dim, 1)
        )
        ways[way] = DistributedDataParallel(module, gradient_as_bucket_view=True)
    ways["sparse"].register_comm_hook(None, sparse_hook("sparse"))
    ways["dense"].register_comm_hook(None, sparse_hook("dense"))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for step_values in ids:
        for way, ddp in ways.items():
            ddp.zero_grad()
            loss = ddp(step_values).sum()
            dist.barrier()
            begun = time.perf_counter()
            loss.backward()
            seconds[way].append(time.perf_counter() - begun)
    return {way: 1e3 * statistics.median(times[UNCOUNTED:]) for way, times in seconds.items()}


def main() -> None:
    """Measure and print."""
    results = run_on_ranks(measure, 2, timeout_seconds=600)
    print(
        "| rows x columns, ids of a rank | torch's | sparse | dense | dense / sparse "
        "|\n|---|---|---|---|---|"
    )
    for (rows, dim, ids), times in results[0].items():
        shown = " | ".join(f"{times[way]:.1f} ms" for way in times)
        print(f"| {rows} x {dim}, {ids} | {shown} | **{times['dense'] / times['sparse']:.2f}** |")


if __name__ == "__main__":
    from tests.benchmarks import sparse_grads

    sparse_grads.main()
