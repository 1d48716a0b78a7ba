"""The bandwidths that the planner assumes: configured, measured and remembered, or torchrec's defaults."""

import hashlib
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torchrec.distributed.planner import constants

from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.ranks import Ranks
from lightning_distrec.sharding.node_layout import NodeLayout
from lightning_distrec.units import format_bandwidth, parse_bandwidth

MEASURE, REMEASURE = "measure", "remeasure"
VARIABLES = {"intra_node": "INTRA_NODE_BANDWIDTH", "cross_node": "CROSS_NODE_BANDWIDTH"}
MILLISECONDS = 1000
"""torchrec counts bytes per millisecond, we count bytes per second."""
DEFAULTS = {
    "intra_node": constants.INTRA_NODE_BANDWIDTH * MILLISECONDS,
    "cross_node": constants.CROSS_NODE_BANDWIDTH * MILLISECONDS,
    "device_memory": constants.HBM_MEM_BW * MILLISECONDS,
    "host_memory": constants.DDR_MEM_BW * MILLISECONDS,
    "host_to_device": constants.HBM_TO_DDR_MEM_BW * MILLISECONDS,
}
"""torchrec's own, in bytes per second."""


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """How fast bytes move: "25GB/s", "200Gbit/s", a number of bytes per second, or "measure"; None: see the docs."""

    intra_node: str | float | None = None
    """What one rank sends to the others on its node, all ranks sending at once."""

    cross_node: str | float | None = None
    """What one rank sends to ranks on other nodes, all ranks sending at once."""

    device_memory: str | float | None = None
    """What a GPU reads and writes in its own memory."""

    host_memory: str | float | None = None
    """What a rank reads and writes in its host's memory."""

    host_to_device: str | float | None = None
    """What a GPU reads from its host's memory."""

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if given is not None and given not in (MEASURE, REMEASURE):
                parse_bandwidth(given, f"planning.bandwidths.{field.name}={given!r}")


GivenBandwidths = Bandwidths | dict[str, Any] | Literal["measure", "remeasure"] | None
NAMES = tuple(field.name for field in fields(Bandwidths))


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """One of them."""

    bytes_per_second: float
    origin: str
    """Who says so, in words."""

    @property
    def bytes_per_millisecond(self) -> float:
        """As torchrec counts."""
        return self.bytes_per_second / MILLISECONDS


@dataclass(frozen=True, kw_only=True)
class ChosenBandwidths:
    """What the planner believes."""

    intra_node: Bandwidth
    cross_node: Bandwidth
    device_memory: Bandwidth
    host_memory: Bandwidth
    host_to_device: Bandwidth

    def in_words(self, names: tuple[str, ...]) -> str:
        """Return some of them with who says so: those of one origin stand together."""
        by_origin: dict[str, list[str]] = {}
        for name in names:
            one: Bandwidth = getattr(self, name)
            words = f"{name} {format_bandwidth(one.bytes_per_second)}"
            by_origin.setdefault(one.origin, []).append(words)
        return ", ".join(f"{', '.join(words)} ({origin})" for origin, words in by_origin.items())


@dataclass(frozen=True)
class Asked:
    """What is known before anything is measured, and what is to be measured."""

    known: Mapping[str, Bandwidth]
    wanted: tuple[str, ...] = ()
    afresh: bool = False
    """Whether an earlier measurement does not do."""
    bare: tuple[str, ...] = ()
    """Environment variables that are numbers without a unit."""

    def with_measured(self, measured: Mapping[str, Bandwidth]) -> ChosenBandwidths:
        """Return the bandwidths to plan with; torchrec's defaults where none is configured or could be measured."""
        default = {name: Bandwidth(bytes_per_second=DEFAULTS[name], origin="torchrec's default") for name in NAMES}
        return ChosenBandwidths(**(default | dict(measured) | dict(self.known)))


def check_bandwidths(given: GivenBandwidths) -> None:
    """Raise ConfigError where these cannot be bandwidths."""
    _as_bandwidths(given)


