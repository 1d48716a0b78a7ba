"""Where an input of a lookup comes from in the batch, and how it is built from a later batch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec.late_weights import LateWeights

PathStep = tuple[str, Any]
"""("item", key) or ("attr", name)."""
Path = tuple[PathStep, ...]


@dataclass(frozen=True)
class BatchRoots:
    """Where paths begin. sparse_inputs: what the user's method of this name returned for the batch, if there is one."""

    batch: Any
    sparse_inputs: Any = None

    def __post_init__(self) -> None:
        # No field: what is computed from the batch is not part of it.
        object.__setattr__(self, "memo", {})

    if TYPE_CHECKING:
        memo: ClassVar[dict[Any, Any]]
        """What was computed from the batch, until its lookups are prepared."""


def object_at(roots: Any, path: Path) -> Any:
    """Return what is at `path`. Raises KeyError, IndexError, AttributeError or TypeError: nothing is."""
    for kind, key in path:
        roots = getattr(roots, key) if kind == "attr" else roots[key]
    return roots


def path_text(path: Path) -> str:
    """Return how user code writes the path: batch['user'].ids."""
    (_, root), *steps_below = path
    steps = (f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in steps_below)
    return "".join((root if root == "batch" else "sparse_inputs(batch)", *steps))


@dataclass(frozen=True)
class ConstantSource:
    """The same number, text or None in every step."""

    value: Any

    def get(self, roots: Any) -> Any:
        """Return it."""
        return self.value


@dataclass(frozen=True)
class PathSource:
    """An object of the batch."""

    path: Path
    aliases: tuple[Path, ...] = ()
    """Other paths at which the same object was found: which of them the step takes is not known."""

    def get(self, roots: Any) -> Any:
        """Return it.

        Raises KeyError, IndexError, AttributeError or TypeError: this batch has none there; ValueError: it has
        different objects at paths where the first batch had one.
        """
        value = object_at(roots, self.path)
        if any(object_at(roots, path) is not value for path in self.aliases):
            raise ValueError(f"{path_text(self.path)} was the same as {path_text(self.aliases[0])}, and is not")
        return value


@dataclass(frozen=True)
class ViewSource:
    """A view of a tensor of the batch: a column, a range of columns, or another shape of the same rows."""

    base: PathSource
    form: str
    """"select", "narrow" or "reshape"."""
    numbers: tuple[int, ...]
    size: tuple[int, ...]
    """Of the dim that is picked from, or of all but the first: in a wider tensor, -1 would be another column."""

    def get(self, roots: Any) -> Tensor:
        """Return it. Raises ValueError: this batch's tensor is wider or narrower."""
        tensor: Tensor = self.base.get(roots)
        size = tensor.shape[1:] if self.form == "reshape" else tensor.shape[self.numbers[0] : self.numbers[0] + 1]
        if tuple(size) != self.size:
            raise ValueError(f"{tuple(size)} in place of {self.size}")
        if self.form == "select":
            return tensor.select(*self.numbers)
        if self.form == "narrow":
            return tensor.narrow(*self.numbers)
        return tensor.view(-1, *self.numbers)


@dataclass(frozen=True)
class UniformSource:
    """Lengths or offsets that the step makes itself, because all bags have one size: torch.full, torch.arange.

    form: "lengths" or "offsets". bag_size: ids in each bag. has_end: whether the last offset is the number of ids.
    """

    form: str
    bag_size: int
    has_end: bool
    dtype: torch.dtype

    def get_for(self, ids: Tensor) -> Tensor:
        """Return those of `ids`, (num_ids,). Raises ValueError: their number is no multiple of the bag size."""
        num_bags, remainder = divmod(ids.numel(), self.bag_size)
        if remainder:
            raise ValueError(f"{ids.numel()} ids are no bags of {self.bag_size}")
        if self.form == "lengths":
            return torch.full((num_bags,), self.bag_size, dtype=self.dtype, device=ids.device)
        return torch.arange(num_bags + self.has_end, dtype=self.dtype, device=ids.device) * self.bag_size


@dataclass(frozen=True)
class LateSource:
    """Weights of ids that the step computes of what is not known ahead of it. They follow their ids at the call."""

    def get_for(self, ids: Tensor) -> Tensor:
        """Return what stands for those of `ids`."""
        return LateWeights.of(ids)


@dataclass(frozen=True)
class JaggedSource:
    """A KeyedJaggedTensor that the step makes of tensors of the batch."""

    keys: tuple[str, ...]
    fields: tuple[tuple[str, "Source"], ...]
    """Argument of KeyedJaggedTensor -> where it comes from; values come first."""

    def get(self, roots: Any) -> KeyedJaggedTensor:
        """Return one that is made of this batch's tensors."""
        fields: dict[str, Any] = {}
        for name, source in self.fields:
            if isinstance(source, (UniformSource, LateSource)):
                fields[name] = source.get_for(fields["values"])
            else:
                fields[name] = source.get(roots)
        num_bags = fields["lengths"].numel() if "lengths" in fields else max(0, fields["offsets"].numel() - 1)
        if num_bags % len(self.keys):
            raise ValueError(f"{num_bags} bags are not the same number for {len(self.keys)} keys")
        return KeyedJaggedTensor(keys=list(self.keys), **fields)


class ComputedSource(Protocol):
    """Operations of the step that make a tensor of the batch's: computed/slices.py has it."""

    paths: list[Path]
    """Of the batch's tensors that it is made of."""

    def get(self, roots: BatchRoots) -> Tensor:
        """Compute it from this batch. Raises NotReadyError, or as its operations do."""


def paths_of(source: "Source") -> list[Path]:
    """Return the paths of the batch's objects that a source is made of."""
    if isinstance(source, PathSource):
        return [source.path]
    if isinstance(source, ViewSource):
        return paths_of(source.base)
    if isinstance(source, JaggedSource):
        return [path for _, field in source.fields for path in paths_of(field)]
    return [] if isinstance(source, (ConstantSource, UniformSource, LateSource)) else source.paths


Source = ConstantSource | PathSource | ViewSource | JaggedSource | UniformSource | LateSource | ComputedSource


@dataclass(frozen=True)
class LookupCall:
    """What one lookup of a step is called with."""

    path: str
    """Of the module that is called."""
    arguments: tuple[Source, ...]

    def get(self, roots: Any) -> tuple[Any, ...]:
        """Return the arguments that this batch's step will call with."""
        arguments: list[Any] = []
        for source in self.arguments:
            # Offsets, lengths and weights come after the ids that they belong to.
            if isinstance(source, (UniformSource, LateSource)):
                arguments.append(source.get_for(arguments[0]))
            else:
                arguments.append(source.get(roots))
        return tuple(arguments)


def uniform_source_of(tensor: Tensor, ids: Tensor | None) -> UniformSource | None:
    """Return `tensor` as lengths or offsets of `ids` in bags of one size, if it is; on a CPU, where comparing is cheap.

    ids: (num_ids,).
    """
    if ids is None or tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64) or ids.numel() == 0:
        return None
    if tensor.device.type != "cpu" or ids.device.type != "cpu" or tensor.numel() == 0:
        return None
    size = int(tensor[0])
    guesses = [UniformSource("lengths", size, False, tensor.dtype)] if size > 0 else []
    if size == 0 and tensor.numel() > 1 and int(tensor[1]) > 0:
        guesses += [UniformSource("offsets", int(tensor[1]), has_end, tensor.dtype) for has_end in (False, True)]
    for guess in guesses:
        if ids.numel() % guess.bag_size == 0 and torch.equal(guess.get_for(ids), tensor):
            return guess
    return None
