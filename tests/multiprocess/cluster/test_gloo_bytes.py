"""gloo sends what planning takes it to send, as the kernel counts what comes over its
connections."""

import os
import socket
import stat
import struct
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology

from lightning_distrec.sharding.planning.costs import make_links
from tests.support.ranks import run_on_warm_ranks

NUMBERS = 2**21
"""Float32 numbers that each rank keeps: eight MiB."""


def _received_bytes() -> int:
    """Return what has come over all TCP connections of this process."""
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    return sum(map(_received_by, filter(_is_socket, descriptors)))


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # closed by now
        return False


def _received_by(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in (
            socket.AF_INET,
            socket.AF_INET6,
        ):
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    return int(struct.unpack_from("Q", info, 128)[0])  # tcpi_bytes_received of linux/tcp.h


def _counted() -> dict[str, float]:
    """Return by collective what this rank received, in parts of what a rank keeps."""
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    shard, whole = torch.ones(NUMBERS), torch.ones(num_ranks * NUMBERS)
    other = torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_gather": lambda: dist.all_gather(list(other.chunk(num_ranks)), shard),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
    }
    counts = {}
    for name, call in calls.items():
        dist.barrier()
        bytes_at_start = _received_bytes()
        dist.barrier()  # nobody sends before all have looked
        call()
        counts[name] = (_received_bytes() - bytes_at_start) / shard.nbytes
    return counts


def test_a_reduce_scatter_sends_what_an_all_reduce_does() -> None:
    num_ranks = 3
    per_rank_counts = run_on_warm_ranks(_counted, num_ranks)
    sent_bytes = {
        name: sum(counted[name] for counted in per_rank_counts) for name in per_rank_counts[0]
    }
    once = num_ranks * (num_ranks - 1)
    assert sent_bytes["all_to_all"] == pytest.approx(once, rel=0.1)
    assert sent_bytes["all_gather"] == pytest.approx(once, rel=0.1)
    assert sent_bytes["all_reduce"] == pytest.approx(2 * once, rel=0.1)
    assert sent_bytes["reduce_scatter"] == pytest.approx(2 * once, rel=0.1)


@pytest.mark.parametrize(("device", "scatter_times"), [("cpu", 2), ("cuda", 1)])
def test_planning_takes_it_so(device: str, scatter_times: int) -> None:
    assert make_links(Topology(4, device)).scatter_times == scatter_times
