"""Parts of a batch that are in the stages at the same time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_distrec.errors import UnsupportedError


def num_parts(batch_size: int, wanted: int, fits: Callable[[int], bool] = lambda _: True) -> int:
    """Return the largest number of equal parts, up to `wanted`, of a batch. fits: whether a schedule takes a number."""
    return max(n for n in range(1, min(wanted, batch_size) + 1) if batch_size % n == 0 and (n == 1 or fits(n)))


def parts_of(value: Any, num: int, batch_size: int) -> list[Any]:
    """Return parts of a batch: tensors are divided along their first dim, which must be that of examples.

    Raises UnsupportedError: a tensor is not as long as the batch, or something else is in it than tensors and numbers.
    """
    if num == 1:
        return [value]

    def part(index: int) -> Any:
        return apply_to_collection(value, Tensor, lambda tensor: tensor.chunk(num)[index], allow_frozen=True)

    def check(tensor: Tensor) -> None:
        if not tensor.dim() or len(tensor) != batch_size:
            raise UnsupportedError(
                f"a batch has a tensor of shape {tuple(tensor.shape)} next to {batch_size} examples, which cannot be "
                "divided into micro-batches. Let collate_fn stack examples along the first dim, or use "
                "schedule='gpipe', whose training_step gets whole batches."
            )

    apply_to_collection(value, Tensor, check)
    return [part(index) for index in range(num)]


def size_of(value: Any) -> int:
    """Return the number of examples in a batch: the length of its first tensor. 0: it has no tensor."""
    sizes: list[int] = []
    apply_to_collection(value, Tensor, lambda tensor: sizes.append(len(tensor) if tensor.dim() else 1))
    return sizes[0] if sizes else 0


def weights_of(sizes: Sequence[int]) -> Tensor:
    """Return each part's share of the examples."""
    return torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
