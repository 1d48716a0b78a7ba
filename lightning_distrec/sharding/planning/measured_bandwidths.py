"""How fast bytes move between these ranks, and inside of their memory, measured in a second or two and remembered."""

import hashlib
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_distrec.ranks import Ranks
from lightning_distrec.sharding.node_layout import NodeLayout
from lightning_distrec.sharding.planning.bandwidths import Bandwidth

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
