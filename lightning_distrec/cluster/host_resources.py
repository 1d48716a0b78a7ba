"""What a rank uses of its machine: threads, open files, and the network interface to the ranks of
other nodes.

By default gloo takes the interface of the machine's own name, which may be no network at all
(127.0.1.1), and NCCL the first that is up.
"""

import ctypes
import errno
import ipaddress
import os
import resource
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from lightning_distrec.errors import ConfigError
from lightning_distrec.units import format_bytes

Cpus = tuple[int, frozenset[int]]
"""A rank's node, and the CPUs it may run on."""

THREADS_VARIABLE = "OMP_NUM_THREADS"
OMP_PAUSE_HARD = 2
BACKLOG = 1024
"""Connections that wait to be accepted: all ranks may come at once."""


def cpus_of_this_process(node: int) -> Cpus:
    """Return the CPUs that this process may run on, as the scheduler has bound it."""
    return node, frozenset(os.sched_getaffinity(0))


def num_threads(ranks: Sequence[Cpus], rank: int, environ: Mapping[str, str]) -> int:
    """Return the number of threads for `rank`. environ: the environment, with Slurm's
    `--cpus-per-task`."""
    node, rank_cpus = ranks[rank]
    # Ranks that are bound to CPUs of their own share with nobody; unbound ones with all of their
    # node.
    sharers = sum(bool(cpus & rank_cpus) for other, cpus in ranks if other == node)
    threads = len(rank_cpus) // sharers
    if environ.get("SLURM_CPUS_PER_TASK", "").isdigit():
        threads = min(threads, int(environ["SLURM_CPUS_PER_TASK"]))
    return max(1, threads)


def use_threads(number: int) -> None:
    """Set the number of threads of torch, and of the processes that this one starts."""
    torch.set_num_threads(number)
    os.environ[THREADS_VARIABLE] = str(number)


def end_threads() -> bool:
    """End OpenMP's idle threads, which begin again when they are needed; return whether that
    worked.

    A process that is forked while libgomp has some believes that it has them too, and waits for
    them forever.
    Source: omp_pause_resource_all of OpenMP 5.0, which libgomp has since GCC 9.
    """
    # torch loads its OpenMP for all to see
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return pause is not None and pause(OMP_PAUSE_HARD) == 0


LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
JOINED_REQUESTS = "GLOO_ENABLE_STORE_V2_API"
"""Lets gloo ask the store for the addresses of 128 ranks at once, and not three times for each."""
IDS_GROUP_RANKS = 16
"""Over gloo, more ranks send ids ahead in the group of rows."""
OTHER_FILES = 256
"""What a rank has open besides: libraries, logs, checkpoints, pipes of workers, and few sockets of
other groups."""
PROCESS_BYTES = 300 << 20
"""Host memory of a rank before any data, measured on CPUs: Python, torch, torchrec and FBGEMM; CUDA
takes more."""


@dataclass(frozen=True)
class HostNeeds:
    """What ranks take of their hosts, whatever they train."""

    num_ranks: int
    ranks_on_node: int
    backend: str = "gloo"

    @property
    def sockets(self) -> int:
        """Those of a rank to others; NCCL's own are few. Rank 0 has two more to each: of its store,
        and of its heartbeat."""
        # Groups of gloo in which each two ranks exchange something: control messages; without NCCL
        # rows, and ids.
        num_meshes = 3 if self.num_ranks <= IDS_GROUP_RANKS else 2
        return (1 if "nccl" in self.backend else num_meshes) * self.num_ranks

    @property
    def open_files(self) -> int:
        """Those of rank 0."""
        return self.sockets + 2 * self.num_ranks + OTHER_FILES

    def in_words(self) -> str:
        """Return a sentence."""
        return (
            f"Processes: {format_bytes(self.ranks_on_node * PROCESS_BYTES)} of host memory a node "
            f"before any data; a rank opens up to {self.open_files:,} files, most of them sockets "
            f"to other ranks (`ulimit -n`), a node {self.ranks_on_node * self.sockets:,} sockets."
        )

    def as_json(self) -> dict[str, int]:
        """Return the numbers by name."""
        return {
            "open_files_per_rank": self.open_files,
            "sockets_per_rank": self.sockets,
            "sockets_per_node": self.ranks_on_node * self.sockets,
            "process_bytes_per_node": self.ranks_on_node * PROCESS_BYTES,
        }


