"""No stage of a large table's life takes a rank more than its share, but those that must hold the
whole table."""

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_distrec.errors import DistRecError
from tests.benchmarks.life_memory import COPIES, MIB, WHOLE, Life, measure
from tests.support.click_model import EvaluatedModel, rank_loader, seeded
from tests.support.ranks import run_on_warm_ranks
from tests.support.trainers import make_trainer


def _one_life() -> dict[str, Any]:
    """Return what a rank sees of a fit, of what it is asked for then, and of two evaluations."""
    model, trainer = seeded(EvaluatedModel, torch.optim.SGD, {"lr": 0.1}), make_trainer()
    trainer.fit(model, rank_loader(1, 0))
    seen: dict[str, Any] = {"refusals": [], "collections": []}
    with patch("lightning_distrec.host_memory._meminfo", return_value=0):
        for method in (trainer.strategy.full_state_dict, trainer.strategy.unshard):
            with pytest.raises(DistRecError) as refusal:
                method()
            seen["refusals"].append(str(refusal.value))
    gc.disable()
    state = trainer.strategy.full_state_dict()
    tables = [weakref.ref(value) for key, value in state.items() if "embedding" in key]
    del state
    seen["tables"] = [table() is not None for table in tables]
    gc.enable()
    with patch("lightning_distrec.strategies.torchrec_run.gc") as collector:
        for module in (model, seeded(EvaluatedModel, torch.optim.SGD, {"lr": 0.1})):
            trainer.validate(module, rank_loader(1, 0), verbose=False)
            seen["collections"].append(collector.collect.call_count)
    return seen


def test_full_tables_are_freed_and_a_host_without_memory_for_them_refuses_them() -> None:
    (seen,) = run_on_warm_ranks(_one_life, 1)
    assert seen["tables"] == [False] * 3, "freed with the state that has them"
    assert seen["collections"] == [0, 1], "a run looks for left shards where there are some"
    assert all("which has 0 free" in refusal for refusal in seen["refusals"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_table_of_two_gigabytes_lives_within_the_share_of_each_rank(tmp_path: Path) -> None:
    # below, a checkpoint is one file, for which rank 0 gathers the table
    stages = measure(Life(gib=2.0), tmp_path)
    peaks = {stage.name: max(stage.peaks) // MIB for stage in stages}
    print(peaks)
    assert [stage.name for stage in stages if stage.exceeds] == []
    for stage in stages:
        if stage.name in (*WHOLE, COPIES):
            assert max(stage.peaks) > stage.needed, "it measures nothing"
