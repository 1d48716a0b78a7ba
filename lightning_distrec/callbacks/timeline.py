"""A trace of some steps of all ranks: what each computes, which exchanges run meanwhile, and what it waits for."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_distrec._compat.torch import default_store
from lightning_distrec.callbacks.steps import Clocked, Step
from lightning_distrec.callbacks.trace import Event, align_clocks, trace_events
from lightning_distrec.errors import ConfigError
from lightning_distrec.units import format_ranks, shortened

WAIT_SECONDS = 60.0
"""How long rank 0 waits at the end of a fit for the spans of the other ranks."""

_fits = itertools.count()
"""Numbers the fits of this process; all ranks count alike, so that keys of different fits differ."""


class Timeline(Clocked):
    """Writes a trace of some steps of all ranks into one JSON file, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    Rank 0 writes it once all ranks have made these steps. The others send their spans through the process group's
    store: no collective is added to a step. The ranks' clocks are compared when the fit starts.

    Args:
        path: the file; it ends in .json. Missing folders are created.
        first_step: the first batch of the trace, counted from 0 within a fit.
        steps: number of batches in the trace.
    """

    def __init__(self, path: str = "timeline.json", first_step: int = 20, steps: int = 4) -> None:
        super().__init__()
        if steps < 1 or first_step < 0:
            raise ConfigError(
                f"Timeline: steps={steps}, first_step={first_step}: steps must be at least 1, first_step at least 0."
            )
        if Path(path).suffix != ".json":
            raise ConfigError(f"Timeline: path='{path}' must end in .json, the format of traces.")
        self._path = Path(path)
        self._first_step = first_step
        self._steps = steps
        self._seen = 0
        self._recorded: list[Step] = []
        self._zero = 0.0
        self._num_ranks = 1
        self._key = ""
        self._is_writing = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Compare the ranks' clocks and begin to record."""
        self._seen, self._recorded, self._is_writing = 0, [], False
        self._key = f"lightning_distrec/timeline/{next(_fits)}/"
        self._num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._zero = align_clocks(trainer.strategy.root_device)
        self.clock.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.clock.running:
            step = self.clock.end()
            if self._seen >= self._first_step:
                self._recorded.append(step)
            self._seen += 1
            # One step more than asked for: exchanges that are under way at the end are emitted when they end.
            if len(self._recorded) > self._steps:
                self._finish(trainer)
        elif self._is_writing:
            self._write_if_complete()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was recorded if the fit ends before the last of the steps."""
        if self.clock.running:
            self._finish(trainer)
        deadline = time.monotonic() + WAIT_SECONDS
        while self._is_writing and time.monotonic() < deadline:
            self._write_if_complete()
            time.sleep(0.01)
        if self._is_writing:
            present = self._present()
            missing = [rank for rank in range(self._num_ranks) if rank not in present]
            rank_zero_warn(
                f"Timeline: no spans came from rank {format_ranks(missing)} within {WAIT_SECONDS:g} s of the end of "
                "the fit; the trace is written without them."
            )
            self._write(present)

    def _finish(self, trainer: Trainer) -> None:
        """Stop recording, and send this rank's events to rank 0."""
        self.clock.stop()
        steps, self._recorded = self._recorded, []
        self._is_writing = trainer.is_global_zero and bool(steps)
        if not steps:
            rank_zero_warn(
                f"Timeline: the fit ended after {self._seen} batches, before first_step={self._first_step}, so no "
                "trace was written. Set a smaller first_step."
            )
            return
        shown = steps[: self._steps]
        spans = [span for step in steps for span in step.spans if span.begin < shown[-1].end]
        if not spans:
            rank_zero_warn(
                "Timeline: the strategy emits no spans, so the trace contains steps only. Use one of "
                "strategy='torchrec_sharded', 'ddp_tuned' and 'fsdp_tuned'."
            )
        events = trace_events(trainer.global_rank, shown, self._first_step, spans, self._zero)
        if self._num_ranks > 1:
            default_store().set(f"{self._key}{trainer.global_rank}", json.dumps(events))
        elif self._is_writing:
            self._save([events])

    def _present(self) -> list[int]:
        """Return the ranks whose events are in the store."""
        store: dist.Store = default_store()
        return [rank for rank in range(self._num_ranks) if store.check([f"{self._key}{rank}"])]

    def _write_if_complete(self) -> None:
        if default_store().check([f"{self._key}{rank}" for rank in range(self._num_ranks)]):
            self._write(list(range(self._num_ranks)))

    def _write(self, ranks: list[int]) -> None:
        store: dist.Store = default_store()
        keys = [f"{self._key}{rank}" for rank in ranks]
        self._save([json.loads(store.get(key)) for key in keys])
        for key in keys:
            store.delete_key(key)

    def _save(self, events_by_rank: list[list[Event]]) -> None:
        self._is_writing = False
        events = [event for events in events_by_rank for event in events]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
        numbers = dict.fromkeys(event["name"] for event in events if event.get("cat") == "steps")
        rank_zero_info(
            f"Timeline: wrote {shortened(list(numbers), 8)} of {len(events_by_rank)} ranks to {self._path}. Open it in "
            "https://ui.perfetto.dev or chrome://tracing."
        )
