"""Where an input of a lookup comes from in the batch, how it is built from a later one, and
compared at the call."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec import gpu
from lightning_distrec._compat.torch import version_of
from lightning_distrec._compat.torchrec_modules import jagged_fields
from lightning_distrec.recorded_step import LateWeights

PathStep = tuple[str, Any]
"""("item", key) or ("attr", name)."""
Path = tuple[PathStep, ...]


@dataclass(frozen=True)
class BatchRoots:
    """Where paths begin. sparse_inputs: what the user's method of this name returned for the batch,
    if there is one."""

    batch: Any
    sparse_inputs: Any = None
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was computed from the batch, until its lookups are prepared; empty whenever paths are
    looked for."""


def object_at(roots: Any, path: Path) -> Any:
    """Return what is at `path`. Raises KeyError, IndexError, AttributeError or TypeError: nothing
    is."""
    for kind, key in path:
        roots = getattr(roots, key) if kind == "attr" else roots[key]
    return roots


def path_text(path: Path) -> str:
    """Return how user code writes the path: batch['user'].ids."""
    (_, root), *steps_below = path
    steps = (f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in steps_below)
    return "".join((root if root == "batch" else "sparse_inputs(batch)", *steps))


class Source:
    """Where an argument of a lookup comes from."""

    @property
    def paths(self) -> list[Path]:
        """The paths of the batch's objects that it is made of."""
        return []

    def get(self, roots: Any, ids: Any = None) -> Any:
        """Return it for a batch. ids: those that it is the lengths, offsets or weights of."""
        raise NotImplementedError


@dataclass(frozen=True)
class ConstantSource(Source):
    """The same number, text or None in every step."""

    value: Any

    def get(self, roots: Any, ids: Any = None) -> Any:
        """Return it."""
        return self.value


@dataclass(frozen=True)
class PathSource(Source):
    """An object of the batch."""

    path: Path
    aliases: tuple[Path, ...] = ()
    """Other paths at which the same object was found: which of them the step takes is not known."""

    @property
    def paths(self) -> list[Path]:
        """Its own."""
        return [self.path]

    def get(self, roots: Any, ids: Any = None) -> Any:
        """Return it. Raises as `object_at`, or ValueError: different objects at paths where the
        first batch had one."""
        value = object_at(roots, self.path)
        for path in self.aliases:
            if object_at(roots, path) is not value:
                raise ValueError(
                    f"{path_text(self.path)} was the same as {path_text(path)}, and is not"
                )
        return value


@dataclass(frozen=True)
class ViewSource(Source):
    """A view of a tensor of the batch: a column, a range of columns, or another shape of the same
    rows."""

    base: PathSource
    form: str
    """"select", "narrow" or "reshape"."""
    numbers: tuple[int, ...]
    size: tuple[int, ...]
    """Of the dim that is picked from, or of all but the first: in a wider tensor, -1 would be
    another column."""

    @property
    def paths(self) -> list[Path]:
        """That of its tensor."""
        return self.base.paths

    def get(self, roots: Any, ids: Any = None) -> Tensor:
        """Return it. Raises ValueError: this batch's tensor is wider or narrower."""
        tensor: Tensor = self.base.get(roots)
        if self.form == "reshape":
            size = tensor.shape[1:]
        else:
            dim = self.numbers[0]
            size = tensor.shape[dim : dim + 1]
        if tuple(size) != self.size:
            raise ValueError(f"{tuple(size)} in place of {self.size}")
        if self.form == "select":
            return tensor.select(*self.numbers)
        if self.form == "narrow":
            return tensor.narrow(*self.numbers)
        return tensor.view(-1, *self.numbers)


@dataclass(frozen=True)
class UniformSource(Source):
    """Lengths or offsets that the step makes itself, because all bags have one size: torch.full,
    torch.arange.

    form: "lengths" or "offsets". bag_size: ids in each bag. has_end: whether the last offset is the
    number of ids.
    """

    form: str
    bag_size: int
    has_end: bool
    dtype: torch.dtype

    def get(self, roots: Any, ids: Any = None) -> Tensor:
        """Return those of `ids`, (num_ids,). Raises ValueError: their number is no multiple of the
        bag size."""
        num_bags, remainder = divmod(ids.numel(), self.bag_size)
        if remainder:
            raise ValueError(f"{ids.numel()} ids are no bags of {self.bag_size}")
        if self.form == "lengths":
            return torch.full((num_bags,), self.bag_size, dtype=self.dtype, device=ids.device)
        places = torch.arange(num_bags + self.has_end, dtype=self.dtype, device=ids.device)
        return places * self.bag_size


@dataclass(frozen=True)
class LateSource(Source):
    """Weights of ids that the step computes of what is not known ahead of it. They follow their ids
    at the call."""

    def get(self, roots: Any, ids: Any = None) -> Tensor:
        """Return what stands for those of `ids`."""
        return LateWeights.zeros_for(ids)


@dataclass(frozen=True)
class JaggedSource(Source):
    """A KeyedJaggedTensor that the step makes of tensors of the batch."""

    keys: tuple[str, ...]
    fields: tuple[tuple[str, "Source"], ...]
    """Argument of KeyedJaggedTensor -> where it comes from; values come first."""

    @property
    def paths(self) -> list[Path]:
        """Of all its fields."""
        paths = []
        for _, source in self.fields:
            paths += source.paths
        return paths

    def get(self, roots: Any, ids: Any = None) -> KeyedJaggedTensor:
        """Return one that is made of this batch's tensors."""
        fields: dict[str, Any] = {}
        for name, source in self.fields:
            fields[name] = source.get(roots, fields.get("values"))
        if "lengths" in fields:
            num_bags = fields["lengths"].numel()
        else:
            num_bags = max(0, fields["offsets"].numel() - 1)
        if num_bags % len(self.keys):
            raise ValueError(f"{num_bags} bags are not the same number for {len(self.keys)} keys")
        return KeyedJaggedTensor(keys=list(self.keys), **fields)


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
            arguments.append(source.get(roots, arguments[0] if arguments else None))
        return tuple(arguments)


