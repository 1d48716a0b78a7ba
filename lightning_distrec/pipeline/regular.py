"""Lengths and offsets that the step makes by itself because all bags are of one size: torch.ones, torch.arange."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Regular:
    """Lengths or offsets of bags of one size; on a CPU, where it costs nothing to compare them.

    form: "lengths" or "offsets"; bag_size: ids in each; ends: whether the last offset is the number of ids.
    """

    form: str
    bag_size: int
    ends: bool
    dtype: torch.dtype

    def like(self, ids: Tensor) -> Tensor:
        """Return those of `ids`, (num_ids,). Raises ValueError: their number is no multiple of the bag size."""
        num_bags, rest = divmod(ids.numel(), self.bag_size)
        if rest:
            raise ValueError(f"{ids.numel()} ids are no bags of {self.bag_size}")
        if self.form == "lengths":
            return torch.full((num_bags,), self.bag_size, dtype=self.dtype, device=ids.device)
        return torch.arange(num_bags + self.ends, dtype=self.dtype, device=ids.device) * self.bag_size


def regular_like(tensor: Tensor, ids: Tensor | None) -> Regular | None:
    """Return the lengths or offsets of `ids` that `tensor` is, if it is."""
    if ids is None or tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64) or ids.numel() == 0:
        return None
    if tensor.device.type != "cpu" or ids.device.type != "cpu" or tensor.numel() == 0:
        return None
    size = int(tensor[0])
    guesses = [Regular("lengths", size, False, tensor.dtype)] if size > 0 else []
    if size == 0 and tensor.numel() > 1 and int(tensor[1]) > 0:
        guesses += [Regular("offsets", int(tensor[1]), ends, tensor.dtype) for ends in (False, True)]
    for guess in guesses:
        if ids.numel() % guess.bag_size == 0 and torch.equal(guess.like(ids), tensor):
            return guess
    return None
