"""The context in which recorded operations are repeated: below autograd and autocast, where they were recorded."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def replaying() -> Iterator[None]:
    """Compute without gradients, and in the types in which operations were recorded."""
    # Tensors that are made in inference mode do not count writes in place, by which changed inputs are noticed.
    with torch.inference_mode(False), torch.no_grad():
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                yield
        else:
            yield
