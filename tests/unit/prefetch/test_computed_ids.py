"""What was computed ahead is compared late where the host cannot wait; operations of torch are
watched as expected."""

import pytest
import torch

from lightning_distrec.errors import ProvenanceError
from lightning_distrec.prefetch.control_message import LateComparison


def test_a_difference_is_raised_in_a_later_step() -> None:
    compared, ids = LateComparison(), torch.arange(5)
    assert compared.is_empty
    assert compared.add(ids, ids.clone())
    compared.end_step()
    compared.check()
    compared.add(ids, ids.clone())
    compared.add(ids, ids + 1)
    compared.check()
    compared.end_step()
    with pytest.raises(ProvenanceError, match="in an earlier step.*'computed_ids': False"):
        compared.check()
    compared.check()


def test_the_last_step_is_waited_for() -> None:
    compared, ids = LateComparison(), torch.arange(5)
    compared.add(ids, ids + 1)
    with pytest.raises(ProvenanceError, match="resume from a checkpoint"):
        compared.check(wait=True)
