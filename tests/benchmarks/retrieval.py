"""Times and memory of steps with a loss over an item table, on two gloo ranks with a thread each.

    python -m tests.benchmarks.retrieval [ROWS ...] [--rounds 3] [--steps 3] [--kinds KIND ...]
    python -m tests.benchmarks.retrieval [ROWS ...] --within GIB

In each round every kind of loss trains for some steps, one after the other, in processes of its own.
Printed are medians over steps: wall time, and processor time of the busier rank, which other jobs
of the machine change less; and the most that a process grew by in a step. With --within, each kind
trains in processes that may grow by so much only, and what became of it is printed.
"""

import argparse
import os
import re
import resource
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the ranks

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_distrec.retrieval import (  # noqa: E402
    in_batch_loss,
    sampled_softmax_loss,
    softmax_loss,
)
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks  # noqa: E402
from tests.support.trainers import make_trainer  # noqa: E402

DIM, QUERIES, NEGATIVES = 64, 128, 4096
GATHERED = "gathered_weight"
SPARSE_KINDS = ["sampled_softmax_loss", "in_batch_loss"]
KINDS = [GATHERED, "softmax_loss", *SPARSE_KINDS]
GIB = 2**30
TIMEOUT_SECONDS = 3000


def loss_of(kind: str, items: nn.Embedding, queries: Tensor, targets: Tensor, step: int) -> Tensor:
    """Return the loss of finding rows of a table."""
    if kind == GATHERED:
        return functional.cross_entropy(queries @ items.weight.T, targets)
    if kind == "softmax_loss":
        return softmax_loss(queries, items, targets)
    if kind == "in_batch_loss":
        return in_batch_loss(queries, items(targets), targets)
    return sampled_softmax_loss(queries, items, targets, num_negatives=NEGATIVES, step=step)


class Scoring(pl.LightningModule):
    """Looks up an item for each query, and has a loss of finding another one."""

    def __init__(self, kind: str, rows: int) -> None:
        super().__init__()
        # Not called by its name: a module whose source reads the weight keeps its table unsharded.
        self.loss = partial(loss_of, kind)
        self.rows = rows
        self.tower = nn.Linear(DIM, DIM)
        self.walls: list[float] = []
        self.processors: list[float] = []
        self.peaks: list[int] = []

    def configure_model(self) -> None:
        # Here each rank builds its share alone.
        if not hasattr(self, "items"):
            self.items = nn.Embedding(self.rows, DIM)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        sources, targets = batch
        queries = self.tower(self.items(sources))
        return self.loss(self.items, queries, targets, batch_idx)

    def on_train_start(self) -> None:
        assert hasattr(next(self.items.parameters()), "place"), "the table is not sharded"

    def on_train_batch_start(self, *_: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.start = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        wall, processor = self.start
        self.walls.append(time.perf_counter() - wall)
        self.processors.append(time.process_time() - processor)
        self.peaks.append(status_bytes("VmHWM:"))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def status_bytes(name: str) -> int:
    """Return a number of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


def trained(kind: str, rows: int, steps: int) -> Scoring:
    """Collective. Return a module after some steps."""
    options: dict[str, Any] = {"sharding_types": ["row_wise"]}
    if kind == GATHERED:
        options["gathered_weight"] = True
    strategy = {
        "tables": {"items": options},
        "convert_embeddings": "all",
        "embedding_update": "sparse" if kind in SPARSE_KINDS else "dense",
    }
    draw = torch.Generator().manual_seed(rank_and_num_ranks()[0])
    batches = [torch.randint(rows, (2, QUERIES), generator=draw) for _ in range(steps)]
    model = Scoring(kind, rows)
    make_trainer(strategy).fit(model, DataLoader(batches, batch_size=None))
    return model


def measured_steps(kind: str, rows: int, steps: int) -> list[tuple[float, float, int]]:
    """Collective. Return wall seconds, processor seconds and growth in bytes of each step but the
    first."""
    trained(kind, 1000, 2)  # what is loaded and started once
    before = status_bytes("VmRSS:")
    model = trained(kind, rows, 1 + steps)
    growths = [peak - before for peak in model.peaks]
    return list(zip(model.walls, model.processors, growths, strict=True))[1:]


def train_within(kind: str, rows: int, spare_bytes: int) -> int:
    """Collective. Train in a process that may grow by so much. Return by how much it has grown at
    most."""
    trained(kind, 1000, 2)
    limit = status_bytes("VmData:") + spare_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = status_bytes("VmRSS:")
    return max(trained(kind, rows, 3).peaks) - before


def print_times(kinds: list[str], rows: int, num_rounds: int, steps: int) -> None:
    """Print a line for each kind of loss."""
    walls: dict[str, list[float]] = {kind: [] for kind in kinds}
    processors: dict[str, list[float]] = {kind: [] for kind in kinds}
    growths = dict.fromkeys(kinds, 0)
    for _ in range(num_rounds):
        for kind in kinds:
            ranks = run_on_ranks(
                measured_steps, 2, kind, rows, steps, timeout_seconds=TIMEOUT_SECONDS
            )
            for step in zip(*ranks, strict=True):
                wall, processor, growth = map(max, zip(*step, strict=True))
                walls[kind].append(wall)
                processors[kind].append(processor)
                growths[kind] = max(growths[kind], growth)
    for kind in kinds:
        wall_ms = 1000 * statistics.median(walls[kind])
        processor_ms = 1000 * statistics.median(processors[kind])
        print(
            f"{rows:>10,} {kind:<22} {wall_ms:9.0f} ms {processor_ms:9.0f} ms of processor "
            f"{growths[kind] / GIB:6.2f} GiB",
            flush=True,
        )


def print_within(kind: str, rows: int, spare_bytes: int) -> None:
    """Print whether a kind of loss trains within a limit."""
    try:
        growths = run_on_ranks(train_within, 2, kind, rows, spare_bytes)
        answer = f"trains: {max(growths) / GIB:.2f} GiB at most"
    except RankFailed as failure:
        tried = re.search(r"(can't allocate memory|MemoryError|bad_alloc).*", str(failure))
        answer = f"fails: {tried.group() if tried else str(failure)[-300:]}"
    print(f"{rows:>10,} {kind:<22} {answer}", flush=True)


def main() -> None:
    """Print a line for each number of items and kind of loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--within", type=float, metavar="GIB")
    options = parser.parse_args()
    print(f"{QUERIES} queries on each of 2 ranks, dim {DIM}, {NEGATIVES} sampled rows")
    for rows in options.rows:
        if options.within is None:
            print_times(options.kinds, rows, options.rounds, options.steps)
            continue
        for kind in options.kinds:
            print_within(kind, rows, int(options.within * GIB))


if __name__ == "__main__":
    main()
