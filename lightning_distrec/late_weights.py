"""What stands for weights of ids that only the step computes, while their ids are sent ahead of it."""

import torch
from torch import Tensor


class LateWeights(Tensor):
    """Zeros. What is computed of them has this class too."""

    @staticmethod
    def of(ids: Tensor) -> Tensor:
        """Return those of `ids`, of any shape."""
        with torch.inference_mode(False):  # writes to inference tensors are not counted
            return torch.zeros(1, device=ids.device).expand(ids.shape).as_subclass(LateWeights)
