"""What every measurement of checkpoints needs: turns that start from the same machine, and peaks of memory."""

import ctypes
import gc
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

COMPRESSING = ("btrfs", "zfs", "bcachefs", "f2fs")
"""File systems that may write zeros faster than anything else."""


def all_gather(value: Any) -> list[Any]:
    """Collective. Return every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(action: Callable[[], Any]) -> float:
    """Collective. Run `action` on all ranks at once; returns the seconds that the slowest of them needed."""
    dist.barrier()
    began = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - began
    del result  # giving memory back is no part of it
    return max(all_gather(seconds))


def make_ready(*folders: Path) -> None:
    """Collective. Remove folders and wait until nothing is left to be written, so that turns do not pay for each other.

    A machine's memory is fastest where it was used just before: so folders are removed right before a turn, not after
    one, which leaves the same memory for every turn.
    """
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    dist.barrier()


def forget_freed_memory() -> None:
    """Give what this process has freed back to the kernel: copies then pay for their memory, and peaks show it."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)  # only glibc has it


def write_plainly(folder: Path, count: int) -> None:
    """Write `count` bytes with dd, and wait until they are on disk."""
    folder.mkdir(exist_ok=True)
    run = ["dd", f"if={source_of_bytes(folder, count)}", f"of={folder}/{dist.get_rank()}.dd", "bs=1M", "conv=fsync"]
    subprocess.run([*run, f"count={count // 2**20}", "status=none"], check=True)


def source_of_bytes(folder: Path, count: int) -> Path:
    """Return what dd reads: zeros, or a file of random bytes, made once, where the file system may compress."""
    if file_system(folder) not in COMPRESSING:
        return Path("/dev/zero")
    source = folder.parent / f"random-{dist.get_rank()}"
    if not source.exists():
        with open(source, "wb") as file:
            for _ in range(count // 2**20):
                file.write(os.urandom(2**20))
    return source


def file_system(path: Path) -> str:
    """Return the type of the file system that a folder is on."""
    best, kind = "", "unknown"
    with open("/proc/mounts") as file:
        for line in file:
            mount_point, of_type = line.split()[1:3]
            inside = path.resolve().is_relative_to(mount_point)
            if inside and len(mount_point) >= len(best):
                best, kind = mount_point, of_type
    return kind


class Peak:
    """By how many bytes this process was larger, at its largest, than when the measurement began.

    It is VmHWM, which the kernel keeps and forgets on demand, and not samples of RssAnon: no short peak is missed, and
    no thread looks on while others are timed. It counts mapped files, too; none of what is measured maps large ones.
    """

    def __init__(self) -> None:
        forget_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def bytes(self) -> int:
        """Return the growth so far."""
        return max(0, _status("VmHWM") - self._before)


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:"))


def folder_bytes(path: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)
