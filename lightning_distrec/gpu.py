"""What is done on GPUs only. Not run on a GPU yet."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_gpu(device: torch.device) -> bool:
    """Whether work on a device is queued in streams, behind which the host runs ahead."""
    return device.type == "cuda"


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on such a device."""
    return tensor.is_cuda


@contextmanager
def idle(device: torch.device) -> Iterator[None]:
    """Wait for all streams of a device before and after the context: for rare moments, never in a step.

    Lightning builds DistributedDataParallel on a new stream, which waits for no other and for which no other waits.
    Source: DDPStrategy._setup_model.
    """
    if is_gpu(device):
        torch.cuda.synchronize(device)
    yield
    if is_gpu(device):
        torch.cuda.synchronize(device)
