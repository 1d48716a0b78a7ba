"""The problems in the doctor's findings, and what to do about them."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from lightning_distrec.cluster.doctor import SHARED_MEMORY, Findings, Link, Rank
from lightning_distrec.units import format_ranks, quantity, shortened

MIN_OPEN_FILES = 4096
MIN_SHARED_MEMORY_BYTES = 1 << 30
MAX_SKEW_SECONDS = 1.0
MIN_CROSS_NODE_SPEED = 125e6
"""In bytes per second: a gigabit link."""


@dataclass(frozen=True)
class Problem:
    """Something that stops the job, or slows it down."""

    kind: Literal["error", "warning"]
    what: str
    advice: str


def problems_of(found: Findings) -> list[Problem]:
    """Return the problems, errors first."""
    problems = [*_on_versions(found.ranks), *_on_folder(found), *_on_machines(found), *_on_links(found)]
    return sorted(problems, key=lambda problem: problem.kind)


def _on_versions(ranks: tuple[Rank, ...]) -> Iterable[Problem]:
    for problem in dict.fromkeys(rank.versions_problem for rank in ranks if rank.versions_problem):
        affected = _named(rank for rank in ranks if rank.versions_problem == problem)
        yield Problem("error", f"{affected}: {problem}", "Install matching versions: docs/installing.md.")
    versions = {(rank.versions, rank.python.rpartition(".")[0]) for rank in ranks}
    if len(versions) > 1:
        different = "; ".join(sorted(f"{having}, Python {python}" for having, python in versions))
        yield Problem("error", f"ranks have different versions: {different}.", "Use one environment on all nodes.")


def _on_folder(found: Findings) -> Iterable[Problem]:
    if blind := [rank for rank in found.ranks if not rank.sees_folder]:
        yield Problem(
            "error",
            f"{_named(blind)} do not see what rank 0 wrote into {found.folder}.",
            "Checkpoints need a file system that all ranks share: pass a folder on it as --folder here, and as "
            "default_root_dir in training.",
        )


def _on_machines(found: Findings) -> Iterable[Problem]:
    ranks = found.ranks
    for node in sorted({rank.node for rank in ranks}):
        here = [rank for rank in ranks if rank.node == node]
        devices, cpus = max(len(rank.devices) for rank in here), max(rank.cpus for rank in here)
        if devices and len(here) > sum(len(rank.devices) for rank in here):
            yield Problem("error", f"{here[0].host} has {len(here)} ranks and {devices} GPUs.", "Start one per GPU.")
        if cpus < len(here) and all(rank.cpus == cpus for rank in here):
            yield Problem(
                "warning", f"{here[0].host} has {len(here)} ranks on {cpus} CPUs.", "Ask for more: --cpus-per-task."
            )
    if few := [rank for rank in ranks if rank.open_files < MIN_OPEN_FILES]:
        lowest = min(rank.open_files for rank in few)
        yield Problem(
            "warning",
            f"{_named(few)} may have {lowest} files open.",
            f"Workers of dataloaders need many: ulimit -n {MIN_OPEN_FILES}.",
        )
    if full := [rank for rank in ranks if rank.shared_memory_bytes < MIN_SHARED_MEMORY_BYTES]:
        lowest = min(rank.shared_memory_bytes for rank in full)
        yield Problem(
            "warning",
            f"{_named(full)} have {decimal(lowest)} free in {SHARED_MEMORY}.",
            "Workers of dataloaders put batches there: enlarge it (docker run --shm-size), or use num_workers=0.",
        )
    skew = min(max(at) - min(at) for at in zip(*(rank.clocks for rank in ranks), strict=True))
    if skew > MAX_SKEW_SECONDS:
        yield Problem(
            "warning",
            f"clocks differ by {skew:.1f} s.",
            "Times in logs will not match: check the time service (chrony, ntpd).",
        )


def _on_links(found: Findings) -> Iterable[Problem]:
    for link in found.links:
        if link.across_nodes and link.bytes_per_second < MIN_CROSS_NODE_SPEED:
            one, other = found.ranks[link.one], found.ranks[link.other]
            yield Problem(
                "warning",
                f"{_speed(link)} between {one.host} and {other.host}, less than a gigabit link.",
                "Exchanges will take most of the time: set GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME, to the fast "
                "network.",
            )


def as_json(found: Findings, problems: list[Problem]) -> dict[str, Any]:
    """Return findings and problems in JSON's types."""
    return {**asdict(found), "problems": [asdict(problem) for problem in problems]}


def print_diagnosis(found: Findings, problems: list[Problem], console: Console) -> None:
    """Print the ranks by node, the links, and the problems."""
    total = f"{quantity(len(found.ranks), 'rank')} on {quantity(found.num_nodes, 'node')}"
    console.print(f"{total}, started by {found.started_by}")
    console.print(f"with {found.ranks[0].versions}, Python {found.ranks[0].python}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("node", "ranks", "GPUs", "CPUs", "memory", "open files", SHARED_MEMORY):
        table.add_column(heading, justify="left" if heading in ("node", "ranks") else "right")
    for node in sorted({rank.node for rank in found.ranks}):
        here = [rank for rank in found.ranks if rank.node == node]
        one = here[0]
        table.add_row(
            one.host,
            format_ranks([rank.rank for rank in here]),
            str(max(len(rank.devices) for rank in here)),
            str(one.cpus),
            decimal(one.memory_bytes),
            str(min(rank.open_files for rank in here)),
            decimal(one.shared_memory_bytes),
        )
    console.print(table)
    for across in (False, True):
        if links := [link for link in found.links if link.across_nodes == across]:
            console.print(_slowest_in_words(links, across))
    for problem in problems:
        console.print(f"{problem.kind}: {problem.what} {problem.advice}")
    if not problems:
        console.print("No problems found.")


def _slowest_in_words(links: list[Link], across: bool) -> str:
    slowest = min(links, key=lambda link: link.bytes_per_second)
    latency = max(link.latency_seconds for link in links)
    where = "across nodes" if across else "within a node"
    return (
        f"{where}: at least {_speed(slowest)} (ranks {slowest.one} and {slowest.other}), at most "
        f"{latency * 1e6:.0f} us, by gloo, {quantity(len(links), 'link')} measured"
    )


def _speed(link: Link) -> str:
    return f"{decimal(int(link.bytes_per_second))}/s"


def _named(ranks: Iterable[Rank]) -> str:
    return shortened([f"rank {rank.rank} on {rank.host}" for rank in ranks], 4)
