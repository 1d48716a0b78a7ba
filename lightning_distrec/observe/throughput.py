"""Counts samples, measures how many a second are trained, and how the time of a step is spent."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_distrec._compat.lightning import show_in_progress_bar
from lightning_distrec.batches import is_keyed, named_leaves
from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.observe.steps import Clocked, LogTimes, Step, log, seconds_by_span
from lightning_distrec.units import scaled


class SampleCounter:
    """Counts the samples of one loader's batches.

    path: see `Throughput.samples_from`. source: what counts, for the warning that a number is
    unknown.
    """

    def __init__(self, path: str | None = None, source: str = "") -> None:
        self._path = path
        self._source = source
        self._batch_sizes: set[int] = set()
        self._place: int | None = None
        self.problem = ""
        """Why the number is unknown; "" where it is not."""

    def start(self, loaders: Any, datamodule: Any = None) -> None:
        """Begin with the first batch. loaders: those of a fit, in any nesting; datamodule: may have
        a `batch_size`."""
        sources = [*(loader for _, loader in named_leaves(loaders)), datamodule]
        sources += [getattr(source, "batch_sampler", None) for source in sources]
        sizes = {getattr(source, "batch_size", None) for source in sources}
        self._batch_sizes = {size for size in sizes if isinstance(size, int)}
        self._place = None
        self.problem = ""

    def count(self, batch: Any) -> int | None:
        """Return the number of samples, or None if it is unknown; the first time a warning says so.

        Raises ConfigError: the batch has nothing at the path.
        """
        value = batch if self._path is None else value_at(batch, self._path, "samples_from")
        leaves = [leaf for _, leaf in named_leaves(value)]
        for leaf in leaves:
            # Where keys have strides of their own, none of them is known to be the number of
            # samples.
            if is_keyed(leaf) and not leaf.variable_stride_per_key():
                return int(leaf.stride())
        sizes = [int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if len(set(sizes)) == 1:
            return sizes[0]
        # The last batch of an epoch is smaller than the loader's size: the place is that of the
        # first batch. The last place that fits, since as many ids as examples may come by chance,
        # and labels come after ids.
        if self._place is None:
            places = [place for place, size in enumerate(sizes) if size in self._batch_sizes]
            self._place = places[-1] if places else None
        if self._place is not None and self._place < len(sizes):
            return sizes[self._place]
        self._warn(_describe(value), sorted(set(sizes)))
        return None

    def _warn(self, description: str, sizes: Iterable[int]) -> None:
        if self.problem:
            return
        tensors = f"have different first dims, {sizes}, and none is the loader's batch size"
        self.problem = (
            f"samples per second are not measured: the tensors of the batch ({description}) "
            f"{tensors}. "
            if sizes
            else f"samples per second are not measured: the batch ({description}) contains no "
            "tensor. "
        ) + "Set samples_from to a tensor whose first dim is the number of samples."
        if self._source:
            rank_zero_warn(f"{self._source}: {self.problem}")


def value_at(batch: Any, path: str, option: str) -> Any:
    """Return what is in a batch at a path of keys, positions and attributes, joined by dots.

    Raises ConfigError, which names the option: there is nothing.
    """
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
            keys = list(map(str, value)) if isinstance(value, Mapping) else []
            raise ConfigError(
                f"{option}='{path}': there is no '{name}' in "
                f"{_describe(value)}{did_you_mean(name, keys)}"
            ) from None
    return value


def _describe(value: Any) -> str:
    content = ", ".join(map(str, value)) if isinstance(value, Mapping) else ""
    content = (
        f"{len(value)}: name a position from 0" if isinstance(value, (list, tuple)) else content
    )
    return f"a {type(value).__name__}" + (f" of {content}" if content else "")


SAMPLES_PER_SECOND = "throughput/samples_per_second"
STEP_MS = "throughput/step_ms"
WINDOW = 50
"""Number of latest batches over which each number is averaged."""


class Throughput(Clocked):
    """Shows samples per second in the progress bar, and logs them with the time that each phase of
    a step takes.

    Only rank 0 measures, with the host's clock, without collectives and without waiting for the
    GPU. Numbers are means over the last 50 batches, logged as `throughput/<name>`; phases under
    strategies that emit spans.

    - `samples_per_second`: those of rank 0 times the number of ranks.
    - `step_ms`: from the end of the batch before to the batch's own. The other parts add up to it.
    - `wait_for_data_ms`: waiting for the dataloader.
    - `wait_for_input_dist_ms`: waiting for the ids of a lookup.
    - `wait_for_output_dist_ms`: waiting for rows when the module touches them.
    - `wait_for_control_message_ms`: waiting for the ranks' message about the step.
    - `start_input_dist_ms`: preparing and starting an exchange of ids.
    - `forward_ms`, `backward_ms`, `optimizer_ms`: `training_step` without the waits in it,
      backward, and the optimizers' steps.
    - `other_ms`: the rest.

    Args:
        samples_from: where in the batch to count samples, as keys, positions or attributes joined
            by dots: "label", "0.features". The number is the first dim of the tensor there, or the
            stride of the KeyedJaggedTensor. None: the first KeyedJaggedTensor of the batch, else
            the one size of all tensors, else the tensor that is as long as the loader's batch_size.
            Where none of these holds, samples per second are not measured.
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
        """The current numbers by their names in the loggers; empty before the first step, and on
        ranks other than 0."""
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
        numbers = {}
        for name, total in totals.items():
            numbers[f"throughput/{name.replace(' ', '_')}_ms"] = total * per_step_ms
        samples_per_second = self._samples_per_second()
        if samples_per_second is not None:
            numbers[SAMPLES_PER_SECOND] = samples_per_second
        return {STEP_MS: seconds * per_step_ms} | numbers

    def _samples_per_second(self) -> float | None:
        seconds = sum(step.seconds for step, _ in self._steps)
        samples = [number for _, number in self._steps if number is not None]
        return (
            sum(samples) * self._num_ranks / seconds
            if seconds and len(samples) == len(self._steps)
            else None
        )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.clear()
        self._log_times.start()
        self._counted = False
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        self._counter.start(trainer.train_dataloader, datamodule)
        # Ranks with batches of their own: those of one pipeline (pipeline_parallel) have the same.
        self._num_ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        # No exchange follows from this, so that one rank may measure alone.
        if trainer.is_global_zero:
            self.clock.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Every rank counts the samples of its first batch: a wrong samples_from must fail on all of
        # them.
        first = not self._counted
        self._counted = True
        samples = self._counter.count(batch) if first or self.clock.running else None
        if not self.clock.running:
            return
        self._steps.append((self.clock.end(), samples))
        samples_per_second = self._samples_per_second()
        if samples_per_second is not None:
            # Not by self.log(prog_bar=True), which would make a tensor on the device and wait for
            # it.
            show_in_progress_bar(trainer, "samples/s", format_count(samples_per_second))
        if self._log_times.due(trainer):
            log(trainer, self.numbers)


def format_count(number: float) -> str:
    """Return a number with three significant digits: 950, 12.3k, 1.23M."""
    number, unit = scaled(number, ["", "k", "M", "G"])
    digits = 2
    # The bounds are where rounding would add a digit: 99.95 is 100.
    for bound in (9.995, 99.95):
        digits -= number >= bound
    return f"{number:.{digits}f}{unit}"
