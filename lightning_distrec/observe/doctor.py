"""Examines the ranks, nodes and links that a job would get, and prints the problems before a
training meets them."""

import itertools
import os
import platform
import shutil
import socket
import statistics
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.filesize import decimal

from lightning_distrec.cluster.consensus import all_gather_values
from lightning_distrec.cluster.environment import complete_launched, find_launched
from lightning_distrec.cluster.host_resources import HostNeeds, open_files_limit
from lightning_distrec.cluster.launched import Launched, MeetingPoint
from lightning_distrec.cluster.meeting import meet
from lightning_distrec.host_memory import host_memory_bytes
from lightning_distrec.units import format_ranks, quantity, shortened, text_table
from lightning_distrec.versions import find_installed, problem_with

MIB = 1 << 20
SHARED_MEMORY = "/dev/shm"
PINGS = 20
TRANSFERS = 3
TRANSFER_BYTES = 16 * MIB
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
    """How many files a training may open: the hard limit, to which it raises its own."""
    shared_memory_bytes: int
    """Free memory for the batches that a DataLoader's workers pass on."""
    sees_folder: bool
    """Whether it has seen a file that rank 0 wrote."""


@dataclass(frozen=True)
class Link:
    """The speed between two ranks, over gloo."""

    first: int
    second: int
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
    """Collective. Return the findings of all ranks that a launcher has started, or of this process.

    folder: all ranks should see it. log: called with what a rank waits for.
    Raises RendezvousError: not all ranks arrive; ConfigError: the launcher's variables do not fit
    together; OSError: rank 0 cannot write into the folder.
    """
    launched = find_launched() or Launched(
        "no launcher", 0, 1, 0, 1, 0, 1, MeetingPoint("", (), "")
    )
    if launched.num_ranks > 1:
        store = meet(
            launched.point, launched.rank, launched.num_ranks, timeout_seconds, log, launched.nodes
        )
        launched = complete_launched(launched, store)
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            "gloo", store=store, rank=launched.rank, world_size=launched.num_ranks, timeout=timeout
        )
    try:
        ranks = tuple(_gather(_examine_rank(launched, folder)))
        links = tuple(
            _measure_link(first, second, launched, ranks) for first, second in _choose_pairs(ranks)
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return Findings(launched.launcher, launched.num_nodes, str(folder), ranks, links)


def _examine_rank(launched: Launched, folder: Path) -> Rank:
    installed = find_installed()
    return Rank(
        rank=launched.rank,
        node=launched.node,
        host=launched.nodes[launched.rank] if launched.nodes else socket.gethostname(),
        python=platform.python_version(),
        versions=str(installed),
        versions_problem=problem_with(installed, on_cuda=torch.cuda.is_available()),
        devices=tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
        # Not os.cpu_count: schedulers bind ranks to some of the machine's CPUs.
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=host_memory_bytes(),
        open_files=open_files_limit(),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free
        if os.path.isdir(SHARED_MEMORY)
        else 0,
        sees_folder=_sees_folder(folder, launched),
    )


def _gather(value: Any) -> list[Any]:
    return all_gather_values(value) if dist.is_initialized() else [value]


def _sees_folder(folder: Path, launched: Launched) -> bool:
    """Collective. Whether this rank sees what rank 0 writes into the folder."""
    # All ranks know the name without a message, and other jobs in the folder have another.
    token = folder / f".distrec-doctor-{zlib.crc32(launched.point.identity.encode()):08x}"
    problem = ""
    if launched.rank == 0:
        try:
            token.write_text(launched.point.identity)
        except OSError as error:
            problem = str(error)
    # All ranks raise what rank 0 met, and none of them looks before it has written, or after it has
    # removed the file.
    problem = _gather(problem)[0]
    if problem:
        raise OSError(f"rank 0 cannot write into {folder}: {problem}")
    try:
        sees = token.read_text() == launched.point.identity
    except OSError:
        sees = False
    _gather(None)
    if launched.rank == 0:
        token.unlink()
    return sees


def _by_node(ranks: tuple[Rank, ...]) -> list[list[Rank]]:
    ranks_by_node: dict[int, list[Rank]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.node):
        ranks_by_node.setdefault(rank.node, []).append(rank)
    return list(ranks_by_node.values())


def _choose_pairs(ranks: tuple[Rank, ...]) -> list[tuple[int, int]]:
    """Return the pairs to measure: two ranks on each node, and the first ranks of neighboring
    nodes."""
    nodes = _by_node(ranks)
    firsts = [node_ranks[0].rank for node_ranks in nodes]
    within = [(node[0].rank, node[1].rank) for node in nodes if len(node) > 1]
    around = list(zip(firsts, [*firsts[1:], firsts[0]], strict=True))
    # In a ring of two nodes both links are the same one; with a single node there is none.
    num_around = MAX_LINKS if len(nodes) > 2 else len(nodes) - 1
    return within[:MAX_LINKS] + around[:num_around]


def _measure_link(first: int, second: int, launched: Launched, ranks: tuple[Rank, ...]) -> Link:
    """Collective. Measure the link of two ranks, while the others wait; return it on every rank."""
    measured: tuple[float, float] | None = None
    if launched.rank in (first, second):
        peer, begins = (second, True) if launched.rank == first else (first, False)
        pings = [_round_trip(peer, begins, 8) for _ in range(PINGS)]
        latency = statistics.median(pings) / 2
        transfers = [_round_trip(peer, begins, TRANSFER_BYTES) for _ in range(TRANSFERS)]
        seconds = statistics.median(transfers)
        # The acknowledgement takes a latency of its own; a coarse clock may leave nothing.
        measured = (latency, TRANSFER_BYTES / max(seconds - latency, 1e-9))
    # It also keeps the other ranks from the next pair, whose transfer would share the network.
    latency, speed = _gather(measured)[first]
    return Link(first, second, ranks[first].node != ranks[second].node, latency, speed)


def _round_trip(peer: int, begins: bool, num_bytes: int) -> float:
    """Return the seconds to send bytes to a peer, and 8 bytes back."""
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    received = torch.zeros(8, dtype=torch.uint8)
    began = time.perf_counter()
    if begins:
        dist.send(sent, peer)
        dist.recv(received, peer)
    else:
        dist.recv(sent, peer)
        dist.send(received, peer)
    return time.perf_counter() - began


MIN_OPEN_FILES = 4096
MIN_SHARED_MEMORY_BYTES = 1 << 30
MIN_CROSS_NODE_SPEED = 125e6
"""In bytes per second: a gigabit link."""


@dataclass(frozen=True)
class Problem:
    """Something that stops the job, or slows it down."""

    kind: Literal["error", "warning"]
    description: str
    advice: str


def find_problems(findings: Findings) -> list[Problem]:
    """Return the problems, errors first."""
    parts = (_version_problems, _folder_problems, _machine_problems, _link_problems)
    # "error" is before "warning" in the alphabet, and sorted keeps the order of equal kinds.
    return sorted(
        itertools.chain.from_iterable(part(findings) for part in parts),
        key=lambda problem: problem.kind,
    )


def _version_problems(findings: Findings) -> Iterable[Problem]:
    ranks = findings.ranks
    for problem in dict.fromkeys(rank.versions_problem for rank in ranks if rank.versions_problem):
        affected = _list_ranks(rank for rank in ranks if rank.versions_problem == problem)
        yield Problem(
            "error", f"{affected}: {problem}", "Install matching versions: docs/installing.md."
        )
    # Micro versions of Python may differ: 3.11.4 works with 3.11.9.
    versions = {(rank.versions, rank.python.rpartition(".")[0]) for rank in ranks}
    if len(versions) > 1:
        different = "; ".join(sorted(f"{having}, Python {python}" for having, python in versions))
        yield Problem(
            "error",
            f"ranks have different versions: {different}.",
            "Use one environment on all nodes.",
        )


def _folder_problems(findings: Findings) -> Iterable[Problem]:
    blind = [rank for rank in findings.ranks if not rank.sees_folder]
    if blind:
        yield Problem(
            "error",
            f"{_list_ranks(blind)} do not see what rank 0 wrote into {findings.folder}.",
            "Checkpoints need a file system that all ranks share: set --folder, and "
            "default_root_dir in training.",
        )


def _machine_problems(findings: Findings) -> Iterable[Problem]:
    ranks = findings.ranks
    for node_ranks in _by_node(ranks):
        devices = max(len(rank.devices) for rank in node_ranks)
        cpus = max(rank.cpus for rank in node_ranks)
        num_ranks = len(node_ranks)
        host = node_ranks[0].host
        # A rank that was bound to one GPU or CPU sees only this one: ranks that see the same ones
        # share them.
        if devices and num_ranks > sum(len(rank.devices) for rank in node_ranks):
            yield Problem(
                "error", f"{host} has {num_ranks} ranks and {devices} GPUs.", "Start one per GPU."
            )
        if cpus < num_ranks and all(rank.cpus == cpus for rank in node_ranks):
            yield Problem(
                "warning",
                f"{host} has {num_ranks} ranks on {cpus} CPUs.",
                "Ask for more: --cpus-per-task.",
            )
    needed = HostNeeds(
        len(ranks), 1, "nccl" if all(rank.devices for rank in ranks) else "gloo"
    ).open_files
    lowest = min(rank.open_files for rank in ranks)
    minimum = needed if lowest < needed else MIN_OPEN_FILES
    if lowest < minimum:
        is_fatal = lowest < needed
        user = "Ranks connect to each other" if is_fatal else "Workers of dataloaders need many"
        yield Problem(
            "error" if is_fatal else "warning",
            f"{_list_ranks(rank for rank in ranks if rank.open_files < minimum)} may have "
            f"{lowest} files open.",
            f"{user}: ulimit -n {minimum}.",
        )
    full = [rank for rank in ranks if rank.shared_memory_bytes < MIN_SHARED_MEMORY_BYTES]
    if full:
        lowest = min(rank.shared_memory_bytes for rank in full)
        yield Problem(
            "warning",
            f"{_list_ranks(full)} have {decimal(lowest)} free in {SHARED_MEMORY}.",
            "Workers of dataloaders put batches there: enlarge it (docker run --shm-size), or use "
            "num_workers=0.",
        )


def _link_problems(findings: Findings) -> Iterable[Problem]:
    for link in findings.links:
        if link.across_nodes and link.bytes_per_second < MIN_CROSS_NODE_SPEED:
            first_rank = findings.ranks[link.first]
            second_rank = findings.ranks[link.second]
            description = (
                f"{_format_speed(link)} between {first_rank.host} and {second_rank.host}, less "
                "than a gigabit link."
            )
            yield Problem(
                "warning",
                description,
                "Set GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME, to the fast network.",
            )


def as_json(findings: Findings, problems: list[Problem]) -> dict[str, Any]:
    """Return findings and problems in JSON's types."""
    return {**asdict(findings), "problems": list(map(asdict, problems))}


def print_diagnosis(findings: Findings, problems: list[Problem], console: Console) -> None:
    """Print the ranks by node, the links, and the problems."""
    total = f"{quantity(len(findings.ranks), 'rank')} on {quantity(findings.num_nodes, 'node')}"
    console.print(f"{total}, started by {findings.started_by}")
    console.print(f"with {findings.ranks[0].versions}, Python {findings.ranks[0].python}")
    headings = ("node", "ranks", "GPUs", "CPUs", "memory", "open files", SHARED_MEMORY)
    table = text_table(headings, ["node", "ranks"], box=None, pad_edge=False, header_style="bold")
    for node_ranks in _by_node(findings.ranks):
        first_rank = node_ranks[0]
        table.add_row(
            first_rank.host,
            format_ranks([rank.rank for rank in node_ranks]),
            str(max(len(rank.devices) for rank in node_ranks)),
            str(first_rank.cpus),
            decimal(first_rank.memory_bytes),
            str(min(rank.open_files for rank in node_ranks)),
            decimal(first_rank.shared_memory_bytes),
        )
    console.print(table)
    for across in (False, True):
        links = [link for link in findings.links if link.across_nodes == across]
        if links:
            console.print(_describe_slowest(links, across))
    for problem in problems:
        console.print(f"{problem.kind}: {problem.description} {problem.advice}")
    if not problems:
        console.print("No problems found.")


def _describe_slowest(links: list[Link], across: bool) -> str:
    slowest = min(links, key=lambda link: link.bytes_per_second)
    latency = max(link.latency_seconds for link in links)
    place = "across nodes" if across else "within a node"
    return (
        f"{place}: at least {_format_speed(slowest)} (ranks {slowest.first} and {slowest.second}), "
        f"at most {latency * 1e6:.0f} us, by gloo, {quantity(len(links), 'link')} measured"
    )


def _format_speed(link: Link) -> str:
    return f"{decimal(int(link.bytes_per_second))}/s"


def _list_ranks(ranks: Iterable[Rank]) -> str:
    return shortened([f"rank {rank.rank} on {rank.host}" for rank in ranks], 4)