def find_uniform_source(tensor: Tensor, ids: Tensor | None) -> UniformSource | None:
    """Return `tensor` as lengths or offsets of `ids`, (num_ids,), in bags of one size, if it is; on
    a CPU alone."""
    is_vector = tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64)
    if ids is None or not is_vector or tensor.device.type != "cpu" or ids.device.type != "cpu":
        return None
    if ids.numel() == 0 or tensor.numel() == 0:
        return None
    size = int(tensor[0])
    guesses: list[UniformSource] = []
    if size > 0:
        guesses.append(UniformSource("lengths", size, False, tensor.dtype))
    elif size == 0 and tensor.numel() > 1 and int(tensor[1]) > 0:
        # Offsets begin with 0. nn.EmbeddingBag takes them with or without the last one:
        # include_last_offset.
        for has_end in (False, True):
            guesses.append(UniformSource("offsets", int(tensor[1]), has_end, tensor.dtype))
    for guess in guesses:
        if ids.numel() % guess.bag_size == 0 and torch.equal(guess.get(None, ids), tensor):
            return guess
    return None


Compare = Callable[[Tensor, Tensor], bool]
SCALARS = (bool, int, float, str)


def is_same_input(argument: Any, prefetched: Any, compare: Compare | None = None) -> bool:
    """Whether it is the prefetched one: the same memory, or equal numbers, which `compare` compares
    on a GPU."""
    if argument is prefetched:
        return True
    if isinstance(prefetched, LateWeights):
        # Their numbers follow the ids at the call; only the shape must be that of the ids.
        if not isinstance(argument, Tensor) or not argument.is_floating_point():
            return False
        return argument.shape == prefetched.shape
    if isinstance(argument, Tensor) and isinstance(prefetched, Tensor):
        return same_memory(argument, prefetched) or _are_equal(argument, prefetched, compare)
    if isinstance(argument, KeyedJaggedTensor) and isinstance(prefetched, KeyedJaggedTensor):
        return _is_same_jagged(argument, prefetched, compare)
    if type(argument) is not type(prefetched) or not isinstance(argument, SCALARS):
        return False
    return bool(argument == prefetched)


def _is_same_jagged(
    argument: KeyedJaggedTensor, prefetched: KeyedJaggedTensor, compare: Compare | None
) -> bool:
    if argument.keys() != prefetched.keys() or argument.variable_stride_per_key():
        return False
    prefetched_fields = jagged_fields(prefetched)
    fields = jagged_fields(argument)
    for name in ("values", "weights"):
        if not is_same_input(fields[name], prefetched_fields[name], compare):
            return False
    # Each of them determines the other, so that one is enough.
    for name in ("lengths", "offsets"):
        field = fields[name]
        prefetched_field = prefetched_fields[name]
        if field is None or prefetched_field is None:
            continue
        if is_same_input(field, prefetched_field, compare):
            return True
    return False


def _are_equal(tensor: Tensor, other: Tensor, compare: Compare | None) -> bool:
    if tensor.dtype != other.dtype or tensor.device != other.device:
        return False
    if not gpu.is_on_gpu(tensor):
        return torch.equal(tensor, other)
    return compare is not None and tensor.shape == other.shape and compare(tensor, other)


def same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    # No comparison of numbers: on a GPU the host would wait for them.
    if tensor.data_ptr() != other.data_ptr() or tensor.dtype != other.dtype:
        return False
    if tensor.device != other.device or tensor.shape != other.shape:
        return False
    strides = tensor.stride()
    return strides == other.stride() or same_geometry(list(tensor.shape), list(strides), other)


def same_geometry(shape: list[int], strides: list[int], tensor: Tensor) -> bool:
    """Whether a tensor has this shape and these strides; strides of dims of one element do not
    matter."""
    if list(tensor.shape) != shape:
        return False
    return all(
        size == 1 or a == b for size, a, b in zip(shape, strides, tensor.stride(), strict=True)
    )


def versions(*arguments: Any) -> list[tuple[Tensor, int | None]]:
    """Return the tensors of these arguments, and how often each was written to in place; None: it
    is not counted."""
    tensors: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, KeyedJaggedTensor):
            tensors += [field for field in jagged_fields(argument).values() if field is not None]
    return [(tensor, version_of(tensor)) for tensor in tensors]


def are_unwritten(versioned: list[tuple[Tensor, int | None]]) -> bool:
    """Whether none of the tensors was written to in place since `versions`; false where writes are
    not counted."""
    for tensor, version in versioned:
        if version is None or version_of(tensor) != version:
            return False
    return True


def has_same_leaves(argument: Any, batch: Any) -> bool:
    """Whether this is the batch, or dicts, lists and tuples around the very same objects.

    DistributedDataParallel with device_ids and FSDP2's root rebuild the containers of what they are
    called with.
    """
    if argument is batch:
        return True
    if isinstance(batch, dict):
        same_keys = isinstance(argument, dict) and argument.keys() == batch.keys()
        return same_keys and all(
            has_same_leaves(argument[key], value) for key, value in batch.items()
        )
    if isinstance(batch, (list, tuple)):
        same_length = isinstance(argument, (list, tuple)) and len(argument) == len(batch)
        return same_length and all(map(has_same_leaves, argument, batch))
    # Numbers and texts have no identity that counts.
    return isinstance(batch, SCALARS) and type(argument) is type(batch) and bool(argument == batch)
