"""Counts the samples of batches: where `samples_from` says, or by lookups' features, or by the loader's batch size."""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_distrec.batches.batch_leaves import is_keyed, named_leaves
from lightning_distrec.errors import ConfigError, did_you_mean


class SampleCounter:
    """Counts the samples of one loader's batches.

    path: see `Throughput.samples_from`. source: what counts, for the warning that a number is unknown.
    """

    def __init__(self, path: str | None = None, source: str = "") -> None:
        self._path, self._source = path, source
        self._batch_sizes: set[int] = set()
        self._place: int | None = None
        self.problem = ""
        """Why the number is unknown; "" where it is not."""

    def start(self, loaders: Any, datamodule: Any = None) -> None:
        """Begin with the first batch. loaders: those of a fit, in any nesting; datamodule: may have a `batch_size`."""
        sources = [*(loader for _, loader in named_leaves(loaders)), datamodule]
        sources += [getattr(source, "batch_sampler", None) for source in sources]
        sizes = {getattr(source, "batch_size", None) for source in sources}
        self._batch_sizes = {size for size in sizes if isinstance(size, int)}
        self._place, self.problem = None, ""

    def count(self, batch: Any) -> int | None:
        """Return the number of samples, or None if it is unknown; the first time a warning says so.

        Raises ConfigError: the batch has nothing at the path.
        """
        value = batch if self._path is None else value_at(batch, self._path, "samples_from")
        leaves = [leaf for _, leaf in named_leaves(value)]
        for leaf in leaves:
            # Where keys have strides of their own, none of them is known to be the number of samples.
            if is_keyed(leaf) and not leaf.variable_stride_per_key():
                return int(leaf.stride())
        sizes = [int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if len(set(sizes)) == 1:
            return sizes[0]
        # The last batch of an epoch is smaller than the loader's size: the place is that of the first batch. The last
        # place that fits, since as many ids as examples may come by chance, and labels come after ids.
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
            f"samples per second are not measured: the tensors of the batch ({description}) {tensors}. "
            if sizes
            else f"samples per second are not measured: the batch ({description}) contains no tensor. "
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
            keys = [str(key) for key in value] if isinstance(value, Mapping) else []
            raise ConfigError(
                f"{option}='{path}': there is no '{name}' in {_describe(value)}{did_you_mean(name, keys)}"
            ) from None
    return value


def _describe(value: Any) -> str:
    content = ", ".join(map(str, value)) if isinstance(value, Mapping) else ""
    content = f"{len(value)}: name a position from 0" if isinstance(value, (list, tuple)) else content
    return f"a {type(value).__name__}" + (f" of {content}" if content else "")
