"""The network interface to the ranks of other nodes, for gloo and NCCL.

By default gloo takes the interface that the machine's own name resolves to, which may be no network at all (127.0.1.1),
and NCCL the first that is up.
"""

import ipaddress
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch.distributed import Store

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
KEY = "address"
ANY_PORT = 9
SIOCGIFADDR = 0x8915
"""The ioctl for an interface's address. Source: linux/sockios.h."""


def choose_interface(
    store: Store, rank: int, num_ranks: int, host: str, backend: str, given: Mapping[str, str]
) -> dict[str, str]:
    """Collective. Return the variables that make gloo and NCCL use the interface to other nodes.

    host: of rank 0. given: the environment; a variable that is set there stays. Empty: all ranks are on this machine,
    or the interface is not found.
    """
    address = address_towards(host)
    store.set(f"{KEY}/{rank}", address)
    if not _is_outside(address):  # on rank 0's own node: look at the way to the others
        others = [store.get(f"{KEY}/{other}").decode() for other in range(num_ranks)]
        outside = next((other for other in others if _is_outside(other)), "")
        address = address_towards(outside) if outside else ""
    name = interface_with(address) if _is_outside(address) else None
    if name is None:
        return {}
    wanted = {GLOO: name} | (
        {NCCL: f"={name}"} if "nccl" in backend else {}
    )  # "=": this one, and not all with this prefix
    return {variable: value for variable, value in wanted.items() if variable not in given}


def address_towards(host: str) -> str:
    """Return the address from which this machine would send to `host`, "" without a route. Nothing is sent."""
    with suppress(OSError):
        for family, kind, protocol, _, to in socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(to)
                return str(probe.getsockname()[0])
    return ""


def interface_with(address: str) -> str | None:
    """Return the name of the interface that has an address; None where it is not found."""
    with suppress(OSError, ImportError):
        if ipaddress.ip_address(address.partition("%")[0]).version == 4:
            return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((words[-1] for words in lines if words[0] == packed), None)
    return None


def _address_of(interface: str) -> str:
    import fcntl  # not on Windows

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def _is_outside(address: str) -> bool:
    return bool(address) and not ipaddress.ip_address(address.partition("%")[0]).is_loopback
