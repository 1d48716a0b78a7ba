"""Where the ids of each feature end, which backward needs on the host: sent there in forward, without waiting for it.

Not run on a GPU yet.
"""

import torch
from torch import Tensor

from lightning_distrec import gpu


class FeatureEnds:
    """The entries of a kernel's offsets between its features.

    offsets: (num_features * batch_size + 1,), on the kernel's device. first_bags: the first bag of each feature, and
    the number of all bags.
    """

    def __init__(self, offsets: Tensor, first_bags: list[int]) -> None:
        self.first_bags = first_bags
        self._arrived: torch.cuda.Event | None = None
        step = first_bags[1] if len(first_bags) > 1 else 1
        even = step > 0 and first_bags == list(range(0, len(first_bags) * step, step))
        # A slice, where it can be one: the numbers of others come from the host, and are waited for.
        chosen = offsets[::step] if even else offsets[torch.tensor(first_bags, device=offsets.device)]
        self._ends = chosen
        if gpu.is_on_gpu(offsets):
            self._ends = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
            self._ends.copy_(chosen, non_blocking=True)
            self._arrived = torch.cuda.current_stream(offsets.device).record_event()

    def read(self) -> list[int]:
        """Return them; waits for the GPU to come to the lookup, not for what comes after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[int] = self._ends.tolist()
        return numbers


def first_bags(batch_sizes: list[list[int]] | None, offsets: Tensor, num_features: int) -> list[int]:
    """Return the first bag of each feature, and the number of all bags.

    batch_sizes: feature -> rank -> bags, where features have unequal batch sizes; None: they have one.
    """
    if batch_sizes is None:
        bags = (offsets.numel() - 1) // num_features
        return [feature * bags for feature in range(num_features + 1)]
    first = [0]
    for of_ranks in batch_sizes:
        first.append(first[-1] + sum(of_ranks))
    return first
