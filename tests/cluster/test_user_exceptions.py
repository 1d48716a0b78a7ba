"""An exception in user code of one rank: the other ranks end within seconds and name it."""

import re
import time
from pathlib import Path

import pytest

from tests.support.hooks_that_raise import FAULTY, HOOKS, SAID, fit
from tests.support.ranks import RankFailed, run_on_ranks

pytestmark = pytest.mark.slow

NUM_RANKS = 3


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_a_hook_of_one_rank_is_named_on_all(tmp_path: Path, hook: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(fit, NUM_RANKS, hook, str(tmp_path))
    print(f"{hook}: {time.monotonic() - began:.1f} s")
    parts = re.split(r"^--- rank (\d+) ", str(failed.value), flags=re.MULTILINE)[1:]
    raised = {int(rank): words for rank, words in zip(parts[::2], parts[1::2], strict=True)}
    assert raised.keys() == set(range(NUM_RANKS))
    assert "was not done" not in str(failed.value)
    for rank, words in raised.items():
        said = words + (tmp_path / f"{rank}.out").read_text()
        expected = f"ValueError: {SAID}" if rank == FAULTY else rf"rank {FAULTY} failed"
        assert re.search(expected, said), said[-2000:]
