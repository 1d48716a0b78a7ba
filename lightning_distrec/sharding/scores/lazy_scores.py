"""What a step makes of `queries @ table.weight.T` where the table is sharded: scores that no rank
has, until a loss or the best rows are asked for.

What is done to all scores alike is done to the queries, and to a bias, in their place: products
with numbers, other shapes, choices of queries. F.cross_entropy, log_softmax(...).gather, topk and
argmax are computed by the ranks that have the rows. All else needs the scores, and is refused; and
so are scores whose queries, bias or rows have changed since.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_distrec._compat.torch import version_of
from lightning_distrec.errors import ShardedWeightError
from lightning_distrec.sharding.scores.counted_queries import score_dtype
from lightning_distrec.sharding.scores.full_softmax import softmax_over
from lightning_distrec.sharding.scores.nearest import best_rows
from lightning_distrec.sharding.scores.table_rows import TableRows, rows_of_guarded
from lightning_distrec.sharding.weights.shard_access import (
    WAYS,
    GuardedTable,
    Operation,
    refusal,
    without_guard,
)
from lightning_distrec.sharding.weights.shard_operations import tensors_in

MATMULS = ("matmul", "__matmul__", "mm")
TRANSPOSES = ("T", "mT", "t", "transpose", "permute", "swapaxes", "movedim")
DESCRIBES = ("shape", "size", "dim", "ndim", "numel", "dtype", "is_floating_point", "__len__")


def score(func: Operation, name: str, args: Any, kwargs: Any, table: GuardedTable) -> Any:
    """Return the lazy result of an operation with the weight of a sharded table; NotImplemented:
    it is no product with queries.

    name: of the function, method or attribute of torch.
    """
    if name in TRANSPOSES:
        if _order(func, 2, args, kwargs) != [1, 0]:
            return NotImplemented
        transposed: Any = args[0].place.meta().T.as_subclass(TransposedWeight)
        transposed.table = table
        return transposed
    if name == "linear":
        return _linear(table, *args, **kwargs)
    return NotImplemented


def _order(func: Operation, num_dims: int, args: Any, kwargs: Any) -> list[int]:
    """Return where each dim of the result comes from, of a function that changes their order."""
    # Each dim has another size, by which it is found again.
    sizes = range(num_dims)
    probe = torch.empty(*sizes, device="meta")
    result = func(probe, *args[1:], **kwargs)
    return list(result.shape)


def _linear(table: GuardedTable, input: Any, weight: Any, bias: Any = None) -> Any:
    if not _is_plain(input):
        return NotImplemented
    scores = _scores(table, input)
    return scores if bias is None else scores + bias


def _name_of(func: Operation) -> str:
    """Return the name of a function or method, or of the attribute that is read or set."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        attribute: str = func.__self__.__name__  # type: ignore[attr-defined]
        return attribute if func.__name__ == "__get__" else f"{attribute} ="
    return func.__name__


def _first_in(values: Any, kind: type[Tensor]) -> Any:
    """Return the first tensor of a kind, also in lists."""
    tensors = [tensor for tensor in tensors_in(values) if isinstance(tensor, kind)]
    return tensors[0]


class TransposedWeight(Tensor):
    """The transposed weight of a sharded table, on meta: a factor, and no more."""

    table: GuardedTable

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in DESCRIBES:
            with without_guard():
                return func(*args, **kwargs)
        if name in MATMULS and len(args) == 2 and isinstance(args[1], TransposedWeight):
            return _scores(args[1].table, args[0])
        table: GuardedTable = _first_in([args, kwargs], cls).table
        if name in TRANSPOSES and _order(func, 2, args, kwargs) == [1, 0]:
            return table.weights[0]
        raise refusal(table.name, "weight", name)


