"""How values of shards are reached: where they lie in their table, past their guard, and past the
caches of kernels."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec._compat.lightning import is_for_rank_zero
from lightning_distrec._compat.torch import in_backward, without_torch_function
from lightning_distrec.errors import ShardedWeightError
from lightning_distrec.ranks import Ranks

Rectangle: TypeAlias = tuple[int, int, int, int]
"""First row, first column, number of rows, number of columns."""
Operation: TypeAlias = Callable[..., Any]
"""A function or method of torch, called with shards."""
P = ParamSpec("P")
R = TypeVar("R")

without_guard = without_torch_function
"""A context in which shards are plain tensors; each operation on them then costs a microsecond
less."""

plain_shards = ExitStack()
"""Holds `without_guard` while an optimizer of torch's updates, after its closure has called the
user's step."""

HOOKED = "hooked gradient"
"""The gradient that a hook of `register_hook` is called with."""
WAYS = {
    HOOKED: "Compute it in on_before_optimizer_step, which all ranks call.",
    "weight": (
        "To use rows, look them up. trainer.strategy.full_parameter('{table}'), called on every "
        "rank, returns the full "
        "weight; lightning_distrec.sharded_l2(table) its sum of squares; the callback "
        "NormalizeRows scales rows. For "
        "other uses in the step, as tied output weights, set tables={{'{table}': "
        "{{'gathered_weight': True}}}}, or "
        "'replicated': True. To export the module, call trainer.strategy.unshard() on every rank "
        "after the run."
    ),
    "product": (
        "For the cross entropy over all rows write softmax_loss(queries, self.{table}, targets), "
        "of lightning_distrec.retrieval, which gathers nothing; (collection, name) stands for a "
        "collection's table, and top_k(queries, table, k) finds the best rows. "
    ),
    "gradient": "trainer.strategy.gradient_norms(), called on every rank, returns the norms of "
    "all gradients.",
}

PRODUCTS = frozenset(
    {"T", "mT", "t", "transpose", "permute", "matmul", "__rmatmul__", "mm", "linear", "einsum"}
    | {".weight"}
)
"""Operations that score rows, or may come before, by their names."""


@dataclass(eq=False)
class SharedState:
    """What the guarded tables of one module have in common. Inside of it as a context all ranks run
    the user's step."""

    group: Any = None
    """Process group of the ranks that have the shards; None: the default one."""
    in_step: bool = False
    """Whether all ranks run the user's step, so that what it sums may be summed over them."""
    ranks: Ranks | None = None
    """All ranks, while a run goes on: its hooks are called on each of them."""
    reached: set[str] = field(default_factory=set)
    """Tables of which other ranks have gradients, and this one has no rows."""
    num_changes: int = 0
    """How often weights may have changed: what was gathered before is gathered again when it is
    read next."""
    before_full_gradient: Callable[[str], None] = lambda _: None
    """Called on all ranks with the name of a table, when a step begins what leads to a gradient of
    all of its rows."""
    writes: Counter[str] = field(default_factory=Counter)
    """Table -> writes of user code into its weight, and copies of it; torch does not count those
    through `.data`."""

    def __enter__(self) -> None:
        self.in_step = True

    def __exit__(self, *_: object) -> None:
        self.in_step = False

    @property
    def members(self) -> list[int]:
        """The ranks that have the shards."""
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)

    @property
    def num_ranks(self) -> int:
        """How many they are."""
        return dist.get_world_size(self.group)

    def reaches_all_ranks(self) -> bool:
        """Whether all ranks run this code: a step, or a hook of the run that is not for rank 0
        alone."""
        return self.in_step or in_backward() or self.ranks is not None and not is_for_rank_zero()

    def all_reduce(
        self, values: Tensor, operation: Literal["sum", "max"], description: str
    ) -> Tensor:
        """Collective. Return `values` reduced over the ranks, and perhaps in place.

        Raises ShardedWeightError on every rank: outside of a step, ranks read other things.
        """
        if self.in_step or in_backward() or self.ranks is None:
            reduction = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(values, reduction, group=self.group)
            return values
        # In a hook one rank may read alone, in code for one rank: this exchange compares what is
        # read.
        gathered: list[Any] = self.ranks.all_gather((description, values.cpu()))
        if any(not isinstance(part, tuple) or part[0] != description for part in gathered):
            raise ShardedWeightError(
                f"rank {self.ranks.rank} reads {description} here, and another rank something "
                "else. What is read of a "
                "sharded table takes all ranks: read it on every rank, in the same order."
            )
        stacked = torch.stack([gathered[rank][1] for rank in self.members])
        return (stacked.sum(0) if operation == "sum" else stacked.amax(0)).to(values.device)


