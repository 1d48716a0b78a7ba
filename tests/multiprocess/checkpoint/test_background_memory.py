"""Checkpoints that are written in the background leave no memory behind."""

from pathlib import Path

import pytest

from tests.benchmarks.soak import growth, soak
from tests.support.ranks import run_on_ranks


@pytest.mark.slow
def test_a_process_does_not_grow_with_checkpoints_in_the_background(tmp_path: Path) -> None:
    (held,) = run_on_ranks(soak, 1, "background", str(tmp_path), 240, 4)
    early, late = growth(held)
    assert len(held) == 60
    assert late < 1.05 * early, [num_bytes >> 20 for num_bytes in held]