@dataclass(frozen=True, kw_only=True)
class Product:
    """What scores stand for: `queries @ weight.T + bias`."""

    rows: TableRows
    queries: Tensor
    """(..., dim)."""
    dtype: torch.dtype
    has_graph: bool
    """Whether they were made with a graph."""
    has_autocast: bool
    """Whether they were made under autocast."""
    bias: Tensor | None = None
    is_log: bool = False
    """Whether log_softmax of it."""
    has_classes_second: bool = False
    """Whether rows are dim 1, where F.cross_entropy has classes, and not the last one."""

    def scores(self) -> "Scores":
        """Return them as a tensor without values."""
        shape = [*self.queries.shape[:-1], self.rows.num_rows]
        if self.has_classes_second:
            shape.insert(1, shape.pop())
        tensor: Any = torch.empty(shape, dtype=self.dtype, device="meta").as_subclass(Scores)
        tensor.product = self
        tensor.versions = self.versions()
        return tensor  # type: ignore[no-any-return]

    def versions(self) -> tuple[int | None, ...]:
        """Return numbers that differ once what the scores are computed of has changed."""
        guarded: Any = self.rows.guarded
        num_changes: int = guarded.state.num_changes
        bias = self.queries if self.bias is None else self.bias
        return num_changes, version_of(self.queries), version_of(bias)

    def takes(self, value: Tensor) -> bool:
        """Whether a graph of this value is one of the scores', too."""
        if self.has_graph or not torch.is_grad_enabled():
            return True
        return not value.requires_grad

    def loss(self, targets: Tensor, **options: Any) -> Tensor:
        """Collective. Return the cross entropy."""
        has_graph = self.has_graph and torch.is_grad_enabled()
        device = self.queries.device.type
        has_autocast = torch.is_autocast_enabled(device)
        # A product that was made without autocast has all digits.
        digits = torch.autocast(device, enabled=has_autocast and self.has_autocast)
        with torch.set_grad_enabled(has_graph), digits:
            losses = softmax_over(self.rows, self.queries, targets, bias=self.bias, **options)
        return losses if has_autocast else losses.to(self.dtype)

    def best(self, k: int) -> tuple[Tensor, Tensor]:
        """Collective. Return the k best scores, and their rows, both (..., k)."""
        *shape, width = self.queries.shape
        queries = self.queries.reshape(-1, width)
        scores, ids = best_rows(self.rows, queries, k, bias=self.bias)
        scores = scores.to(self.dtype)
        return scores.view(*shape, k), ids.view(*shape, k)


def _scores(table: GuardedTable, queries: Tensor) -> "Scores":
    rows = rows_of_guarded(table)
    product = Product(
        rows=rows,
        queries=queries,
        dtype=score_dtype(queries, rows),
        has_graph=torch.is_grad_enabled(),
        has_autocast=torch.is_autocast_enabled(queries.device.type),
    )
    return product.scores()


class Scores(Tensor):
    """Scores of queries for all rows of a sharded table, on meta: see the top of this file."""

    product: Product
    versions: tuple[int | None, ...]
    """Of the product, when this tensor was made."""

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = _name_of(func)
        args = list(args)
        kwargs = dict(kwargs or {})
        if not args:
            args = [kwargs.pop("input", None)]
        if name in ("mul", "__mul__", "add", "__add__") and not isinstance(args[0], Scores):
            args.reverse()
        scores = args[0]
        if not isinstance(scores, Scores):
            raise _refusal(_first_in([args, kwargs], cls).product, name)
        if name in DESCRIBES:
            with without_guard():
                return func(*args, **kwargs)
        if scores.versions != scores.product.versions():
            raise _late(scores.product, name)
        result = NotImplemented
        if name in SHAPES:
            result = SHAPES[name](func, scores, args, kwargs)
        elif name in OPERATIONS and _fits(OPERATIONS[name], args, kwargs):
            result = OPERATIONS[name](scores.product, *args[1:], **kwargs)
        if result is NotImplemented:
            raise _refusal(scores.product, name)
        if not isinstance(result, Product):
            return result
        if result is not scores.product and not torch.is_grad_enabled():
            result = _detached(result)
        return result.scores()


def _fits(operation: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether an operation takes these arguments."""
    try:
        inspect.signature(operation).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _refusal(product: Product, name: str) -> ShardedWeightError:
    table = product.rows.name
    ways = (WAYS["product"] + WAYS["weight"]).format(table=table)
    return ShardedWeightError(
        f"scores for all rows of the sharded table '{table}' were read ({name}), but each is on "
        "the rank that has the row. F.cross_entropy, log_softmax(...).gather, topk and argmax "
        "along the rows are exact; before these, products with numbers, a bias for each row, and "
        f"other shapes that keep the rows. {ways}"
    )


def _late(product: Product, name: str) -> ShardedWeightError:
    return ShardedWeightError(
        f"scores for all rows of the sharded table '{product.rows.name}' are computed when they "
        f"are read ({name}), and their queries, a bias or the weights have changed since the "
        "product. Read a loss, topk or argmax before the optimizer's step, and write to queries "
        "after that."
    )


def _reshaped(func: Operation, scores: Scores, args: Any, kwargs: Any) -> Any:
    product = scores.product
    with without_guard():
        result = func(*args, **kwargs)
    *shape, num_rows = result.shape or (0,)
    if num_rows != product.rows.num_rows or result.dtype != product.dtype:
        return NotImplemented
    if product.has_classes_second:
        return NotImplemented
    width = product.queries.shape[-1]
    queries = product.queries.reshape(*shape, width)
    return replace(product, queries=queries)


def _transposed(func: Operation, scores: Scores, args: Any, kwargs: Any) -> Any:
    product = scores.product
    last = scores.ndim - 1
    order = _order(func, scores.ndim, args, kwargs)
    if product.has_classes_second:
        return NotImplemented
    if order[-1] == last:
        return replace(product, queries=product.queries.permute(order))
    if last > 1 and order == [0, last, *range(1, last)]:
        return replace(product, has_classes_second=True)
    return NotImplemented


def _chosen(product: Product, index: Any) -> Any:
    """Return scores of some queries."""
    parts = index if isinstance(index, tuple) else (index,)
    num_dims = 0
    for part in parts:
        if part is ...:
            return NotImplemented
        if isinstance(part, Tensor) and part.dtype == torch.bool:
            num_dims += part.ndim
        elif part is not None:
            num_dims += 1
    last = parts[-1]
    if isinstance(last, slice) and last == slice(None):
        num_dims -= 1
    # The rows are the last dim: what chooses some of them leaves no scores for a softmax.
    if product.has_classes_second or num_dims >= product.queries.ndim:
        return NotImplemented
    return replace(product, queries=product.queries[index])


def _scaled(product: Product, operation: Operation, number: Any) -> Any:
    is_number = isinstance(number, (int, float))
    if _is_plain(number) and product.takes(number):
        is_number = number.shape in ((), (1,))
    if product.is_log or not is_number:
        return NotImplemented
    queries = operation(product.queries, number)
    bias = product.bias
    if bias is not None:
        bias = operation(bias, number)
    probe = torch.empty(1, dtype=product.dtype, device="meta")
    dtype = torch.result_type(probe, number)
    return replace(product, queries=queries, bias=bias, dtype=dtype)


def _times(product: Product, other: Any) -> Any:
    return _scaled(product, torch.mul, other)


def _divided(product: Product, other: Any) -> Any:
    return _scaled(product, torch.div, other)


def _plus(product: Product, other: Any) -> Any:
    if product.is_log or product.has_classes_second or not _is_plain(other):
        return NotImplemented
    if other.shape != (product.rows.num_rows,) or not product.takes(other):
        return NotImplemented
    if product.bias is not None:
        other = product.bias + other
    return replace(product, bias=other)


def _minus(product: Product, other: Any) -> Any:
    if not _is_plain(other):
        return NotImplemented
    return _plus(product, -other)


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor whose values are on this rank."""
    is_ours = isinstance(value, (Scores, TransposedWeight)) or hasattr(value, "place")
    return isinstance(value, Tensor) and not is_ours


def _requires_grad(product: Product) -> bool:
    if not product.has_graph:
        return False
    if product.bias is not None and product.bias.requires_grad:
        return True
    weight = product.rows.weights[0]
    return bool(product.queries.requires_grad or weight.requires_grad)


def _device(product: Product) -> torch.device:
    return product.queries.device


def _same(product: Product) -> Product:
    return product


def _copied(product: Product) -> Product:
    return replace(product)


def _in_float32(product: Product, dtype: Any = torch.float32) -> Any:
    if dtype != torch.float32 or product.dtype == torch.float64:
        return NotImplemented
    if dtype == product.dtype:
        return product
    # Sums of 16-bit scores are float32 anyway.
    return replace(product, dtype=dtype)


def _detached(product: Product) -> Product:
    queries = product.queries.detach()
    bias = product.bias
    if bias is not None:
        bias = bias.detach()
    return replace(product, queries=queries, bias=bias, has_graph=False)


def _is_along_last(product: Product, dim: int | None) -> bool:
    last = product.queries.ndim - 1
    return dim in (-1, last) and not product.has_classes_second


def _log_softmax(
    product: Product, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    if not _is_along_last(product, dim) or dtype is not None:
        return NotImplemented
    return replace(product, is_log=True)


def _cross_entropy(
    product: Product,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if (weight, size_average, reduce) != (None, None, None):
        return NotImplemented
    # Of more dims torch takes classes from dim 1.
    if product.queries.ndim > 2 and not product.has_classes_second:
        return NotImplemented
    return product.loss(
        target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def _nll_loss(product: Product, *args: Any, **kwargs: Any) -> Any:
    if not product.is_log:
        return NotImplemented
    return _cross_entropy(product, *args, **kwargs)


def _gathered(product: Product, dim: int, index: Tensor) -> Any:
    """Return the log-probability of one row for each query."""
    *shape, _ = product.queries.shape
    if not product.is_log or not _is_along_last(product, dim):
        return NotImplemented
    if index.shape != (*shape, 1):
        return NotImplemented
    losses = product.loss(index.squeeze(-1), ignore_index=None, reduction="none")
    return -losses.unsqueeze(-1)


def _top_k(
    product: Product, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    if not _is_along_last(product, dim) or not largest or product.is_log:
        return NotImplemented
    scores, ids = product.best(k)
    if product.has_graph and torch.is_grad_enabled():
        weight = product.rows.weights[0]
        scores = _WithoutGradient.apply(scores, product, product.queries, weight)
    return torch.return_types.topk((scores, ids))


def _best_row(product: Product, dim: int | None = None, keepdim: bool = False) -> Any:
    if not _is_along_last(product, dim):
        return NotImplemented
    _, ids = product.best(1)
    return ids if keepdim else ids.squeeze(-1)


class _WithoutGradient(torch.autograd.Function):
    """Returns the best scores. They are no part of a loss: that would be a silently smaller one."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, product: Product, *learned: Tensor) -> Tensor:
        ctx.product = product
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise _refusal(ctx.product, "the gradient of topk")


SHAPES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "squeeze", "unsqueeze"), _reshaped),
    **dict.fromkeys(TRANSPOSES, _transposed),
}
"""Name of an operation that changes dims alone -> what it makes of scores."""
OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _times),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _divided),
    **dict.fromkeys(("add", "__add__", "__radd__"), _plus),
    **dict.fromkeys(("sub", "subtract", "__sub__"), _minus),
    "contiguous": _same,
    "clone": _copied,
    **dict.fromkeys(("float", "to"), _in_float32),
    "__getitem__": _chosen,
    "detach": _detached,
    "requires_grad": _requires_grad,
    "device": _device,
    "log_softmax": _log_softmax,
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll_loss,
    "gather": _gathered,
    "topk": _top_k,
    "argmax": _best_row,
}
"""Name of an operation -> what it makes of the product."""