def asked_bandwidths(given: GivenBandwidths, environment: Mapping[str, str]) -> Asked:
    """Return what the argument says, or else the environment, and what is to be measured.

    "measure" for all measures what neither says; for one value it stands above the environment.
    Raises ConfigError: a variable is no bandwidth.
    """
    argument = _as_bandwidths(given)
    everywhere = given if isinstance(given, str) else None
    known: dict[str, Bandwidth] = {}
    wanted: dict[str, str] = {}
    bare = []
    for name in NAMES:
        value, variable = getattr(argument, name), VARIABLES.get(name, "")
        if value in (MEASURE, REMEASURE):
            wanted[name] = value
        elif value is not None:
            number = parse_bandwidth(value, f"planning.bandwidths.{name}={value!r}")
            known[name] = Bandwidth(bytes_per_second=number, origin="argument")
        elif text := environment.get(variable, "").strip():
            number = parse_bandwidth(text, f"the environment's {variable}={text!r}")
            known[name] = Bandwidth(bytes_per_second=number, origin=f"environment {variable}")
            if not text.endswith("/s"):
                bare.append(variable)
        elif everywhere is not None:
            wanted[name] = everywhere
    return Asked(known, tuple(wanted), REMEASURE in wanted.values(), tuple(bare))


def _as_bandwidths(given: GivenBandwidths) -> Bandwidths:
    if given is None or (isinstance(given, str) and given in (MEASURE, REMEASURE)):
        return Bandwidths()
    if isinstance(given, Bandwidths):
        return given
    if isinstance(given, str):
        near = did_you_mean(given, (MEASURE, REMEASURE))
        raise ConfigError(
            f"planning.bandwidths={given!r} is not known{near} Use 'measure', 'remeasure', or some of {_names()}."
        )
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"planning.bandwidths={given!r}: 'measure', 'remeasure' or a dict with some of {_names()} is needed."
        )
    for name in given:
        if name not in NAMES:
            near = did_you_mean(str(name), NAMES)
            raise ConfigError(f"planning.bandwidths: there is no bandwidth {name!r}{near} Use some of {_names()}.")
    return Bandwidths(**given)


def _names() -> str:
    return ", ".join(NAMES)


MIN_BYTES, MAX_BYTES, GROWTH = 64 * 2**10, 64 * 2**20, 4
"""What a rank sends in one exchange: more and more, until that takes long enough."""
LONG_ENOUGH_SECONDS = 0.05
MIN_COPIES = 3
"""Of which one may be slow for the sake of others on the machine, however long they take."""
REPEATS = 5
BUDGET_SECONDS = 0.8
"""For the repeats of one bandwidth; a slow link gets fewer of them."""
COPIED_BYTES = 64 * 2**20
MAX_AGE_DAYS = 30
"""Older measurements are made again."""
SECONDS_OF_DAY = 24 * 60 * 60


def measured_bandwidths(
    wanted: Sequence[str], places: NodeLayout, device: torch.device, ranks: Ranks, afresh: bool = False
) -> dict[str, Bandwidth]:
    """Collective. Return those of `wanted` that these ranks have: the same on all, of the slowest rank.

    wanted: names of `Bandwidths`. afresh: whether what was measured within 30 days does not do.
    Left out: cross_node on one node, intra_node where no node has two ranks, a GPU's memory on CPU.
    """
    names = [name for name in wanted if name in _measurable(places, device)]
    if not names:
        return {}
    key = _shape(places, device, ranks)
    found = {} if afresh or ranks.rank else _remembered(key)
    found = {name: one for name, one in ranks.all_gather(found)[0].items() if name in names}
    numbers = {name: _measure(name, places, device, ranks) for name in names if name not in found}
    if numbers and ranks.rank == 0:
        _remember(key, numbers)
    return found | {name: Bandwidth(bytes_per_second=number, origin="measured") for name, number in numbers.items()}


def _measurable(places: NodeLayout, device: torch.device) -> set[str]:
    names = {"host_memory"}
    if device.type == "cuda":
        names |= {"device_memory", "host_to_device"}
    if places.ranks_on_node > 1:
        names.add("intra_node")
    if places.num_nodes > 1:
        names.add("cross_node")
    return names


def _measure(name: str, places: NodeLayout, device: torch.device, ranks: Ranks) -> float:
    """Collective. Return the bytes per second of one of them."""
    if name == "intra_node":
        return _measure_exchange([places.ranks_on_same_node(rank) for rank in range(places.num_ranks)], device, ranks)
    if name == "cross_node":
        return _measure_exchange([places.ranks_on_other_nodes(rank) for rank in range(places.num_ranks)], device, ranks)
    ranks.all_gather(None)  # ranks of a node share its memory: they copy at the same time
    seconds, moved = ranks.all_or_none("measuring memory", partial(_measure_copies, name, device))
    return moved / max(ranks.all_gather(seconds))


