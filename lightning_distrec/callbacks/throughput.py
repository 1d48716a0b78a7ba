"""How fast a fit goes, and where the time of its steps goes."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_distrec._compat.lightning import show_in_progress_bar
from lightning_distrec.callbacks.steps import Clocked, LogTimes, log, seconds_by_span
from lightning_distrec.errors import ConfigError, did_you_mean

SAMPLES_PER_SECOND = "throughput/samples_per_second"
STEP_MS = "throughput/step_ms"


@dataclass(frozen=True)
class Measured:
    """What is kept of one step."""

    samples: int | None
    seconds: float
    seconds_by_span: dict[str, float]


class Throughput(Clocked):
    """Samples per second in the progress bar and the loggers; in the loggers also where a step's time goes.

    Only rank 0 measures, by the host's clock; nothing is exchanged, and no GPU is waited for. Samples per second are
    those of rank 0 times the number of ranks. The split of a step is there under strategies that tell it.

    Args:
        every_n_steps: optimizer steps between two entries in the loggers; None takes the Trainer's log_every_n_steps.
        window: number of last batches that each number is the mean of.
        samples_from: where the batch holds what counts its samples, as keys, positions or attributes joined by dots:
            "label", "0.features". The first dim of the tensor there counts, or the stride of the
            KeyedJaggedTensor. None takes the first KeyedJaggedTensor of the batch, else its first tensor.
    """

    def __init__(self, every_n_steps: int | None = None, window: int = 50, samples_from: str | None = None) -> None:
        super().__init__()
        if window < 1:
            raise ConfigError(f"Throughput: window={window} must be at least 1, the last batch.")
        self._log_times = LogTimes("Throughput", every_n_steps)
        self._samples_from = samples_from
        self._steps: deque[Measured] = deque(maxlen=window)
        self._looked = False
        self._num_ranks = 1

    @property
    def numbers(self) -> dict[str, float]:
        """What the loggers would get now, by its name there; empty before the first step, and on ranks other than 0."""
        if not self._steps:
            return {}
        per_step_ms = 1000 / len(self._steps)
        seconds = sum(step.seconds for step in self._steps)
        names = dict.fromkeys(name for step in self._steps for name in step.seconds_by_span)
        parts = {name: sum(step.seconds_by_span.get(name, 0.0) for step in self._steps) for name in names}
        if parts:
            parts["other"] = seconds - sum(parts.values())
        numbers = {f"throughput/{name.replace(' ', '_')}_ms": part * per_step_ms for name, part in parts.items()}
        samples_per_second = self._samples_per_second()
        if samples_per_second is not None:
            numbers[SAMPLES_PER_SECOND] = samples_per_second
        return {STEP_MS: seconds * per_step_ms} | numbers

    def _samples_per_second(self) -> float | None:
        seconds, samples = 0.0, 0
        for step in self._steps:
            if step.samples is None:
                return None
            seconds += step.seconds
            samples += step.samples
        return samples * self._num_ranks / seconds if seconds else None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.clear()
        self._log_times.start()
        self._looked = False
        self._num_ranks = trainer.world_size
        if trainer.is_global_zero:
            self.clock.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Every rank looks at its first batch: a wrong samples_from must fail on all of them.
        first, self._looked = not self._looked, True
        samples = count_samples(batch, self._samples_from, warn=first) if first or self.clock.running else None
        if not self.clock.running:
            return
        step = self.clock.end()
        self._steps.append(Measured(samples, step.seconds, seconds_by_span(step)))
        samples_per_second = self._samples_per_second()
        if samples_per_second is not None:
            show_in_progress_bar(trainer, "samples/s", short(samples_per_second))
        if self._log_times.due(trainer):
            log(trainer, self.numbers)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.stop()


def short(number: float) -> str:
    """Return a number with three digits: 950, 12.3k, 1.23M."""
    units = ["", "k", "M", "G"]
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop(0)
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f}{units[0]}"


def count_samples(batch: Any, where: str | None = None, warn: bool = False) -> int | None:
    """Return the number of samples of a batch, or None where nothing tells it.

    where: see `Throughput.samples_from`. warn: warn where it is not known or not certain.
    Raises ConfigError: the batch has nothing at `where`.
    """
    found = batch if where is None else _at(batch, where)
    leaves = list(_leaves(found))
    for leaf in leaves:
        if _is_keyed_jagged(leaf) and not leaf.variable_stride_per_key():
            return int(leaf.stride())
    sizes = [int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes and warn:
        rank_zero_warn(
            f"Throughput: no tensor was found in the batch ({_in_words(found)}), so samples per second are left out. "
            "Set samples_from to the place of a tensor whose first dim counts samples."
        )
    if len(set(sizes)) > 1 and warn:
        rank_zero_warn(
            f"Throughput: the tensors of the batch ({_in_words(found)}) have first dims of {sorted(set(sizes))}; the "
            f"first one, {sizes[0]}, is taken for the number of samples. Set samples_from to the place of a tensor "
            "whose first dim counts samples."
        )
    return sizes[0] if sizes else None


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what is in dicts, lists, tuples and dataclasses, at any depth."""
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    else:
        yield value
        return
    for part in inner:
        yield from _leaves(part)


def _is_keyed_jagged(value: Any) -> bool:
    return hasattr(value, "stride_per_key")  # no import of torchrec, which a run may be without


def _at(batch: Any, where: str) -> Any:
    value = batch
    for name in where.split("."):
        try:
            if isinstance(value, Mapping):
                value = value[name]
            elif isinstance(value, (list, tuple)) and name.isdecimal():
                value = value[int(name)]
            else:
                value = getattr(value, name)
        except (KeyError, IndexError, AttributeError):
            keys = [str(key) for key in value] if isinstance(value, Mapping) else []
            raise ConfigError(
                f"Throughput: samples_from='{where}': nothing is called '{name}' in {_in_words(value)}"
                f"{did_you_mean(name, keys)}"
            ) from None
    return value


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
