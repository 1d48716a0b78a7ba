"""On which device these tests run: a GPU or, with GPU_TESTS_ON=cpu, this CPU, to see that they
themselves are right."""

import os

import torch

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
ACCELERATOR = "gpu" if DEVICE == "cuda" else DEVICE
SLEEP_CYCLES = 10_000_000
"""About 5 ms."""


def num_ranks() -> int:
    """Return how many ranks this machine can have, two at most."""
    return 2 if DEVICE == "cpu" else min(2, torch.cuda.device_count())


def own_device() -> torch.device:
    """Return this rank's device."""
    return (
        torch.device(DEVICE, torch.cuda.current_device())
        if DEVICE == "cuda"
        else torch.device(DEVICE)
    )


def sleep() -> None:
    """Let the current stream lag behind the host; a CPU build's CUDA device in host memory
    cannot."""
    if hasattr(torch._C, "_cuda_sleep"):
        torch.cuda._sleep(SLEEP_CYCLES)


def synchronize() -> None:
    """Wait for all streams."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
