"""What is done on GPUs only. Not run on a GPU yet."""

import functools
import importlib.util
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import torch
from torch.distributed import Store

from lightning_distrec.errors import ConfigError, VersionError

KEY = "device"


def is_gpu(device: torch.device) -> bool:
    """Whether work on a device is queued in streams, behind which the host runs ahead."""
    return device.type == "cuda"


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on such a device."""
    return tensor.is_cuda


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that this process can take: those that are free, and those that
    torch keeps of others.

    An earlier model of the process may have left them, in a search or a notebook.
    """
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


class HostCopy:
    """Few numbers of a tensor that the host needs later: they are sent now, without waiting for
    them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._arrived: torch.cuda.Event | None = None
        self._numbers: list[int] | None = None
        if is_on_gpu(tensor):
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> list[int]:
        """Return them; waits for what was queued before the copy, not for what comes after it."""
        if self._numbers is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._numbers = self._tensor.tolist()
        return self._numbers


@functools.lru_cache(maxsize=1024)
def kept_on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return numbers on a device. Kept: each copy from the host waits for the device."""
    return torch.tensor(numbers, device=device)


def on_device_of(like: torch.Tensor, numbers: list[int] | torch.Tensor) -> torch.Tensor:
    """Return numbers in the type and on the device of a tensor, which is not waited for."""
    pinned = torch.empty(len(numbers), dtype=like.dtype, pin_memory=is_on_gpu(like))
    pinned.copy_(torch.as_tensor(numbers))
    return pinned.to(like.device, non_blocking=True)


class DeviceTimes:
    """Times of phases of a step on a GPU, read once the device has passed them: a step or more
    late, without a wait."""

    def __init__(self) -> None:
        self._running: list[tuple[str, torch.cuda.Event]] = []
        self._pending: deque[list[tuple[str, torch.cuda.Event]]] = deque()

    def begin(self) -> None:
        """Begin a step, and its first phase."""
        self._running = []
        self.end("begin")

    def end(self, phase: str) -> None:
        """End a phase, and begin the next."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._running.append((phase, event))

    def end_step(self) -> dict[str, float]:
        """End the step; return phase -> seconds of the earliest unread one, {} where the device is
        still at it."""
        self._pending.append(self._running)
        self._running = []
        if not all(event.query() for _, event in self._pending[0]):
            return {}
        events = self._pending.popleft()
        return {
            phase: earlier.elapsed_time(event) / 1000
            for (_, earlier), (phase, event) in pairwise(events)
        }


def gpu_use(device: torch.device) -> int | None:
    """Return for how many percent of the last moments a GPU was in use; None: on a CPU, or pynvml
    does not know."""
    if is_gpu(device) and importlib.util.find_spec("pynvml"):
        with suppress(Exception):  # of pynvml, where a driver or a container has no such number
            return torch.cuda.utilization(device)
    return None


@contextmanager
def idle(device: torch.device) -> Iterator[None]:
    """Wait for all streams of a device before and after the context: for rare moments, never in a
    step."""
    # Lightning builds DistributedDataParallel on a new stream, which waits for no other and for
    # which no other waits.
    # Source: DDPStrategy._setup_model.
    if is_gpu(device):
        torch.cuda.synchronize(device)
    yield
    if is_gpu(device):
        torch.cuda.synchronize(device)


def require_kernels(device: torch.device) -> None:
    """Raise VersionError where FBGEMM, which must be loaded, has no kernels for a GPU: one is
    tried."""
    if not is_gpu(device):
        return
    try:
        torch.ops.fbgemm.asynchronous_complete_cumsum(
            torch.ones(1, dtype=torch.int32, device=device)
        )
    # with a CPU build of FBGEMM a NotImplementedError, which is one as well
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "no kernel image" not in str(error):
            raise
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        raise VersionError(
            f"this FBGEMM has no kernels for {properties.name}, of compute capability "
            f"{capability}. Wheels of fbgemm-gpu have those of 8.0 to 8.9, 9.0 and 10.0, and "
            "wheels of fbgemm-gpu-cpu none. Build FBGEMM from its sources with "
            f"TORCH_CUDA_ARCH_LIST={capability}, use another GPU, or train with accelerator='cpu'."
        ) from error


def device_id(device: torch.device, backend: str) -> str:
    """Return what no other rank may have: the GPU's UUID; "" where ranks may share their device."""
    if device.type != "cuda" or "nccl" not in backend:
        return ""
    # torch has it since 2.4
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def refuse_shared_devices(store: Store, rank: int, num_ranks: int, device: str) -> None:
    """Collective. device: as `device_id` returns it.

    Raises ConfigError on every rank: two ranks have one device, which ends in NCCL's "Duplicate GPU
    detected".
    """
    store.set(f"{KEY}/{rank}", device)
    keys = [f"{KEY}/{other}" for other in range(num_ranks)]
    devices = [value.decode() for value in store.multi_get(keys)]
    shared = next((name for name, number in Counter(devices).items() if name and number > 1), "")
    if shared:
        ranks = ", ".join(str(other) for other, name in enumerate(devices) if name == shared)
        raise ConfigError(
            f"ranks {ranks} are all on the GPU {shared}, which NCCL does not allow. Leave "
            "Trainer(devices=...) out, or set it to the number of ranks on a node, and let the "
            "launcher show each rank all GPUs of its node (Slurm: --gpus-per-node): it takes the "
            "GPU of its local rank."
        )
