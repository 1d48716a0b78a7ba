"""How much memory this machine, or its container, has."""

from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")
"""The files of cgroup v2 and v1."""


def host_memory_bytes() -> int:
    """Return the memory of this machine, or of its container where that is less. Source: /proc/meminfo, cgroup."""
    return min([_meminfo("MemTotal:"), *cgroup_limits(_read(MEMBERSHIP), CGROUPS)])


def free_host_bytes() -> int:
    """Return the bytes that new processes could take without swapping. Source: /proc/meminfo."""
    return _meminfo("MemAvailable:")


def _meminfo(name: str) -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def cgroup_limits(membership: str, root: Path) -> list[int]:
    """Return the bytes that this process's cgroup and those above it allow.

    membership: the text of /proc/self/cgroup. root: where cgroups are mounted.
    """
    # A group's own limit may be lower than that of those above it, and theirs lower than its own: all of them hold.
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
    texts = [_read(folder / name).strip() for folder in folders for name in LIMITS]
    return [int(text) for text in texts if text.isdigit()]  # others: "max"


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