def open_files_limit() -> int:
    """Return how many files this process may open, once `reserve_open_files` has raised its
    limit."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def listen_at(host: str, port: int, one_node: bool) -> socket.socket:
    """Return a socket that listens at the address by which other ranks reach this machine.

    It listens on all interfaces only where that address is none of this machine's own (translated,
    say), or where it is the loopback, which ranks on other nodes do not reach. Raises OSError.
    """
    addresses: list[Any] = []
    with suppress(OSError):
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, address in addresses:
        if one_node or _is_outside(address[0]):
            try:
                return socket.create_server(address, family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    # None of them is this machine's: others reach it by a translated one, in a container, say.
    dualstack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dualstack else socket.AF_INET
    return socket.create_server(
        ("", port), family=family, dualstack_ipv6=dualstack, backlog=BACKLOG
    )


def reserve_open_files(num_ranks: int, backend: str) -> None:
    """Let this process open as many files as the system lets it, and gloo connect ranks when they
    first exchange.

    Otherwise gloo opens a socket to each rank for each process group, as for those of
    `one_socket_thread`.
    Raises ConfigError: too few for `num_ranks`.
    """
    os.environ.setdefault(LAZY_GLOO, "1")
    os.environ.setdefault(JOINED_REQUESTS, "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # some systems have a lower limit than the one that they name
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = HostNeeds(num_ranks, 1, backend).open_files
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ConfigError(
            f"a rank in a job of {num_ranks} needs {needed} open files, most of them sockets, and "
            f"may open {soft}. Raise the limit before the job starts: `ulimit -n {needed}`, "
            "LimitNOFILE of the scheduler's service, or docker run --ulimit."
        )


GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
KEY = "address"
# The discard service's; nothing is sent to it.
ANY_PORT = 9
SIOCGIFADDR = 0x8915
"""The ioctl for an interface's address. Source: linux/sockios.h."""


def choose_interface(
    store: Store, rank: int, num_ranks: int, host: str, backend: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """Collective. Return the variables that make gloo and NCCL use the interface to other nodes.

    host: of rank 0. environ: the environment; a variable that is set there stays. Empty: all ranks
    are on this machine, or the interface is not found.
    """
    address = find_local_address(host)
    store.set(f"{KEY}/{rank}", address)
    # Collective: each rank writes above, before those on rank 0's own node look at the way to the
    # others.
    if not _is_outside(address):
        # On rank 0's node the way to rank 0 is the loopback: the address of another node shows the
        # network.
        addresses = [store.get(f"{KEY}/{other}").decode() for other in range(num_ranks)]
        outside = next(filter(_is_outside, addresses), "")
        address = find_local_address(outside) if outside else ""
    name = find_interface(address) if _is_outside(address) else None
    if name is None:
        return {}
    # "=": this one, and not all with this prefix.
    interfaces = {GLOO: name, NCCL: f"={name}"} if "nccl" in backend else {GLOO: name}
    return {variable: value for variable, value in interfaces.items() if variable not in environ}


def find_local_address(host: str) -> str:
    """Return the address from which this machine would send to `host`, "" without a route. Nothing
    is sent."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, ANY_PORT, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                # For a datagram socket this only chooses the route, and with it the source address.
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def find_own_address(host: str) -> str:
    """Return the address of this machine by which it reaches `host`; `host` itself where that is
    this machine, as far as its addresses show."""
    address = find_local_address(host)
    return address if _is_outside(address) else host


def find_interface(address: str) -> str | None:
    """Return the name of the interface that has an address; None where it is not found."""
    with suppress(OSError, ImportError):
        if _parse_address(address).version == 4:
            return next(
                (name for _, name in socket.if_nameindex() if _interface_address(name) == address),
                None,
            )
        packed = _parse_address(address).packed.hex()
        lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((words[-1] for words in lines if words[0] == packed), None)
    return None


def _interface_address(interface: str) -> str:
    import fcntl  # not on Windows

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # struct ifreq: 16 bytes for the name and its final zero; then family and port, 4 bytes,
        # before the address.
        answer = fcntl.ioctl(
            probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15])
        )
        return socket.inet_ntoa(answer[20:24])
    return ""


def _is_outside(address: str) -> bool:
    return bool(address) and not _parse_address(address).is_loopback


def _parse_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # without the interface that an IPv6 address may name
    return ipaddress.ip_address(address.partition("%")[0])
