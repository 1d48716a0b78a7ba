"""Groups of ranks over the process group called nccl, on CUDA devices in host memory."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_distrec._compat.torch_distributed import split_ranks
from tests.support.host_cuda.runs import device_ranks
from tests.support.ranks import rank_and_num_ranks

SETS = ([[0, 1], [2, 3]], [[0, 2], [1, 3]])


def _make_groups() -> tuple[int, list[float]]:
    """Return how often NCCL's communicator was split, and the sum of ranks in each group of this
    rank."""
    import host_nccl

    rank, _ = rank_and_num_ranks()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    before, sums = host_nccl.counts["splits"], []
    for members in SETS:
        total = torch.tensor(float(rank), device=device)
        dist.all_reduce(total, group=split_ranks(members, timedelta(seconds=60)))
        sums.append(total.item())
    dist.destroy_process_group()
    return host_nccl.counts["splits"] - before, sums


@pytest.mark.slow
def test_a_set_of_groups_takes_one_split_of_nccls_communicator() -> None:
    with device_ranks(4) as ranks:
        results = ranks.call(_make_groups)
    assert [seen.error for seen in results] == [""] * 4
    expected = [
        [float(sum(next(group for group in members if rank in group))) for members in SETS]
        for rank in range(4)
    ]
    assert [seen.result for seen in results] == [(2, sums) for sums in expected]
