"""Examines the ranks, nodes and links that a job would get, before a training fails for what is missing."""

import os
import platform
import resource
import shutil
import socket
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_distrec.cluster.consensus import all_gather_plain
from lightning_distrec.cluster.environment import find_launched
from lightning_distrec.cluster.launched import Launched
from lightning_distrec.cluster.rendezvous import MeetingPoint, meet
from lightning_distrec.host_memory import host_memory_bytes
from lightning_distrec.versions import find_installed, problem_with

MIB = 1 << 20
SHARED_MEMORY = "/dev/shm"
PINGS, TRANSFERS, TRANSFER_BYTES = 20, 3, 16 * MIB
MAX_LINKS = 32


@dataclass(frozen=True)
class Rank:
    """What one rank has found out about itself and its node."""

    rank: int
    node: int
    host: str
    python: str
    versions: str
    versions_problem: str | None
    devices: tuple[str, ...]
    cpus: int
    memory_bytes: int
    open_files: int
    """Limit of open files of the process."""
    shared_memory_bytes: int
    """Free memory for the batches that a DataLoader's workers pass on."""
    sees_folder: bool
    """Whether it has seen a file that rank 0 wrote."""
    clocks: tuple[float, ...]
    """Its clock, in seconds, right after barriers."""


@dataclass(frozen=True)
class Link:
    """The speed between two ranks, over gloo."""

    one: int
    other: int
    across_nodes: bool
    latency_seconds: float
    """Half of the median round trip of 8 bytes."""
    bytes_per_second: float
    """Median of sending 16 MiB one way, with an acknowledgement."""


@dataclass(frozen=True)
class Findings:
    """What all ranks have found."""

    started_by: str
    num_nodes: int
    folder: str
    ranks: tuple[Rank, ...]
    links: tuple[Link, ...]


def examine(folder: Path, timeout_seconds: float, log: Callable[[str], None]) -> Findings:
    """Collective among the ranks that a launcher has started, if one has. Return the findings of all on every rank.

    folder: all ranks should see it. log: called with what a rank waits for.
    Raises RendezvousError: not all ranks arrive; ConfigError: the launcher's variables do not fit together; OSError:
    rank 0 cannot write into the folder.
    """
    launched = find_launched() or Launched("no launcher", 0, 1, 0, 1, 0, 1, MeetingPoint("", (), ""))
    if launched.num_ranks > 1:
        store = meet(launched.point, launched.rank, launched.num_ranks, timeout_seconds, log, launched.nodes)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=launched.rank,
            world_size=launched.num_ranks,
            timeout=timedelta(seconds=timeout_seconds),
        )
    try:
        ranks = tuple(_gathered(_examine_rank(launched, folder), launched))
        links = tuple(_measure(one, other, launched, ranks) for one, other in _pairs(ranks))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return Findings(launched.by, launched.num_nodes, str(folder), ranks, links)


def _examine_rank(launched: Launched, folder: Path) -> Rank:
    installed = find_installed()
    return Rank(
        rank=launched.rank,
        node=launched.node,
        host=launched.nodes[launched.rank] if launched.nodes else socket.gethostname(),
        python=platform.python_version(),
        versions=str(installed),
        versions_problem=problem_with(installed, on_cuda=torch.cuda.is_available()),
        devices=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=host_memory_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else 0,
        sees_folder=_sees(folder, launched),
        clocks=tuple(_time_after_barrier(launched) for _ in range(3)),
    )


def _gathered(mine: Any, launched: Launched) -> list[Any]:
    if launched.num_ranks == 1:
        return [mine]
    return all_gather_plain(mine)


def _sees(folder: Path, launched: Launched) -> bool:
    """Collective. Whether this rank sees what rank 0 writes into the folder."""
    token = folder / f".distrec-doctor-{zlib.crc32(launched.point.identity.encode()):08x}"
    problem = ""
    if launched.rank == 0:
        try:
            token.write_text(launched.point.identity)
        except OSError as error:
            problem = str(error)
    problem = _gathered(problem, launched)[0]
    if problem:
        raise OSError(f"rank 0 cannot write into {folder}: {problem}")
    try:
        sees = token.read_text() == launched.point.identity
    except OSError:
        sees = False
    _gathered(None, launched)
    if launched.rank == 0:
        token.unlink()
    return sees


def _time_after_barrier(launched: Launched) -> float:
    if launched.num_ranks > 1:
        dist.barrier()
    return time.time()


def _pairs(ranks: tuple[Rank, ...]) -> list[tuple[int, int]]:
    """Return the pairs to measure: two ranks on each node, and the first ranks of neighboring nodes."""
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(rank.rank)
    nodes = [by_node[node] for node in sorted(by_node)]
    within = [(of_node[0], of_node[1]) for of_node in nodes if len(of_node) > 1]
    around = [(a[0], b[0]) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True)]
    across = around[:1] if len(nodes) == 2 else around if len(nodes) > 2 else []
    return within[:MAX_LINKS] + across[:MAX_LINKS]


def _measure(one: int, other: int, launched: Launched, ranks: tuple[Rank, ...]) -> Link:
    """Collective. Measure the link of two ranks, while the others wait; return it on every rank."""
    mine: tuple[float, float] | None = None
    if launched.rank in (one, other):
        peer, begins = (other, True) if launched.rank == one else (one, False)
        latency = statistics.median(_round_trip(peer, begins, 8, 8) for _ in range(PINGS)) / 2
        seconds = statistics.median(_round_trip(peer, begins, TRANSFER_BYTES, 8) for _ in range(TRANSFERS))
        mine = (latency, TRANSFER_BYTES / max(seconds - latency, 1e-9))
    latency, speed = _gathered(mine, launched)[one]
    return Link(one, other, ranks[one].node != ranks[other].node, latency, speed)


def _round_trip(peer: int, begins: bool, there: int, back: int) -> float:
    """Return the seconds to send `there` bytes to a peer and receive `back` bytes from it."""
    sent, received = torch.zeros(there, dtype=torch.uint8), torch.zeros(back, dtype=torch.uint8)
    began = time.perf_counter()
    if begins:
        dist.send(sent, peer)
        dist.recv(received, peer)
    else:
        dist.recv(sent, peer)
        dist.send(received, peer)
    return time.perf_counter() - began
