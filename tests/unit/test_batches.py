"""What is in a batch, by name; and what its fingerprint depends on."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_distrec.batches import SAMPLED_ELEMENTS, fingerprint
from lightning_distrec.strategies.run.rank_comparisons import describe_same_data


@dataclass
class Batch:
    """A user's batch."""

    features: KeyedJaggedTensor
    item: Tensor
    score: Tensor


def _batch(first: int = 3, score: float = 1.0) -> Batch:
    lengths = torch.tensor([1, 0, 2, 1])
    features = KeyedJaggedTensor(["user", "shop"], torch.tensor([first, 9, 8, 7]), lengths=lengths)
    return Batch(features, torch.tensor([[5, 2], [4, 6]]), torch.tensor([score, 2.0]))


@pytest.mark.parametrize(
    ("other", "is_equal"),
    [
        (_batch(), True),
        (_batch(first=4), False),
        (_batch(score=1.5), False),
        (torch.ones(2), False),
        ({"text": "no tensors"}, False),
    ],
)
def test_a_fingerprint_is_equal_where_all_tensors_are(other: object, is_equal: bool) -> None:
    assert (fingerprint(other) == fingerprint(_batch())) == is_equal


def test_shapes_and_dtypes_count_and_ends_of_large_tensors_do_not() -> None:
    large = torch.zeros(SAMPLED_ELEMENTS + 1, dtype=torch.bfloat16)
    changed = large.clone()
    changed[-1] = 1
    assert fingerprint(large) == fingerprint(changed) != fingerprint(large[:-1])
    assert fingerprint(torch.zeros(2)) != fingerprint(torch.zeros(2, dtype=torch.int32))
    assert fingerprint({"text": "no tensors"}) == ""


def _report(reader: int, *batches: str) -> dict[str, object]:
    return {"reader": reader, "batches": batches}


@pytest.mark.parametrize(
    ("reports", "begin"),
    [
        ([_report(0, "x", "y"), _report(1, "x", "z")], ""),
        ([_report(0, "x", "y"), _report(0, "x", "y")], ""),
        ([_report(0, "", ""), _report(1, "", "")], ""),
        ([_report(rank, "x", "y") for rank in range(4)], "ranks 0-3 read the same data"),
        (
            [
                _report(0, "x", "y"),
                _report(1, "a", "b"),
                _report(2, "x", "y"),
                _report(3, "a", "b"),
            ],
            "ranks 0, 2; ranks 1, 3",
        ),
    ],
    ids=["one batch alike", "a pipeline", "no tensors", "all", "pairs"],
)
def test_ranks_with_equal_batches_are_named_unless_they_are_one_reader(
    reports: list, begin: str
) -> None:
    text = describe_same_data(reports, is_iterable=True)
    assert text.startswith(begin)
    assert bool(text) == bool(begin)
