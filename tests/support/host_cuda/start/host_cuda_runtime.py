"""What torch.cuda calls in torch._C, for the device in host memory; sitecustomize.py installs each
part."""

import atexit
import ctypes
import importlib.util
import json
import multiprocessing.util
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_library: Any = None
_reports: Counter[tuple[str, str, str]] = Counter()
"""How often (kind, text, place in Python) was reported."""
followers: list[Callable[[str, str], None]] = []
"""Are called with the kind and the text of each report, where it is made."""


def load_library() -> None:
    """Load the device before torch does anything."""
    global _library
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_libraries = Path(spec.origin).parent / "lib"
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_libraries / name), mode=ctypes.RTLD_GLOBAL)
    _library = ctypes.CDLL(os.environ["HOST_CUDA_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
    _library.host_cuda_stream.restype = ctypes.c_int64
    _library.host_cuda_calls.restype = ctypes.c_char_p
    _library.host_cuda_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    _library.host_cuda_limit.argtypes = [ctypes.c_int, ctypes.c_int64]
    for device in range(_library.host_cuda_num_devices()):
        _library.host_cuda_limit(device, int(os.environ.get("HOST_CUDA_BYTES", 8 << 30)))
    _library.host_cuda_register_exchanges()
    _library.host_cuda_report_to(_report)
    atexit.register(_write_reports)
    multiprocessing.util.register_after_fork(_reports, _report_apart)


# ---- reports


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
def _report(kind: bytes, text: bytes) -> None:
    _reports[kind.decode(), text.decode(), _place()] += 1
    for follow in followers:
        follow(kind.decode(), text.decode())


def _place() -> str:
    """Return the innermost lines outside of torch that led here, innermost first."""
    frames = [
        f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_stack(sys._getframe())
        if "/torch/" not in frame.filename and "host_cuda" not in frame.filename
    ]
    return " < ".join(frames[:-4:-1]) or "a thread of the device"


def reports(kind: str) -> list[tuple[str, str, int]]:
    """Return (text, place, how often) of hazards or waits, kind: "hazard" or "wait"."""
    return [
        (text, place, count)
        for (one_kind, text, place), count in _reports.items()
        if one_kind == kind
    ]


def calls() -> Counter[str]:
    """Return how often each operation was queued on devices, since the process began."""
    lines = _library.host_cuda_calls().decode().splitlines()
    return Counter({name: int(number) for name, number in (line.split("\t") for line in lines)})


def forget_reports() -> None:
    """Begin anew."""
    _reports.clear()


def _write_reports() -> None:
    """Leave what was seen for the process that started this one."""
    folder = os.environ.get("HOST_CUDA_REPORTS", "")
    if Path(folder or "none").is_dir():  # a server of forks ends after the process that has asked
        lines = [[*report, count] for report, count in _reports.items()]
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(lines))


def _report_apart(_: Any) -> None:
    """Begin anew in a process that multiprocessing has forked, which ends without atexit."""
    _reports.clear()
    multiprocessing.util.Finalize(None, _write_reports, exitpriority=0)


# ---- torch._C


class _Properties:
    """Of each device."""

    def __init__(self, device: int) -> None:
        self.name = "CUDA device in host memory"
        self.major, self.minor = 9, 0
        self.total_memory = _memory(device)[4]
        self.multi_processor_count = 132
        self.max_threads_per_multi_processor = 2048
        self.warp_size = 32
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 49152
        self.L2_cache_size = 50 << 20
        self.is_integrated = self.is_multi_gpu_board = 0
        self.gcnArchName = ""
        self.uuid = f"host-{device}"
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = device, 0, 0


def _memory(device: int) -> list[int]:
    """Return allocated, reserved, their peaks, the limit, and the number of blocks."""
    numbers = (ctypes.c_int64 * 6)()
    _library.host_cuda_memory(device, numbers)
    return list(numbers)


def _memory_stats(device: int) -> dict[str, Any]:
    allocated, reserved, peak_allocated, peak_reserved, _, blocks = _memory(device)

    def pools(current: int, peak: int) -> dict[str, Any]:
        names = ("all", "small_pool", "large_pool")
        return {
            name: {"current": current, "peak": peak, "allocated": 0, "freed": 0} for name in names
        }

    stats = {
        f"{name}_bytes": pools(allocated, peak_allocated)
        for name in ("allocated", "active", "requested")
    }
    stats |= {"reserved_bytes": pools(reserved, peak_reserved), "inactive_split_bytes": pools(0, 0)}
    stats |= {
        name: pools(blocks, blocks)
        for name in ("allocation", "segment", "active", "inactive_split")
    }
    return stats | {"num_alloc_retries": 0, "num_ooms": 0, "max_split_size": -1}


def _host_memory_stats() -> dict[str, Any]:
    """Return what is pinned, and was at most."""
    numbers = (ctypes.c_int64 * 2)()
    _library.host_cuda_pinned(numbers)
    current, peak = numbers
    return {
        name: {"current": current, "peak": peak} for name in ("allocated_bytes", "active_bytes")
    }


def _stream_data(device: int, stream: int) -> tuple[int, int, int]:
    return stream, device, 1


def _init() -> None:
    """Make the default generators, as torch's C code does."""
    import torch

    generators = []
    for device in range(_library.host_cuda_num_devices()):
        _library.host_cuda_make_default_generator(device)
        generators.append(torch.Generator(f"cuda:{device}"))
    _library.host_cuda_make_default_generator(-1)
    torch.cuda.default_generators = tuple(generators)


def _exchange_device(device: int) -> int:
    previous = _library.host_cuda_device()
    _library.host_cuda_set_device(device)
    return previous


def _set_device(device: int) -> None:
    if device >= _library.host_cuda_num_devices():
        raise RuntimeError("CUDA error: invalid device ordinal")
    _library.host_cuda_set_device(device)


def _free_and_total(device: int) -> tuple[int, int]:
    """As the driver counts: what torch keeps for later is taken."""
    _, reserved, _, _, limit, _ = _memory(device)
    return limit - reserved, limit


def _before_cuda() -> None:
    import torch

    class CudaStreamBase(torch.Stream):
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            **_: Any,
        ) -> Any:
            if device_type:
                return super().__new__(
                    cls, stream_id=stream_id, device_index=device_index, device_type=device_type
                )
            return super().__new__(
                cls, torch.device("cuda", _library.host_cuda_device()), priority=priority
            )

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        def record_event(self, event: Any = None) -> Any:
            event = event or torch.cuda.Event()
            event.record(self)
            return event

    class CudaEventBase(torch.Event):
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            **_: Any,
        ) -> Any:
            return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    functions = {
        "_CudaStreamBase": CudaStreamBase,
        "_CudaEventBase": CudaEventBase,
        "_CudaDeviceProperties": _Properties,
        "_cuda_init": _init,
        "_cuda_getDeviceCount": lambda: _library.host_cuda_num_devices(),
        "_cuda_getDevice": lambda: _library.host_cuda_device(),
        "_cuda_setDevice": _set_device,
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _exchange_device,
        "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_synchronize": lambda: _library.host_cuda_synchronize(_library.host_cuda_device()),
        "_cuda_getCurrentStream": lambda device: _stream_data(
            device, _library.host_cuda_stream(device)
        ),
        "_cuda_getCurrentRawStream": lambda device: _library.host_cuda_stream(device),
        "_cuda_getDefaultStream": lambda device: _stream_data(device, 0),
        "_cuda_setStream": lambda stream_id, device_index, device_type: _set_stream(
            device_index, stream_id
        ),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_memoryStats": _memory_stats,
        "_cuda_hostMemoryStats": _host_memory_stats,
        "_cuda_emptyCache": lambda: _library.host_cuda_empty_cache(),
        "_cuda_resetPeakMemoryStats": lambda device: _library.host_cuda_reset_peak(device),
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_set_sync_debug_mode": lambda mode: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_lock_mutex": lambda: None,
        "_cuda_unlock_mutex": lambda: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_get_device_properties": _Properties,
        "_has_cuda": True,
        "_nccl_version": lambda: (2 << 32) | (28 << 16),
        "_nccl_version_suffix": lambda: b"",
        "_cudart": SimpleNamespace(
            cudaMemGetInfo=_free_and_total,
            cudaError=SimpleNamespace(success=0),
            cudaGetErrorString=lambda code: "CUDA error",
            cudaDeviceSynchronize=lambda: _library.host_cuda_synchronize(
                _library.host_cuda_device()
            ),
        ),
    }
    for name in NOT_EMULATED:
        functions[name] = _not_emulated(name)
    for name, function in functions.items():
        setattr(torch._C, name, function)


