"""Ids on a GPU are compared with their tables' rows on the device, and the result is read with all else at once."""

from unittest.mock import patch

import pytest
import torch
from torchrec import KeyedJaggedTensor

from lightning_distrec import gpu
from lightning_distrec.errors import IdsError
from lightning_distrec.sharding.calls import NO_IDS, check_batch
from tests.support.host_cuda.following import followed_device

LIMITS = {"a": 10, "b": 100}


def features(*ids: int, lengths: tuple[int, ...] = (1, 2, 0, 3)) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b", "c"][: len(lengths) // 2], values=torch.tensor(ids), lengths=torch.tensor(lengths)
    )


@pytest.mark.parametrize(
    ("ids", "actual"),
    [
        ((0, 9, 5, 10, 99, 50), NO_IDS),
        ((0, 10, 5, 10, 99, 50), (0, 99)),
        ((0, 9, 5, 10, 100, 50), (0, 100)),
        ((0, -1, 5, 10, 99, 50), (-1, 99)),
        ((0, 9, 5, -1, 99, 50), (-1, 99)),
    ],
)
def test_extreme_ids_are_told_where_one_is_out_of_range(ids: tuple[int, ...], actual: tuple[int, int]) -> None:
    with patch.object(gpu, "is_on_gpu", lambda tensor: True):
        assert check_batch("it", features(*ids), None, LIMITS) == actual
    assert check_batch("it", features(*ids), None, LIMITS) == (min(ids), max(ids)), "a CPU reads them at once"


def test_features_that_no_table_knows_have_no_limit() -> None:
    with patch.object(gpu, "is_on_gpu", lambda tensor: True):
        assert check_batch("it", features(1, 1, 2**40, lengths=(1, 0, 1, 0, 1, 0)), None, LIMITS) == NO_IDS


def test_lengths_that_do_not_add_up_are_an_error_all_the_same() -> None:
    with patch.object(gpu, "is_on_gpu", lambda tensor: True), pytest.raises(IdsError, match="its lengths add up to 3"):
        check_batch("it", features(1, 2, 3, 4, 5, lengths=(1, 0, 2, 0)), None, LIMITS)


@pytest.mark.host_cuda
def test_the_host_waits_once() -> None:
    batches = [features(0, 9, 5, 10, 99, 50).to(torch.device("cuda")) for _ in range(2)]
    check_batch("it", batches[0], None, LIMITS)
    with followed_device() as found:
        check_batch("it", batches[1], None, LIMITS)
    assert len(found.waits) == 1, found.waits


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((0, 2, 20), "it has 5 ids, but its offsets end with 20. Each id must belong to one bag"),
        ((0, 9, 5), "it has a bag of -4 ids. Offsets must never fall, nor lie beyond the 5 ids"),
    ],
)
def test_offsets_beyond_the_ids_are_an_error_about_offsets(offsets: tuple[int, ...], message: str) -> None:
    batch = KeyedJaggedTensor(keys=["a"], values=torch.arange(5), offsets=torch.tensor(offsets))
    with pytest.raises(IdsError, match=message):
        check_batch("it", batch, None, LIMITS)
