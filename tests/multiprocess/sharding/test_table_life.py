"""No stage of a large table's life takes a rank more than its share, but those that must hold the
whole table."""

import gc
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lightning_distrec.errors import DistRecError
from tests.benchmarks.life_memory import COPIES, MIB, WHOLE, Life, measure
from tests.support.click_model import ClickModel, EvaluatedModel, rank_loader, seeded
from tests.support.ranks import run_on_ranks
from tests.support.trainers import make_trainer


def _tables_left_by_full_state_dict() -> tuple[int, int]:
    model, trainer = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1}), make_trainer()
    trainer.fit(model, rank_loader(1, 0))
    gc.disable()
    state = trainer.strategy.full_state_dict()
    tables = [weakref.ref(value) for key, value in state.items() if "embedding" in key]
    del state
    return len(tables), sum(table() is not None for table in tables)


def test_full_tables_are_freed_with_the_state_that_has_them() -> None:
    assert run_on_ranks(_tables_left_by_full_state_dict, 1) == [(3, 0)]


def _collections_of_garbage() -> list[int]:
    model, trainer, counts = (
        seeded(EvaluatedModel, torch.optim.SGD, {"lr": 0.1}),
        make_trainer(),
        [],
    )
    trainer.fit(model, rank_loader(1, 0))
    with patch("lightning_distrec.strategies.torchrec_run.gc") as collector:
        for module in (model, seeded(EvaluatedModel, torch.optim.SGD, {"lr": 0.1})):
            trainer.validate(module, rank_loader(1, 0), verbose=False)
            counts.append(collector.collect.call_count)
    return counts


def test_a_run_looks_for_left_shards_only_where_there_are_some() -> None:
    assert run_on_ranks(_collections_of_garbage, 1) == [[0, 1]]


def _refusals_of_a_small_host() -> list[str]:
    model, trainer = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1}), make_trainer()
    trainer.fit(model, rank_loader(1, 0))
    refusals = []
    with patch("lightning_distrec.host_memory._meminfo", return_value=0):
        for method in (trainer.strategy.full_state_dict, trainer.strategy.unshard):
            with pytest.raises(DistRecError) as refusal:
                method()
            refusals.append(str(refusal.value))
    return refusals


def test_a_host_without_memory_for_all_rows_refuses_them() -> None:
    for refusal in run_on_ranks(_refusals_of_a_small_host, 1)[0]:
        assert "which has 0 free" in refusal


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