NOT_EMULATED = (
    "_CUDAGraph",
    "_graph_pool_handle",
    "_cuda_CUDAAllocator",
    "_MemPool",
    "_cuda_beginAllocateToPool",
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_endAllocateToPool",
    "_cuda_releasePool",
)


def _not_emulated(name: str) -> type:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the CUDA device in host memory has no {name}")

    return type(name, (), {"__init__": refuse})


def _set_stream(device: int, stream: int) -> None:
    _set_device(device)
    _library.host_cuda_set_stream(device, stream)


def _after_cuda() -> None:
    import torch

    torch.version.cuda = "13.0"  # type: ignore[assignment]
    cuda = sys.modules["torch.cuda"]
    cuda.get_device_properties = lambda device=None: _Properties(_index(device))  # type: ignore[attr-defined]


def _index(device: Any) -> int:
    from torch.cuda._utils import _get_device_index

    return _get_device_index(device, optional=True)


def _after_storage() -> None:
    """What torch's C code does for storages of CUDA in a CUDA build only."""
    import torch
    from torch.storage import UntypedStorage

    make, resize = UntypedStorage.__new__, UntypedStorage.resize_

    def make_on_device(cls: type, *args: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return (
                make(cls, *args, **options)
                if device is None
                else make(cls, *args, device=device, **options)
            )
        size = args[0] if args and isinstance(args[0], int) else 0
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def resize_on_device(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        _library.host_cuda_resize_storage(ctypes.c_void_p(storage._cdata), ctypes.c_int64(size))
        return storage

    UntypedStorage.__new__ = make_on_device  # type: ignore[method-assign, assignment]
    UntypedStorage.resize_ = resize_on_device  # type: ignore[method-assign]


def _after_c10d() -> None:
    import host_nccl

    host_nccl.install()


def _after_fbgemm() -> None:
    import host_fbgemm
    import host_fbgemm_dense

    host_fbgemm.install()
    host_fbgemm_dense.install()


BEFORE = {"torch": load_library, "torch.cuda": _before_cuda}
AFTER = {
    "torch.cuda": _after_cuda,
    "torch.storage": _after_storage,
    "torch.distributed.distributed_c10d": _after_c10d,
    "fbgemm_gpu.split_table_batched_embeddings_ops_training": _after_fbgemm,
}
