"""Programs with losses over an item table, drawn from a seed, have the numbers of one process."""

import pytest

from tests.support.ranks import run_each_on_ranks
from tests.support.retrieval_programs import assert_as_one_process, draw_program, run


@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    [
        (1, range(4)),
        pytest.param(2, range(10), marks=pytest.mark.slow),
        (3, range(8)),
        pytest.param(2, range(100, 140), marks=pytest.mark.slow),
        pytest.param(3, range(100, 140), marks=pytest.mark.slow),
    ],
)
def test_programs_have_the_numbers_of_one_process(num_ranks: int, seeds: range) -> None:
    programs = {str(seed): draw_program(seed, num_ranks) for seed in seeds}
    calls = {seed: (run, program) for seed, program in programs.items()}
    actual = run_each_on_ranks(calls, num_ranks)
    for seed, program in programs.items():
        losses = [results[seed]["losses"] for results in actual]
        assert_as_one_process(seed, program, actual[0][seed]["state"], losses)