def _measure_exchange(peers: list[list[int]], device: torch.device, ranks: Ranks) -> float:
    """Collective. Return what a rank sends in a second, when every rank sends as much to each of its peers.

    peers: of each rank. Where nodes are unequal, the number is that of the rank with most of them, for which all wait.
    """
    max_peers = max(map(len, peers))
    mine = peers[ranks.rank]
    total = MIN_BYTES
    while True:
        to_each = max(1, total // max_peers)
        exchange = ranks.all_or_none("measuring exchanges", partial(_exchange, to_each, mine, device, ranks))
        _timed(exchange, device, ranks)  # connections are made by the first
        seconds = _timed(exchange, device, ranks)
        if seconds >= LONG_ENOUGH_SECONDS or total >= MAX_BYTES:
            break
        total *= GROWTH
    times = [seconds]
    while len(times) < REPEATS and sum(times) + seconds < BUDGET_SECONDS:
        times.append(_timed(exchange, device, ranks))
    return to_each * max_peers / min(times)  # other work on the machines only adds time


def _exchange(to_each: int, peers: list[int], device: torch.device, ranks: Ranks) -> Callable[[], object]:
    """Return a function that sends `to_each` bytes to each peer, and receives as many."""
    sizes = [to_each if rank in peers else 0 for rank in range(ranks.num_ranks)]
    sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    return partial(dist.all_to_all_single, torch.empty_like(sent), sent, sizes, sizes)


def _timed(exchange: Callable[[], object], device: torch.device, ranks: Ranks) -> float:
    """Collective. Return how many seconds the slowest rank needs; the same number on all."""
    ranks.all_gather(None)
    began = time.perf_counter()
    exchange()
    _wait_for(device)
    return float(max(ranks.all_gather(time.perf_counter() - began)))


def _measure_copies(name: str, device: torch.device) -> tuple[float, int]:
    """Return the least seconds of a copy, and the bytes that it moves: those read and those written."""
    here = device if name == "device_memory" else torch.device("cpu")
    there = torch.device("cpu") if name == "host_memory" else device
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=here)
    if name == "host_to_device":
        source = source.pin_memory()
    target = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=there)
    times: list[float] = []
    while len(times) < MIN_COPIES or (len(times) <= REPEATS and sum(times) < BUDGET_SECONDS):
        began = time.perf_counter()
        target.copy_(source)
        _wait_for(there)
        times.append(time.perf_counter() - began)
    moved = COPIED_BYTES if name == "host_to_device" else 2 * COPIED_BYTES
    return min(times), moved


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _shape(places: NodeLayout, device: torch.device, ranks: Ranks) -> str:
    """Collective. Return what identifies this cluster: its hosts, ranks, devices and backend."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    gathered = ranks.all_gather((socket.gethostname(), kind, torch.get_num_threads()))
    hosts = sorted({host for host, _, _ in gathered})
    rest = [(kind, threads) for _, kind, threads in gathered]
    return json.dumps([hosts, places.node_of_rank, rest, dist.get_backend(), torch.__version__])


def cache_folder() -> Path:
    """Return where measurements are remembered. Raises RuntimeError: this user has no home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(folder) if os.path.isabs(folder) else Path.home() / ".cache") / "lightning_distrec"


def _file(key: str) -> Path:
    return cache_folder() / f"bandwidths-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(key: str) -> dict[str, tuple[float, float]]:
    """Return name -> bytes per second and when that was measured; what cannot be read, or not be true, is not there."""
    try:
        content = json.loads(_file(key).read_text("utf-8"))
        if content["cluster"] != key:
            return {}
        found = {str(name): (float(number), float(when)) for name, (number, when) in content["measured"].items()}
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {name: (number, when) for name, (number, when) in found.items() if math.isfinite(number) and number > 0}


def _remembered(key: str) -> dict[str, Bandwidth]:
    found = {}
    for name, (number, when) in _read(key).items():
        if 0 <= time.time() - when < MAX_AGE_DAYS * SECONDS_OF_DAY:
            on = datetime.fromtimestamp(when).strftime("%Y-%m-%d")
            found[name] = Bandwidth(bytes_per_second=number, origin=f"measured on {on}")
    return found


def _remember(key: str, numbers: dict[str, float]) -> None:
    """Add a measurement to those that are remembered of this cluster; the file is replaced atomically."""
    measured = _read(key) | {name: (number, time.time()) for name, number in numbers.items()}
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".bandwidths-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"cluster": key, "measured": measured}, file)
            os.replace(name, _file(key))
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, RuntimeError) as error:
        rank_zero_warn(f"measured bandwidths are not remembered for the next run: {error}")
