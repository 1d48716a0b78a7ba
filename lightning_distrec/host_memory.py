"""How much memory this machine, or its container, has."""

import ctypes
import mmap
import resource
import sys
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")
USAGES = ("memory.current", "memory.usage_in_bytes")
"""The files of cgroup v2 and v1."""


def host_memory_bytes() -> int:
    """Return the memory of this machine, or of its container where that is less. Source:
    /proc/meminfo, cgroup."""
    return min([_meminfo("MemTotal:"), *cgroup_limits(_read(MEMBERSHIP), CGROUPS)])


def free_host_bytes() -> int:
    """Return the bytes that new processes could take without swapping. Source: /proc/meminfo,
    cgroup."""
    return min([_meminfo("MemAvailable:"), *free_in_cgroups(_read(MEMBERSHIP), CGROUPS)])


def free_process_bytes() -> int:
    """Return the bytes that this process may still take by limits of its own (ulimit -v, -d).
    Source: getrlimit(2)."""
    limits = ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:"))
    soft = []
    for kind, name in limits:
        soft.append((resource.getrlimit(kind)[0], _meminfo(name, "/proc/self/status")))
    return min(
        (limit - used for limit, used in soft if limit != resource.RLIM_INFINITY),
        default=sys.maxsize,
    )


def free_bytes() -> int:
    """Return the bytes that this process can take: of the machine's, and by limits of its own."""
    return min(free_host_bytes(), free_process_bytes())


def release_pages(address: int, num_bytes: int) -> bool:
    """Give the full pages of some memory back to the machine; return whether they read as zeros
    now.

    Source: madvise(2), for private memory without a file.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= first:
        return False
    return (
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED
        )
        == 0
    )


def _meminfo(name: str, path: str = "/proc/meminfo") -> int:
    with open(path) as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def cgroup_limits(membership: str, root: Path) -> list[int]:
    """Return the bytes that this process's cgroup and those above it allow.

    membership: the text of /proc/self/cgroup. root: where cgroups are mounted.
    """
    texts = []
    for folder in _folders(membership, root):
        for name in LIMITS:
            texts.append(_read(folder / name).strip())
    return [int(text) for text in texts if text.isdigit()]  # others: "max"


def free_in_cgroups(membership: str, root: Path) -> list[int]:
    """Return the bytes that each of those cgroups still allows; cached files give way. Arguments:
    `cgroup_limits`."""
    free = []
    for folder in _folders(membership, root):
        cached = [line.split() for line in _read(folder / "memory.stat").splitlines()]
        names = ("active_file", "inactive_file", "total_active_file", "total_inactive_file")
        for limit, usage in zip(LIMITS, USAGES, strict=True):
            texts = [_read(folder / name).strip() for name in (limit, usage)]
            if all(text.isdigit() for text in texts):
                free.append(
                    int(texts[0])
                    - int(texts[1])
                    + sum(int(size) for name, size in cached if name in names)
                )
    return free


def _folders(membership: str, root: Path) -> list[Path]:
    # A group's own limit may be lower than that of those above it, and theirs lower than its own:
    # all of them hold.
    folders = {root: None, root / "memory": None}
    for line in membership.splitlines():
        number, _, entry = line.partition(":")
        controllers, _, path = entry.partition(":")
        if number == "0" and not controllers:
            mount = root
        elif "memory" in controllers.split(","):
            mount = root / "memory"
        else:
            continue
        parts = PurePosixPath(path).parts[1:]
        if ".." not in parts:  # the group is outside of what this container sees
            folders |= {mount.joinpath(*parts[:depth]): None for depth in range(len(parts) + 1)}
    return list(folders)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def release_free_memory() -> None:
    """Give memory that is free in this process back to the system; only glibc can."""
    # glibc keeps what threads have freed for later: with a copy of tables for each checkpoint in
    # the background a process grew from 392 to 475 MiB over 100 of them.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
