"""How long the ranks of a pipeline idle, where stages take equal times."""

import pytest

from lightning_distrec.pipeline.chain import StageOptions


def test_equal_stages_idle_as_the_formula_says() -> None:
    assert StageOptions(microbatches=4).idle_share(4, 4) == pytest.approx(3 / 7)
    interleaved = StageOptions(schedule="interleaved_1f1b", stages_per_rank=2, microbatches=8)
    assert interleaved.idle_share(2, 8) == pytest.approx(1 / 17)
