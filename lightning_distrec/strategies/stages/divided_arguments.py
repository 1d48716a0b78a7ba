"""What blocks are called with next to their input, for each micro-batch of a batch."""

from collections.abc import Callable, Iterator
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_distrec.errors import UnsupportedError
from lightning_distrec.strategies.stages.step_over_chain import Entry


class DividedArguments:
    """Divides tensors that have a row for each example, a padding mask for example, and passes on others.

    Which ones have is learned from a part of a batch: they are shorter there.
    """

    def __init__(self) -> None:
        self._has_rows: dict[Any, list[bool]] = {}
        """Shapes of all tensors -> of each, whether it has a row for each example."""

    def of(self, entry: Entry, num: int, enter_part: Callable[[], Entry]) -> list[Any]:
        """Return the other arguments of all blocks, for each of `num` micro-batches.

        enter_part: returns what the blocks are called with for the first micro-batch alone.
        Raises UnsupportedError: a tensor is neither of the same shape there, nor of a share of its rows.
        """
        tensors = _tensors_in(entry.others)
        if num == 1 or not any(tensor.dim() and len(tensor) % num == 0 for tensor in tensors):
            return [entry.others] * num
        key = num, tuple(tensor.shape for tensor in tensors)
        if key not in self._has_rows:
            of_part = _tensors_in(enter_part().others)
            self._has_rows[key] = [_has_rows(*pair, num) for pair in zip(tensors, of_part, strict=True)]
        return [self._part(entry, iter(self._has_rows[key]), num, index) for index in range(num)]

    def _part(self, entry: Entry, has_rows: Iterator[bool], num: int, index: int) -> Any:
        return apply_to_collection(
            entry.others,
            Tensor,
            lambda tensor: tensor.chunk(num)[index] if next(has_rows) else tensor,
            allow_frozen=True,
        )


def _tensors_in(arguments: Any) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(arguments, Tensor, found.append)
    return found


def _has_rows(full: Tensor, part: Tensor, num: int) -> bool:
    if full.shape == part.shape:
        return False
    if full.shape[1:] == part.shape[1:] and len(full) == num * len(part):
        return True
    raise UnsupportedError(
        f"blocks take a tensor of shape {tuple(full.shape)} for a batch, and one of {tuple(part.shape)} for one of its "
        f"{num} micro-batches. Let its first dim be that of examples, or set microbatches=1."
    )
