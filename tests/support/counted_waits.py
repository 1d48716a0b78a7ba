"""Counts, on CUDA devices in host memory, where the host waits in steps of two ranks: ours and
TorchRec's.

    python -m tests.support.host_cuda --devices 2 -m tests.support.counted_waits FILE

Writes what of rank 0 is counted as JSON: contender -> place -> waits per step.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.performance_contenders import ByHandPrefetched, ByTrainer, our_strategy
from tests.benchmarks.performance_model import Batches, LitDLRM
from tests.benchmarks.turns import Turn, silence
from tests.support.click_model import SequenceModel, rank_loader, seeded
from tests.support.host_waits import HostWaits, WaitsOfSteps
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

NUM_RANKS = 2
TURN = Turn(first=6, counted=5, last=4)
NUM_ROWS = 1000


class Logging(LitDLRM):
    """Logs a number of the host's at each step, too."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.log("size", 8.0, batch_size=8)
        return super().training_step(batch, batch_idx)


def waits_of_ours(
    turn: Turn, batches: Batches, device: torch.device, depth: int, logged: bool = False
) -> Counter[str]:
    """Collective. Return where the host waits in the steps of a fit that count."""
    counting = WaitsOfSteps(turn.first, turn.counted)
    contender = ByTrainer(
        NUM_ROWS, batches, turn, strategy=lambda: our_strategy(depth), device=device
    )
    if logged:
        contender.module = Logging(NUM_ROWS, logged=True)
    contender.turn(counting)
    return counting.waits


def waits_of_rows(turn: Turn, batches: Batches, device: torch.device) -> Counter[str]:
    """Collective. Return the same of a fit with four features, of whose ids each is sent once."""
    counting = WaitsOfSteps(turn.first, turn.counted)
    options = {"tables": {"*": {"pooling_factor": 50}}, "sharding_types": ["table_wise"]}
    trainer = make_trainer(options, accelerator="gpu", callbacks=[counting])
    trainer.fit(
        seeded(SequenceModel, torch.optim.SGD, {"lr": 0.1}),
        rank_loader(turn.steps, dist.get_rank()),
    )
    return counting.waits


def waits_of_torchrec(turn: Turn, batches: Batches, device: torch.device) -> Counter[str]:
    """Collective. Return the same of a loop by hand around TrainPipelineSparseDist."""
    contender = ByHandPrefetched(NUM_ROWS, batches, turn, device=device)
    counter, counts, steps = HostWaits(), Counter[str](), iter(range(turn.steps + 1))

    def clock() -> float:
        step = next(steps)
        if step == turn.first:
            counter.begin()
        if step == turn.first + turn.counted:
            counts.update(counter.end())
        return 0.0

    contender.clock = clock
    contender.turn()
    return counts


CONTENDERS: dict[str, Callable[..., Counter[str]]] = {
    "prefetched": partial(waits_of_ours, depth=3),
    "prefetched, logged": partial(waits_of_ours, depth=3, logged=True),
    "not prefetched": partial(waits_of_ours, depth=1),
    "rows sent once": waits_of_rows,
    "TorchRec": waits_of_torchrec,
}


def _count(names: list[str]) -> dict[str, dict[str, float]]:
    rank, num_ranks = rank_and_num_ranks()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=num_ranks, device_id=device)
    silence()
    batches = Batches(NUM_ROWS, TURN.steps, rank, batch_size=64)
    counts = {name: CONTENDERS[name](TURN, batches, device) for name in names}
    return {
        name: {place: n / TURN.counted for place, n in places.items()}
        for name, places in counts.items()
    }


if __name__ == "__main__":
    names = sys.argv[2:] or list(CONTENDERS)
    Path(sys.argv[1]).write_text(json.dumps(run_on_ranks(_count, NUM_RANKS, names)[0], indent=1))
