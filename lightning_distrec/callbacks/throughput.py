"""Measures samples per second, and how the time of a step is spent."""

from collections import Counter, deque
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_distrec._compat.lightning import show_in_progress_bar
from lightning_distrec.callbacks.samples import SampleCounter
from lightning_distrec.callbacks.steps import Clocked, LogTimes, Step, log, seconds_by_span

SAMPLES_PER_SECOND = "throughput/samples_per_second"
STEP_MS = "throughput/step_ms"
WINDOW = 50
"""Number of latest batches over which each number is averaged."""


class Throughput(Clocked):
    """Shows samples per second in the progress bar, and logs them with the time that each phase of a step takes.

    Only rank 0 measures, with the host's clock, without collectives and without waiting for the GPU. Samples per second
    are those of rank 0 times the number of ranks. The phases are logged under strategies that emit spans.

    Args:
        samples_from: where in the batch to count samples, as keys, positions or attributes joined by dots: "label",
            "0.features". The number is the first dim of the tensor there, or the stride of the KeyedJaggedTensor.
            None: the first KeyedJaggedTensor of the batch, else the one size of all tensors, else the tensor that is as
            long as the loader's batch_size. Where none of these holds, samples per second are not measured.
    """

    def __init__(self, samples_from: str | None = None) -> None:
        super().__init__()
        self._log_times = LogTimes()
        self._counter = SampleCounter(samples_from, "Throughput")
        self._steps: deque[tuple[Step, int | None]] = deque(maxlen=WINDOW)
        self._counted = False
        self._num_ranks = 1

    @property
    def numbers(self) -> dict[str, float]:
        """The current numbers by their names in the loggers; empty before the first step, and on ranks other than 0."""
        if not self._steps:
            return {}
        per_step_ms = 1000 / len(self._steps)
        seconds = sum(step.seconds for step, _ in self._steps)
        totals: Any = Counter()
        for step, _ in self._steps:
            totals.update(seconds_by_span(step))
        if totals:
            # Exclusive spans can be added up: the rest of the step is in none of them.
            totals["other"] = seconds - sum(totals.values())
        numbers = {f"throughput/{name.replace(' ', '_')}_ms": total * per_step_ms for name, total in totals.items()}
        if (samples_per_second := self._samples_per_second()) is not None:
            numbers[SAMPLES_PER_SECOND] = samples_per_second
        return {STEP_MS: seconds * per_step_ms} | numbers

    def _samples_per_second(self) -> float | None:
        seconds = sum(step.seconds for step, _ in self._steps)
        samples = [number for _, number in self._steps if number is not None]
        return sum(samples) * self._num_ranks / seconds if seconds and len(samples) == len(self._steps) else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.clear()
        self._log_times.start()
        self._counted = False
        self._counter.start(trainer.train_dataloader, trainer.datamodule)  # type: ignore[attr-defined]
        # Ranks with batches of their own: those of one pipeline (pipeline_parallel) have the same.
        self._num_ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        # No exchange follows from this, so that one rank may measure alone.
        if trainer.is_global_zero:
            self.clock.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Every rank counts the samples of its first batch: a wrong samples_from must fail on all of them.
        first, self._counted = not self._counted, True
        samples = self._counter.count(batch) if first or self.clock.running else None
        if not self.clock.running:
            return
        self._steps.append((self.clock.end(), samples))
        if (samples_per_second := self._samples_per_second()) is not None:
            # Not by self.log(prog_bar=True), which would make a tensor on the device and wait for it.
            show_in_progress_bar(trainer, "samples/s", format_count(samples_per_second))
        if self._log_times.due(trainer):
            log(trainer, self.numbers)


def format_count(number: float) -> str:
    """Return a number with three significant digits: 950, 12.3k, 1.23M."""
    units = ["", "k", "M", "G"]
    # The bounds are where rounding would add a digit: 999.5 is 1.00k, and 99.95 is 100.
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop(0)
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f}{units[0]}"
