"""Counts what steps of two ranks ask of CUDA devices in host memory, by ours and by TorchRec's
pipeline: waits of the host, operations, and copies to the device.

    python -m tests.support.host_cuda --devices 2 -m tests.support.counted_steps FILE [NAME ...]

Writes what of rank 0 is counted as JSON: contender -> "waits" or "operations" -> place or name ->
number per step. Prints a table of it.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.performance_contenders import (
    ByHand,
    ByHandPrefetched,
    ByTrainer,
    our_strategy,
)
from tests.benchmarks.performance_model import Batches, LitDLRM
from tests.benchmarks.report import table
from tests.benchmarks.turns import Turn, silence
from tests.support.click_model import SequenceModel, rank_loader, seeded
from tests.support.host_waits import HostWaits, WaitsOfSteps
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

NUM_RANKS = 2
TURN = Turn(first=10, counted=5, last=4)
"""Weights are compared in steps 8 and 16: none of the steps that count."""
NUM_ROWS = 1000
COPIES = "copy_ to the device"
BATCH_TENSORS = 4
"""Of a batch: dense features, ids, their lengths, labels."""
EXCHANGES = "c10d::"
"""What the names of exchanges begin with."""
BACKWARD = "a thread of the device"
"""What waits in backward, of any model with these tables: FBGEMM."""


class Logging(LitDLRM):
    """Logs a number of the host's at each step, too."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.log("size", 8.0, batch_size=8)
        return super().training_step(batch, batch_idx)


class OnDevice(ByHand):
    """A plain loop by hand, which moves each batch to the device."""

    def turn(self) -> list[float]:
        model = self.model
        self.model = lambda batch: model(batch.to(self.device, True))  # type: ignore[assignment]
        return super().turn()


def steps_of_ours(
    turn: Turn, batches: Batches, device: torch.device, depth: int, logged: bool = False
) -> HostWaits:
    """Collective. Return what the steps of a fit ask that count."""
    counting = WaitsOfSteps(turn.first, turn.counted)
    contender = ByTrainer(
        NUM_ROWS, batches, turn, strategy=lambda: our_strategy(depth), device=device
    )
    if logged:
        contender.module = Logging(NUM_ROWS, logged=True)
    contender.turn(counting)
    return counting.counter


def steps_of_rows(turn: Turn, batches: Batches, device: torch.device) -> HostWaits:
    """Collective. Return the same of a fit with four features, of whose ids each is sent once."""
    counting = WaitsOfSteps(turn.first, turn.counted)
    options = {"tables": {"*": {"pooling_factor": 50}}, "sharding_types": ["table_wise"]}
    trainer = make_trainer(options, accelerator="gpu", callbacks=[counting])
    trainer.fit(
        seeded(SequenceModel, torch.optim.SGD, {"lr": 0.1}),
        rank_loader(turn.steps, dist.get_rank()),
    )
    return counting.counter


def steps_of_torchrec(
    turn: Turn, batches: Batches, device: torch.device, kind: type[ByHand] = ByHandPrefetched
) -> HostWaits:
    """Collective. Return the same of a loop by hand, by default around TrainPipelineSparseDist."""
    contender = kind(NUM_ROWS, batches, turn, device=device)
    counter, steps = HostWaits(), iter(range(turn.steps + 1))

    def clock() -> float:
        step = next(steps)
        if step == turn.first:
            counter.begin()
        if step == turn.first + turn.counted:
            counter.end()
        return 0.0

    contender.clock = clock
    contender.turn()
    return counter


CONTENDERS: dict[str, Callable[..., HostWaits]] = {
    "prefetched": partial(steps_of_ours, depth=3),
    "prefetched, logged": partial(steps_of_ours, depth=3, logged=True),
    "not prefetched": partial(steps_of_ours, depth=1),
    "rows sent once": steps_of_rows,
    "TorchRec": steps_of_torchrec,
    "TorchRec, not prefetched": partial(steps_of_torchrec, kind=OnDevice),
}
Counts = dict[str, dict[str, dict[str, float]]]


def _count(names: list[str]) -> Counts:
    rank, num_ranks = rank_and_num_ranks()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=num_ranks, device_id=device)
    silence()
    batches = Batches(NUM_ROWS, TURN.steps, rank, batch_size=64)
    counts = {}
    for name in names:
        counter = CONTENDERS[name](TURN, batches, device)
        counts[name] = {
            "waits": {place: n / TURN.counted for place, n in counter.waits.items()},
            "operations": {place: n / TURN.counted for place, n in counter.operations.items()},
        }
    return counts


def totals(counts: Counts) -> dict[str, dict[str, float]]:
    """Return what stands in the table, contender by contender."""
    rows = {}
    for name, of_contender in counts.items():
        operations = of_contender["operations"]
        waits = of_contender["waits"]
        exchanges = sum(n for text, n in operations.items() if text.startswith(EXCHANGES))
        backward = sum(n for at, n in waits.items() if at.startswith(BACKWARD))
        # FBGEMM copies numbers in backward, alike for all, and waits for each: they are apart.
        copies = operations.get(COPIES, 0) - backward
        rows[name] = {
            "waits in forward": sum(waits.values()) - backward,
            "waits in backward": backward,
            "operations": sum(operations.values()) - exchanges - copies - backward,
            "exchanges": exchanges,
            "copies to the device": copies,
        }
    return rows


def by_operation(counts: Counts) -> str:
    """Return a table: operation by operation, how often each contender queues it in a step."""
    names = sorted({text for of_one in counts.values() for text in of_one["operations"]})
    rows = []
    for text in names:
        rows.append([text, *[f"{one['operations'].get(text, 0):g}" for one in counts.values()]])
    return table(["operation", *counts], rows)


if __name__ == "__main__":
    names = sys.argv[2:] or list(CONTENDERS)
    counted: Counts = run_on_ranks(_count, NUM_RANKS, names, timeout_seconds=900)[0]
    Path(sys.argv[1]).write_text(json.dumps(counted, indent=1))
    sums = totals(counted)
    columns = list(next(iter(sums.values())))
    cells = [[name, *[f"{row[column]:g}" for column in columns]] for name, row in sums.items()]
    print(table(["", *columns], cells))
    print(by_operation(counted))
