"""Ids on a GPU are compared with their tables' rows on the device, and the result is read with all
else at once."""

from unittest.mock import patch

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_distrec.errors import IdsError
from lightning_distrec.gpu import HostCopy
from lightning_distrec.sharding.calls import NO_IDS, begin_check, check_batch
from tests.support.host_cuda.following import followed_device

LIMITS = {"a": 10, "b": 100}


def features(
    *ids: int, lengths: tuple[int, ...] = (1, 2, 0, 3), device: str = "cuda"
) -> KeyedJaggedTensor:
    keys = ["a", "b", "c"][: len(lengths) // 2]
    values, bags = torch.tensor(ids, device=device), torch.tensor(lengths, device=device)
    return KeyedJaggedTensor(keys=keys, values=values, lengths=bags)


@pytest.mark.host_cuda
@pytest.mark.parametrize(
    ("ids", "actual"),
    [
        ((0, 9, 5, 10, 99, 50), NO_IDS),
        ((0, 9, 5, 10, 100, 50), (0, 100)),
        ((0, 9, 5, -1, 99, 50), (-1, 99)),
    ],
)
def test_extreme_ids_are_told_where_one_is_out_of_range(
    ids: tuple[int, ...], actual: tuple[int, int]
) -> None:
    assert check_batch("it", features(*ids), None, LIMITS) == actual
    on_cpu = features(*ids, device="cpu")
    assert check_batch("it", on_cpu, None, LIMITS) == (min(ids), max(ids)), (
        "a CPU reads them at once"
    )


@pytest.mark.host_cuda
def test_the_host_waits_once() -> None:
    # limits are copied to the device once
    check_batch("it", features(0, 9, 5, 10, 99, 50), None, LIMITS)
    batch = features(0, 9, 5, 10, 99, 50)
    with (
        followed_device() as found,
        patch.object(HostCopy, "read", autospec=True, side_effect=HostCopy.read) as read,
    ):
        end_check = begin_check("it", batch, None, LIMITS)
        assert not read.called, "the batch may still be copied"
        assert end_check() == NO_IDS
    assert read.call_count == 1
    assert not found.waits, "for an event only"


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((0, 2, 20), "it has 5 ids, but its offsets end with 20. Each id must belong to one bag"),
        ((0, 9, 5), "it has a bag of -4 ids. Offsets must never fall, nor lie beyond the 5 ids"),
    ],
)
def test_offsets_beyond_the_ids_are_an_error_about_offsets(
    offsets: tuple[int, ...], message: str
) -> None:
    batch = KeyedJaggedTensor(keys=["a"], values=torch.arange(5), offsets=torch.tensor(offsets))
    with pytest.raises(IdsError, match=message):
        check_batch("it", batch, None, LIMITS)
