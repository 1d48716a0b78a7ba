"""Gathers what every rank does: step time, waits, CPU, memory; names stragglers, and sums a fit
up."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_distrec.atomic_files import replace_file
from lightning_distrec.errors import ConfigError
from lightning_distrec.gpu import DeviceTimes, gpu_use, is_gpu
from lightning_distrec.observe.communication import Communication
from lightning_distrec.observe.rank_records import (
    RankRecord,
    RecordBoard,
    Totals,
    memory_of_rank,
    print_summary,
    rank_numbers,
    stragglers,
    summarize_ranks,
)
from lightning_distrec.observe.steps import (
    Clocked,
    LogTimes,
    end_progress_bar,
    log,
    seconds_by_span,
)
from lightning_distrec.observe.throughput import SampleCounter
from lightning_distrec.spans import BACKWARD, FORWARD, Span, subscribe
from lightning_distrec.units import format_ranks

WAIT_SECONDS = 60.0
"""How long rank 0 waits at the end of a fit for the other ranks' records."""
FILE = "run_summary.json"

_fits = itertools.count()
"""Numbers the fits of this process; all ranks count alike, so that records of different fits
differ."""


class RankMonitor(Clocked):
    """Logs what all ranks do, warns of stragglers, and sums the fit up as a table and as
    run_summary.json.

    Each rank measures its steps with the host's clock, and on a GPU forward and backward by events
    that are read later. When Lightning logs, it leaves a record in the process group's store, and
    rank 0 logs the latest ones of all ranks: no collective is added, and nothing waits for a GPU.
    Each number is logged as `ranks/<name>_max` and `ranks/<name>_mean`.

    - `step_ms`: the step.
    - `own_ms`: the step without waits for ranks, and without backward, which waits for gradients.
    - `wait_ms`: waiting for ids, rows and control messages of other ranks.
    - `host_cpu_ms`: CPU time of all threads of the process.
    - `process_bytes`, `process_peak_bytes`: memory of the process.
    - `device_allocated_bytes`, `device_reserved_bytes`, `device_peak_bytes`: on a GPU, memory of
      torch's allocator.
    - `device_forward_ms`, `device_backward_ms`: on a GPU, by CUDA events; not with manual
      optimization, nor under strategies without spans.
    - `gpu_use_percent`: on a GPU where pynvml is installed, as torch.cuda.utilization reports it.
    - `slowest_rank`: the rank with the largest own time; no maximum or mean.

    A straggler is named in a warning, with its host, node, local rank and device. The table and
    run_summary.json, in the log folder, have where the time went, the share of it that ranks waited
    for data, the mean loss of all steps and ranks, each rank's place, times and memory, and sums by
    node; with `Communication` among the callbacks also what was sent. A rank whose record is
    missing after 60 s is named. Under strategies without spans own time is the step, so that
    stragglers are not recognized.

    Args:
        straggler_share: a rank is a straggler if its own time, without waits for ranks and without
            backward, is above the ranks' median by more than this share of a step.
        samples_from: as in `Throughput`.
    """

    def __init__(self, straggler_share: float = 0.1, samples_from: str | None = None) -> None:
        super().__init__()
        if straggler_share <= 0:
            raise ConfigError(f"RankMonitor: straggler_share={straggler_share} must be above 0.")
        self._log_times = LogTimes()
        self._share = straggler_share
        self._counter = SampleCounter(samples_from, "RankMonitor")
        self._latest = Totals()
        self._fit = Totals()
        self._device_times: DeviceTimes | None = None
        self._stop_timing: Callable[[], None] | None = None
        self._board: RecordBoard
        self._folder: str | None = None
        self._named: set[int] = set()
        self._loss_sum: Tensor
        self.summary: dict[str, Any] = {}
        """The summary of the latest fit, on rank 0."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Agree on the folder, and begin to measure."""
        self._latest = Totals()
        self._fit = Totals()
        self._named = set()
        self.summary = {}
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=trainer.strategy.root_device)
        self._log_times.start()
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        self._counter.start(trainer.train_dataloader, datamodule)
        self._board = RecordBoard(f"lightning_distrec/ranks/{next(_fits)}/", trainer.global_rank)
        # Every rank asks for it, although rank 0 alone writes there: the property is a collective.
        self._folder = trainer.log_dir  # Lightning broadcasts it
        # By hand, backward runs inside of training_step, so that phases do not follow each other.
        if is_gpu(trainer.strategy.root_device) and pl_module.automatic_optimization:
            self._device_times = DeviceTimes()
            self._stop_timing = subscribe(self._end_phase)
        self.clock.start()

    def _end_phase(self, span: Span) -> None:
        if self._device_times is not None and span.name in (FORWARD, BACKWARD):
            self._device_times.end(span.name)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._device_times is not None:
            self._device_times.begin()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.clock.running:
            return
        device_seconds = {} if self._device_times is None else self._device_times.end_step()
        samples = self._counter.count(batch) or 0
        step = self.clock.end()
        span_seconds = seconds_by_span(step)
        loss = (outputs or {}).get("loss")
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # It stays on the device: reading it would wait. Lightning has divided it by the
            # accumulated batches.
            self._loss_sum = self._loss_sum + loss.detach() * trainer.accumulate_grad_batches
            self._fit.losses += 1
        for totals in (self._latest, self._fit):
            totals.add(step.seconds, step.cpu_seconds, samples, span_seconds)
            totals.add_device(device_seconds)
        if self._log_times.due(trainer):
            self._put(trainer, "latest")
            self._latest = Totals()
            # Rank 0 takes the records that are there: of a rank that is behind, the one before. So
            # nobody waits.
            if trainer.is_global_zero:
                self._log(trainer, self._board.records("latest"))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the last record; rank 0 waits for those of all ranks, at most WAIT_SECONDS."""
        self.stop()
        if not self._fit.steps:
            return
        self._fit.loss_sum = float(self._loss_sum)
        self._put(trainer, "last")
        if trainer.is_global_zero:
            # The store lives as long as the process group, which further fits use: what is read is
            # removed.
            records = self._board.records("last", WAIT_SECONDS)
            divided_by = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
            readers = trainer.world_size // divided_by
            self.summary = summarize_ranks(
                records, self._board.missing(records), self._share, readers
            )
            self._board.clear()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary and write it, on rank 0."""
        if not self.summary:
            return
        # Communication has gathered in on_train_end, which is over for all callbacks, in whatever
        # order they are.
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        counts = [callback for callback in callbacks if isinstance(callback, Communication)]
        self.summary["bytes_sent_per_step"] = counts[0].mean_bytes_per_step if counts else {}
        self.summary["exchanges_per_step"] = counts[0].mean_exchanges_per_step if counts else {}
        end_progress_bar(trainer, pl_module)
        print_summary(self.summary)
        # Set where Lightning's types do not look.
        trial = trainer.fast_dev_run  # type: ignore[attr-defined]
        # Loggers may write to remote storage, where Path would make a local folder named 's3:'.
        if self._folder and "://" not in self._folder and not trial:
            file = Path(self._folder, FILE)
            try:
                replace_file(file, json.dumps(self.summary, indent=1).encode())
                rank_zero_info(f"RankMonitor: wrote {file}.")
            except OSError as error:
                rank_zero_warn(f"RankMonitor: the summary cannot be written to {file}: {error}.")

    @override
    def stop(self) -> None:
        super().stop()
        if self._stop_timing is not None:
            self._stop_timing()
        self._device_times = self._stop_timing = None

    def _put(self, trainer: Trainer, kind: str) -> None:
        device = trainer.strategy.root_device
        record = RankRecord(
            trainer.global_rank,
            self._latest,
            self._fit,
            node=trainer.node_rank,
            local_rank=trainer.local_rank,
            device=str(device),
            gpu_use=gpu_use(device),
            memory=memory_of_rank(device),
        )
        self._board.put(record, kind)

    def _log(self, trainer: Trainer, records: list[RankRecord]) -> None:
        log(trainer, rank_numbers(records))
        latest = [record.latest for record in records]
        slow = {records[place].rank for place in stragglers(latest, self._share)}
        # Once a fit for each rank: a slow host stays slow, and would fill the log.
        new = sorted(slow - self._named)
        if new:
            self._named |= set(new)
            places = ", ".join(sorted({record.place for record in records if record.rank in new}))
            rank_zero_warn(
                f"RankMonitor: rank {format_ranks(new)} on {places} took more time of its own than "
                f"the others, by more than {self._share:.0%} of a step; they wait for it. Look at "
                "its dataloader, and what else runs there."
            )
