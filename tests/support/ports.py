"""Ports of this machine that nobody listens at, and that nobody is given by chance while a test
starts its ranks."""

import socket
from contextlib import ExitStack
from random import SystemRandom

RANGE = range(10_000, 32_000)
"""Below the ports that Linux gives to connections and to listeners that ask for any
(net.ipv4.ip_local_port_range)."""


def free_ports(count: int) -> list[int]:
    """Return so many ports."""
    actual: list[int] = []
    with ExitStack() as held:
        for port in SystemRandom().sample(RANGE, 100):
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("", port))
            except OSError:
                continue
            actual.append(port)
            if len(actual) == count:
                return actual
    raise RuntimeError(f"100 ports were tried, and fewer than {count} are free")


def free_port() -> int:
    """Return one port."""
    return free_ports(1)[0]