@dataclass(frozen=True, kw_only=True)
class GuardedTable:
    """A table whose shards are guarded."""

    name: str
    shape: tuple[int, int]
    weights: Sequence[Any] = field(repr=False)
    """Its shards on this rank; the first stands for the table."""
    has_single_shards: bool
    """Whether no rank has more than one shard."""
    state: SharedState = field(repr=False)
    rectangles: list[list[Rectangle]] = field(repr=False)
    """Rank -> its shards with rows, in order."""
    gathering: Any = field(default=None, repr=False)
    """Gathers the full weight where it is read; None: reading it raises."""
    score: Callable[..., Any] = field(default=lambda *_: NotImplemented, repr=False)
    """Returns the lazy result of an operation that scores queries against the rows, from its name,
    arguments and the guarded table; or NotImplemented."""


@dataclass(frozen=True)
class ShardPlace:
    """Where a shard is in its table."""

    table: GuardedTable
    row: int
    column: int
    num_rows: int
    num_columns: int
    kind: str = "weight"
    """Whose values they are: "weight", "gradient" or HOOKED."""
    is_computed: bool = False
    """Whether they were computed from those, and are not they themselves."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Differs between shards."""
        return self.table.name, self.row, self.column

    def lies_like(self, other: "ShardPlace") -> bool:
        """Whether a place in this table or in another one has the same rows, on every rank."""
        if (self.row, self.column) != (other.row, other.column):
            return False
        return self.table is other.table or self.table.rectangles == other.table.rectangles

    @property
    def stands_for_table(self) -> bool:
        """Whether this is the first shard of the table on this rank."""
        return self.table.has_single_shards or self.key == self.table.weights[0].place.key

    def meta(self) -> Tensor:
        """Return a tensor without values of the shape that user code sees: one shard has it, others
        are empty."""
        # One shard shows the full shape and others none: sums over parameters() count the table
        # once.
        rows, columns = self.table.shape
        return torch.empty(rows if self.stands_for_table else 0, columns, device="meta")

    def narrow(self, full: Tensor) -> Tensor:
        """Return the shard's rectangle of a full table, as a view."""
        return full[
            self.row : self.row + self.num_rows, self.column : self.column + self.num_columns
        ]

    def refuse_unlike(self, other: "ShardPlace") -> None:
        """Raise ShardedWeightError where values of another table lie elsewhere; the same on every
        rank."""
        if self.lies_like(other):
            return
        names = self.table.name, other.table.name
        if self.table.shape != other.table.shape or names[0] == names[1]:
            raise self.refusal(f"an operation with '{names[1]}'")
        ways = ", ".join(f"'{name}': {{'sharding_types': ['row_wise']}}" for name in names)
        raise ShardedWeightError(
            f"an operation combines the sharded tables '{names[0]}' and '{names[1]}' element by "
            "element, and their "
            f"rows are on different ranks. Set tables={{{ways}}}: rows of tables with one shape "
            "lie alike then."
        )

    def note_write(self) -> None:
        """Note that user code writes into these values."""
        if self.kind == "weight":
            self.table.state.writes[self.table.name] += 1

    def refusal(self, operation: str) -> ShardedWeightError:
        """Return the error for an operation that needs the full table."""
        return refusal(self.table.name, self.kind, operation)


def refusal(table: str, kind: str, operation: str) -> ShardedWeightError:
    """Return the error for what needs a full table. kind: "weight" or "gradient"."""
    ways = WAYS[kind]
    if kind == "weight" and operation in PRODUCTS:
        ways = WAYS["product"] + ways
    return ShardedWeightError(
        f"the {kind} of the sharded table '{table}' was read ({operation}), but it is on several "
        f"ranks. {ways.format(table=table)}"
    )


def refuse_leaf(tensor: Tensor) -> None:
    """Raise torch's own error for a write to a leaf that is trained, which user code gets unsharded
    too."""
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )


def without_guards(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of ours that looks at many shards, which costs a microsecond less for
    each."""

    @functools.wraps(call)
    def unguarded(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_guard():
            return call(*args, **kwargs)

    return unguarded


# Tables whose rows are on the host and partly on the GPU (kernel fused_uvm_caching): what is
# trained is in the cache, and the weight that torchrec shows is the host's memory. It is stale
# until the cache is written back, and what is written to it is lost while the cache holds the row.
# Not run on a GPU yet.
_cached_kernels: "WeakSet[Any]" = WeakSet()


def watch_caches(kernels: Iterable[Any]) -> None:
    """Note those FBGEMM kernels that have a cache."""
    # FBGEMM gives kernels without cached tables an empty cache.
    caches = ((kernel, getattr(kernel, "lxu_cache_weights", None)) for kernel in kernels)
    _cached_kernels.update(
        kernel for kernel, cache in caches if cache is not None and cache.numel()
    )


def write_back() -> None:
    """Bring the host's rows of all tables up to date, before they are read."""
    for kernel in _cached_kernels:
        kernel.flush()


@contextmanager
def rewriting() -> Iterator[None]:
    """Let the context write to the host's rows: it finds them up to date, and afterwards no cache
    holds other ones.

    Not between a forward and its backward, which writes to the places in the cache that the forward
    has found.
    """
    write_back()
    yield
    for kernel in _cached_kernels:  # flush() does not empty the cache
        kernel.reset_cache_states()
