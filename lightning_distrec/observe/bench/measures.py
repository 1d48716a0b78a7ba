"""The callback of a measured run: the times of all ranks' steps and their peak memory, in a
file."""

import json
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_distrec.cluster.consensus import all_gather_values
from lightning_distrec.observe.steps import Clocked
from lightning_distrec.observe.throughput import SampleCounter


class Measures(Clocked):
    """Writes FOLDER/RANK.json: seconds and samples of each step after the warm-up, and peak memory,
    of all ranks.

    Args:
        folder: the folder; other nodes need not see it.
        warmup_steps: number of steps at the start that are not measured.
        samples_from: as in `Throughput`.
    """

    def __init__(self, folder: str, warmup_steps: int = 5, samples_from: str | None = None) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._warmup_steps = warmup_steps
        self._counter = SampleCounter(samples_from)
        self._seconds: list[float] = []
        self._samples: list[float | None] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # On every rank, because a step takes as long as on its slowest one.
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        self._counter.start(trainer.train_dataloader, datamodule)
        self.clock.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seconds.append(self.clock.end().seconds)
        count = self._counter.count(batch)
        # Ranks of a pipeline share a batch.
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        share = sampler.get("num_replicas", trainer.world_size) / trainer.world_size
        # None where the number is unknown: the run has times all the same.
        self._samples.append(None if count is None else count * share)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Write what all ranks have measured."""
        self.clock.stop()
        device = trainer.strategy.root_device
        if device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(device)
        else:
            # Of the process, libraries included: torch counts no memory of the CPU. In KiB on
            # Linux.
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        measured = {
            "strategy": type(trainer.strategy).__name__,
            "num_ranks": trainer.world_size,
            "seconds": self._seconds[self._warmup_steps :],
            "samples": self._samples[self._warmup_steps :],
            "problem": self._counter.problem,
            "peak_bytes": peak_bytes,
        }
        ranks = [measured]
        if trainer.world_size > 1:
            ranks = all_gather_values(measured, dist.new_group(backend="gloo"))
        (self._folder / f"{trainer.global_rank}.json").write_text(json.dumps(ranks))
