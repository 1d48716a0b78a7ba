"""What this machine has."""

from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_memory_bytes() -> int:
    """Return the memory of this machine, or of its container where that is less. Source: /proc/meminfo, cgroup."""
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemTotal:"))
    for path in CGROUP_LIMITS:
        if path.exists() and (limit := path.read_text().strip()).isdigit():
            total = min(total, int(limit))
    return total
