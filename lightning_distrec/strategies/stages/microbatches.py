"""Divides a batch into micro-batches, and what blocks are called with next to their input."""

from collections.abc import Callable
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_distrec.errors import UnsupportedError
from lightning_distrec.strategies.stages.step_over_chain import Entry


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors of a collection."""
    tensors: list[Tensor] = []
    apply_to_collection(value, Tensor, tensors.append)
    return tensors


def num_microbatches(batch_size: int, limit: int, fits: Callable[[int], bool] = lambda _: True) -> int:
    """Return the largest number of equal parts of a batch, up to a limit. fits: whether a schedule takes a number."""
    # Equal parts: the mean of their losses is then the mean over all examples.
    return max(n for n in range(1, min(limit, batch_size) + 1) if batch_size % n == 0 and (n == 1 or fits(n)))


def batch_size_of(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first tensor. 0: it has no tensor."""
    first = next(iter(tensors_in(batch)), None)
    return 0 if first is None else len(first) if first.dim() else 1


def split_batch(batch: Any, num: int) -> list[Any]:
    """Return parts of a batch: tensors are divided along their first dim, which must be that of examples.

    Raises UnsupportedError: a tensor is not as long as the batch.
    """
    if num == 1:
        return [batch]
    batch_size = batch_size_of(batch)
    for tensor in tensors_in(batch):
        if not tensor.dim() or len(tensor) != batch_size:
            raise UnsupportedError(
                f"a batch has a tensor of shape {tuple(tensor.shape)} next to {batch_size} examples, which cannot be "
                "divided into micro-batches. Stack examples along the first dim, or use schedule='gpipe'."
            )

    def part(index: int) -> Any:
        return apply_to_collection(batch, Tensor, lambda tensor: tensor.chunk(num)[index], allow_frozen=True)

    return list(map(part, range(num)))


class BlockArguments:
    """Divides arguments that have a row for each example, a padding mask for example, and passes on others.

    Which ones have is learned from a part of a batch: they are shorter there.
    """

    def __init__(self) -> None:
        self._have_rows: dict[Any, list[bool]] = {}
        """Shapes of all tensors -> for each tensor, whether it has a row for each example."""

    def split(self, entry: Entry, num: int, enter_part: Callable[[], Entry]) -> list[Any]:
        """Return the arguments of all blocks, for each of `num` micro-batches.

        enter_part: returns what the blocks are called with for the first micro-batch alone.
        Raises UnsupportedError: a tensor is neither of the same shape there, nor of a share of its rows.
        """
        tensors = tensors_in(entry.arguments)
        if num == 1 or not any(tensor.dim() and len(tensor) % num == 0 for tensor in tensors):
            return [entry.arguments] * num
        key = num, tuple(tensor.shape for tensor in tensors)
        # Learned once for each set of shapes: running the step up to the chain for a part costs time.
        if key not in self._have_rows:
            parts = tensors_in(enter_part().arguments)
            self._have_rows[key] = [_has_rows(*pair, num) for pair in zip(tensors, parts, strict=True)]

        def part(index: int) -> Any:
            # apply_to_collection goes through tensors in the same order each time.
            has_rows = iter(self._have_rows[key])
            return apply_to_collection(
                entry.arguments,
                Tensor,
                lambda tensor: tensor.chunk(num)[index] if next(has_rows) else tensor,
                allow_frozen=True,
            )

        return [part(index) for index in range(num)]


def _has_rows(full: Tensor, part: Tensor, num: int) -> bool:
    if full.shape == part.shape:
        return False
    if full.shape[1:] == part.shape[1:] and len(full) == num * len(part):
        return True
    raise UnsupportedError(
        f"blocks take a tensor of shape {tuple(full.shape)} for a batch, and one of {tuple(part.shape)} for one of its "
        f"{num} micro-batches. Let its first dim be that of examples, or set microbatches=1."
    )
