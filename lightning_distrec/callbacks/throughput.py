"""Measures samples per second, and how the time of a step is spent."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_distrec._compat.lightning import show_in_progress_bar
from lightning_distrec.callbacks.steps import Clocked, LogTimes, Step, log, seconds_by_span
from lightning_distrec.errors import ConfigError, did_you_mean

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
            None: the first KeyedJaggedTensor of the batch, else its first tensor.
    """

    def __init__(self, samples_from: str | None = None) -> None:
        super().__init__()
        self._log_times = LogTimes()
        self._samples_from = samples_from
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
        samples = count_samples(batch, self._samples_from, warn=first) if first or self.clock.running else None
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


def count_samples(batch: Any, path: str | None = None, warn: bool = False) -> int | None:
    """Return the number of samples of a batch, or None if it is unknown.

    path: see `Throughput.samples_from`. warn: warn if the number is unknown or ambiguous.
    Raises ConfigError: the batch has nothing at `path`.
    """
    value = batch if path is None else _at(batch, path)
    leaves = list(_leaves(value))
    for leaf in leaves:
        # By an attribute, so that strategies without tables need not import torchrec. Where keys have strides of their
        # own, none of them is known to be the number of samples.
        if hasattr(leaf, "stride_per_key") and not leaf.variable_stride_per_key():
            return int(leaf.stride())
    sizes = [int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes and warn:
        rank_zero_warn(
            f"Throughput: the batch ({_describe(value)}) contains no tensor, so samples per second are not measured. "
            "Set samples_from to a tensor whose first dim is the number of samples."
        )
    if len(set(sizes)) > 1 and warn:
        rank_zero_warn(
            f"Throughput: the tensors of the batch ({_describe(value)}) have different first dims, "
            f"{sorted(set(sizes))}; {sizes[0]} is assumed to be the number of samples. Set samples_from otherwise."
        )
    return sizes[0] if sizes else None


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested dicts, lists, tuples and dataclasses."""
    # is_dataclass holds for classes too, which have no values.
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if not isinstance(value, (Mapping, list, tuple)):
        yield value
        return
    for child in value.values() if isinstance(value, Mapping) else value:
        yield from _leaves(child)


def _at(batch: Any, path: str) -> Any:
    value = batch
    for name in path.split("."):
        try:
            if isinstance(value, Mapping):
                value = value[name]
            # Positions are numbers; the fields of a named tuple are attributes.
            elif isinstance(value, (list, tuple)) and name.isdecimal():
                value = value[int(name)]
            else:
                value = getattr(value, name)
        except (KeyError, IndexError, AttributeError):
            keys = [str(key) for key in value] if isinstance(value, Mapping) else []
            raise ConfigError(
                f"Throughput: samples_from='{path}': there is no '{name}' in {_describe(value)}"
                f"{did_you_mean(name, keys)}"
            ) from None
    return value


def _describe(value: Any) -> str:
    content = ", ".join(map(str, value)) if isinstance(value, Mapping) else ""
    content = str(len(value)) if isinstance(value, (list, tuple)) else content
    return f"a {type(value).__name__}" + (f" of {content}" if content else "")
