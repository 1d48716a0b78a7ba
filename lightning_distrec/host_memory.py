"""How much memory this machine, or its container, has."""

from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")
"""The files of cgroup v2 and v1."""


def host_memory_bytes() -> int:
    """Return the memory of this machine, or of its container where that is less. Source: /proc/meminfo, cgroup."""
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemTotal:"))
    try:
        membership = MEMBERSHIP.read_text()
    except OSError:
        membership = ""
    return min([total, *cgroup_limits(membership, CGROUPS)])


def free_host_bytes() -> int:
    """Return the bytes that new processes could take without swapping. Source: /proc/meminfo."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


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
    return [limit for folder in folders for name in LIMITS for limit in _limit(folder / name)]


def _limit(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []
