"""The bandwidths that the planner assumes: configured, measured, or torchrec's defaults."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torchrec.distributed.planner import constants

from lightning_distrec._compat.gloo import tables_dist
from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.option_values import as_options, plain_fields
from lightning_distrec.ranks import Ranks
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.units import format_bandwidth, parse_bandwidth

MEASURE = "measure"
VARIABLES = {"intra_node": "INTRA_NODE_BANDWIDTH", "cross_node": "CROSS_NODE_BANDWIDTH"}
MILLISECONDS = 1000
"""torchrec counts bytes per millisecond, we count bytes per second."""
SLOWEST = {"intra_node": 1e9, "cross_node": 100e6}
"""Less is no bandwidth of nodes that train together: a variable without a unit is per millisecond
then, as TorchEasyRec reads it, whose usual numbers are 644e6 and 13e6."""
DEFAULTS = {
    "intra_node": constants.INTRA_NODE_BANDWIDTH * MILLISECONDS,
    "cross_node": constants.CROSS_NODE_BANDWIDTH * MILLISECONDS,
    "device_memory": constants.HBM_MEM_BW * MILLISECONDS,
    "host_memory": constants.DDR_MEM_BW * MILLISECONDS,
    "host_to_device": constants.HBM_TO_DDR_MEM_BW * MILLISECONDS,
}
"""torchrec's own, in bytes per second."""
OF_GLOO = 1e9
"""What a rank sends by gloo in a second, to other processes or over 10 Gbit/s: one thread copies
to sockets and sums. torchrec's defaults are those of GPUs' links."""

MIN_BYTES = 64 * 2**10
MAX_BYTES = 64 * 2**20
GROWTH = 4
"""What a rank sends in one exchange: more and more, until that takes long enough."""
LONG_ENOUGH_SECONDS = 0.05
MIN_COPIES = 3
"""Of which one may be slow because of other programs on the machine, however long they take."""
REPEATS = 5
BUDGET_SECONDS = 0.8
"""For the repeats of one bandwidth; a slow link gets fewer of them."""
COPIED_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """How fast bytes move: "25GB/s", "200Gbit/s", a number of bytes per second, or "measure".

    None takes INTRA_NODE_BANDWIDTH or CROSS_NODE_BANDWIDTH where they are set, or else TorchRec's
    default, on CPUs gloo's. Of the two variables, numbers below 1 GB/s and 100 MB/s are bytes per
    millisecond.
    """

    intra_node: str | float | None = None
    """What one rank sends to the others on its node, all ranks sending at once; by default 600
    GiB/s, on CPUs 1 GB/s."""

    cross_node: str | float | None = None
    """What one rank sends to ranks on other nodes, all ranks sending at once; 12.5 GiB/s, on CPUs
    1 GB/s."""

    device_memory: str | float | None = None
    """What a GPU reads and writes in its own memory; 897 GiB/s."""

    host_memory: str | float | None = None
    """What a rank reads and writes in its host's memory; 51 GiB/s."""

    host_to_device: str | float | None = None
    """What a GPU reads from its host's memory; 32 GiB/s."""

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in NAMES:
            value = getattr(self, name)
            # Parsed for its errors only, so that a wrong value fails when the strategy is made and
            # not on the ranks.
            if value not in (None, MEASURE):
                parse_bandwidth(value, f"planning.bandwidths.{name}={value!r}")


BandwidthOption = Bandwidths | dict[str, Any] | Literal["measure"] | None
NAMES = tuple(field.name for field in fields(Bandwidths))


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """A bandwidth, and where it comes from."""

    bytes_per_second: float
    origin: str

    @property
    def bytes_per_millisecond(self) -> float:
        """As torchrec counts."""
        return self.bytes_per_second / MILLISECONDS


@dataclass(frozen=True, kw_only=True)
class AssumedBandwidths:
    """The bandwidths to plan with."""

    intra_node: Bandwidth
    cross_node: Bandwidth
    device_memory: Bandwidth
    host_memory: Bandwidth
    host_to_device: Bandwidth

    def in_words(self, names: Sequence[str]) -> str:
        """Return some of them with their origins: those of one origin stand together."""
        texts_by_origin: dict[str, list[str]] = {}
        for name in names:
            bandwidth: Bandwidth = getattr(self, name)
            text = f"{name} {format_bandwidth(bandwidth.bytes_per_second)}"
            texts_by_origin.setdefault(bandwidth.origin, []).append(text)
        return ", ".join(
            f"{', '.join(texts)} ({origin})" for origin, texts in texts_by_origin.items()
        )


@dataclass(frozen=True)
class BandwidthRequest:
    """What is configured, and what is to be measured."""

    configured: Mapping[str, Bandwidth]
    to_measure: tuple[str, ...] = ()

    def with_measured(self, measured: Mapping[str, Bandwidth], device: str) -> AssumedBandwidths:
        """Return the bandwidths to plan with; defaults for the type of `device` where none is
        configured or could be measured."""
        defaults = {}
        for name, default in DEFAULTS.items():
            defaults[name] = Bandwidth(bytes_per_second=default, origin="torchrec's default")
        if device == "cpu":
            gloo = Bandwidth(bytes_per_second=OF_GLOO, origin="assumed of gloo")
            defaults |= dict.fromkeys(VARIABLES, gloo)
        # The later of these dicts wins: configured values over measured ones, and those over the
        # defaults.
        return AssumedBandwidths(**(defaults | dict(measured) | dict(self.configured)))


def bandwidth_request(option: BandwidthOption, environment: Mapping[str, str]) -> BandwidthRequest:
    """Return what the argument says, or else the environment, and what is to be measured.

    "measure" for all measures what neither says; for one value it stands above the environment.
    Raises ConfigError: a variable is no bandwidth.
    """
    argument = as_bandwidths(option)
    configured: dict[str, Bandwidth] = {}
    to_measure = []
    for name in NAMES:
        value = getattr(argument, name)
        variable = VARIABLES.get(name, "")
        text = environment.get(variable, "").strip()
        if value == MEASURE:
            to_measure.append(name)
        elif value is not None:
            number = parse_bandwidth(value, f"planning.bandwidths.{name}={value!r}")
            configured[name] = Bandwidth(bytes_per_second=number, origin="argument")
        elif text:
            configured[name] = _read_variable(name, variable, text)
        elif option == MEASURE:
            to_measure.append(name)
    return BandwidthRequest(configured, tuple(to_measure))


def _read_variable(name: str, variable: str, text: str) -> Bandwidth:
    number = parse_bandwidth(text, f"the environment's {variable}={text!r}")
    # Only a number without a unit is ambiguous.
    if number < SLOWEST[name] and not text.upper().endswith(("B/S", "BIT/S")):
        origin = f"environment {variable}={text}, read as bytes per millisecond"
        return Bandwidth(bytes_per_second=number * MILLISECONDS, origin=origin)
    return Bandwidth(bytes_per_second=number, origin=f"environment {variable}")


def as_bandwidths(option: BandwidthOption) -> Bandwidths:
    """Return the bandwidths that the argument names one by one. Raises ConfigError: these cannot be
    bandwidths."""
    if option is None or option == MEASURE:
        return Bandwidths()
    if isinstance(option, str):
        near = did_you_mean(option, (MEASURE,))
        raise ConfigError(
            f"planning.bandwidths={option!r} is not known{near} Set 'measure', or some of "
            f"{', '.join(NAMES)}."
        )
    return as_options("planning.bandwidths", Bandwidths, option)


# -------------------------------------------------------------------------------------- measurement


def measured_bandwidths(
    names: Sequence[str], layout: NodeLayout, device: torch.device, ranks: Ranks
) -> dict[str, Bandwidth]:
    """Collective. Return those of `names` that these ranks have: equal on all, of the slowest rank.

    Left out: cross_node on one node, intra_node where no node has two ranks, a GPU's memory on CPU.
    """
    # The layout and the kind of device are equal on all ranks, so that all of them return here or
    # none:
    # what follows is collective.
    names = [name for name in names if name in _measurable(layout, device)]
    return {
        name: Bandwidth(bytes_per_second=_measure(name, layout, device, ranks), origin="measured")
        for name in names
    }


def _measurable(layout: NodeLayout, device: torch.device) -> set[str]:
    names = {"host_memory"}
    if device.type == "cuda":
        names |= {"device_memory", "host_to_device"}
    if layout.ranks_on_node > 1:
        names.add("intra_node")
    if layout.num_nodes > 1:
        names.add("cross_node")
    return names


def _measure(name: str, layout: NodeLayout, device: torch.device, ranks: Ranks) -> float:
    """Collective. Return the bytes per second of one of them."""
    if name in ("intra_node", "cross_node"):
        peers_of = (
            layout.ranks_on_same_node if name == "intra_node" else layout.ranks_on_other_nodes
        )
        return _measure_exchange(list(map(peers_of, range(layout.num_ranks))), device, ranks)
    # A barrier: ranks of a node share its memory, so that they must copy at the same time.
    ranks.all_gather(None)
    seconds, moved = ranks.all_or_none("measuring memory", partial(_measure_copies, name, device))
    # One number describes all ranks. The slowest rank's is taken, because exchanges of the plan
    # wait for it.
    return moved / max(ranks.all_gather(seconds))


def _measure_exchange(peers_by_rank: list[list[int]], device: torch.device, ranks: Ranks) -> float:
    """Collective. Return what the rank with most peers sends in a second, all ranks sending as much
    to each peer."""
    max_peers = max(map(len, peers_by_rank))
    peers = peers_by_rank[ranks.rank]
    total = MIN_BYTES
    # `_timed` returns the same seconds on all ranks, so that all leave this loop after the same
    # round:
    # its calls are collective.
    while True:
        bytes_per_peer = max(1, total // max_peers)
        # The buffers are allocated before the exchange: where one rank has no memory for them, the
        # others would wait in it.
        exchange = ranks.all_or_none(
            "measuring exchanges", partial(_exchange, bytes_per_peer, peers, device, ranks)
        )
        # Not counted: the first exchange makes the connections.
        _timed(exchange, device, ranks)
        seconds = _timed(exchange, device, ranks)
        if seconds >= LONG_ENOUGH_SECONDS or total >= MAX_BYTES:
            break
        total *= GROWTH
    times = [seconds]
    while len(times) < REPEATS and sum(times) + seconds < BUDGET_SECONDS:
        times.append(_timed(exchange, device, ranks))
    # The least time counts: other work on the machines only adds to it.
    return bytes_per_peer * max_peers / min(times)


def _exchange(
    bytes_per_peer: int, peers: list[int], device: torch.device, ranks: Ranks
) -> Callable[[], object]:
    """Return a function that sends `bytes_per_peer` bytes to each peer, and receives as many."""
    # all_to_all_single takes sizes for all ranks, and ranks that are no peers get nothing: one
    # group does for both kinds of links.
    sizes = [bytes_per_peer if rank in peers else 0 for rank in range(ranks.num_ranks)]
    sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    return partial(tables_dist.all_to_all_single, torch.empty_like(sent), sent, sizes, sizes)


def _timed(exchange: Callable[[], object], device: torch.device, ranks: Ranks) -> float:
    """Collective. Return how many seconds the slowest rank needs; equal on all."""
    ranks.all_gather(None)
    began = time.perf_counter()
    # Between a barrier and the largest time: a rank that comes late would be counted as a slow
    # link.
    exchange()
    _wait_for(device)
    return float(max(ranks.all_gather(time.perf_counter() - began)))


def _measure_copies(name: str, device: torch.device) -> tuple[float, int]:
    """Return the least seconds of a copy, and the bytes that it moves: those read and those
    written."""
    host = torch.device("cpu")
    source_device = device if name == "device_memory" else host
    target_device = host if name == "host_memory" else device
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=source_device)
    if name == "host_to_device":
        # CUDA copies pageable memory through a buffer of its own, which would measure the host and
        # not the link.
        source = source.pin_memory()
    target = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=target_device)
    times: list[float] = []
    while len(times) < MIN_COPIES or (len(times) <= REPEATS and sum(times) < BUDGET_SECONDS):
        began = time.perf_counter()
        target.copy_(source)
        _wait_for(target_device)
        times.append(time.perf_counter() - began)
    # One memory reads and writes each byte; over a link between two memories each byte moves once.
    moved = COPIED_BYTES if name == "host_to_device" else 2 * COPIED_BYTES
    return min(times), moved


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
