"""Two machines on this one: network namespaces, joined by a link that may be of a limited rate.
Needs root and `ip`."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.199.0.1", "10.199.0.2")
LEAST_BURST_KILOBYTES = 64
QUEUE = "50ms"


class NoMachines(RuntimeError):
    """There can be no such machines here; the message says why."""


@dataclass(frozen=True)
class Machine:
    """One of the two."""

    space: str
    device: str
    """The network interface that leads to the other."""
    address: str

    def command(self, *command: str) -> list[str]:
        """Return what runs a command on this machine."""
        return ["ip", "netns", "exec", self.space, *command]

    def cut_off(self) -> None:
        """Take the link down."""
        _run("ip", "-n", self.space, "link", "set", self.device, "down")

    def join_again(self) -> None:
        """Bring the link up."""
        _run("ip", "-n", self.space, "link", "set", self.device, "up")


@contextmanager
def two_machines(mbit_per_second: int | None = None) -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines, gone after the context. mbit_per_second: of the link, each way. Raises
    NoMachines."""
    first, other = (Machine(f"distrec{os.getpid()}{side}", f"dr{os.getpid()}{side}", position)
                  for side, position in zip("ab", ADDRESSES, strict=True))  # fmt: skip
    with ExitStack() as made:
        for machine in (first, other):
            _run("ip", "netns", "add", machine.space)
            made.callback(_run, "ip", "netns", "del", machine.space)
        ends = (first.device, "type", "veth", "peer", other.device, "netns", other.space)
        _run("ip", "-n", first.space, "link", "add", *ends)
        for machine in (first, other):
            _run(
                "ip",
                "-n",
                machine.space,
                "addr",
                "add",
                f"{machine.address}/24",
                "dev",
                machine.device,
            )
            _run("ip", "-n", machine.space, "link", "set", machine.device, "up")
            _run("ip", "-n", machine.space, "link", "set", "lo", "up")
            if mbit_per_second is not None:
                limit = (
                    "rate",
                    f"{mbit_per_second}mbit",
                    "burst",
                    _burst(mbit_per_second),
                    "latency",
                    QUEUE,
                )
                _run(
                    "tc",
                    "-n",
                    machine.space,
                    "qdisc",
                    "add",
                    "dev",
                    machine.device,
                    "root",
                    "tbf",
                    *limit,
                )
        yield first, other


def _burst(mbit_per_second: int) -> str:
    """Return what may pass at once: a millisecond's worth, less than which timers cannot follow."""
    return f"{max(LEAST_BURST_KILOBYTES, mbit_per_second // 8)}kb"


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoMachines(f"there is no `{command[0]}` on this machine") from error
    except subprocess.CalledProcessError as error:
        raise NoMachines(f"`{' '.join(command)}`: {error.stderr.strip()}") from error
