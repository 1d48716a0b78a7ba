"""What ranks read is shown, and ranks that read the same are warned of: on real ranks, by what they
really read."""

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset

from lightning_distrec import DataReport, TorchRecShardedStrategy, TunedDDPStrategy
from tests.support.click_model import ClickModel, make_batch, seeded
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS


class Stream(IterableDataset):
    """Batches that each rank reads all of, or its part."""

    def __init__(self, is_divided: bool) -> None:
        self.first = rank_and_num_ranks()[0] if is_divided else 0

    def __iter__(self) -> Iterator[Any]:
        yield from (make_batch(10 * step + self.first) for step in range(6))


def _fit(folder: str) -> dict[str, Any]:
    """Return the warnings and the reports of fits whose ranks read the same, and their own."""
    results = {}
    for is_divided in (False, True):
        for strategy in (TunedDDPStrategy(), TorchRecShardedStrategy()):
            report, logger = (
                DataReport(num_batches=2, samples_from="label"),
                CSVLogger(folder, version=f"{is_divided}"),
            )
            options = DEFAULTS | {
                "logger": logger,
                "devices": rank_and_num_ranks()[1],
                "log_every_n_steps": 1,
            }
            trainer = pl.Trainer(strategy=strategy, callbacks=report, **options)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
                trainer.fit(model, DataLoader(Stream(is_divided), batch_size=None))
            texts = [
                str(warning.message)
                for warning in caught
                if "read the same" in str(warning.message)
            ]
            step = trainer.strategy.training_step.__func__  # nothing is left on the step's path
            results[type(strategy).__name__, is_divided] = (
                texts,
                report.rows,
                step is type(strategy).training_step,
            )
    return results


def test_ranks_that_read_the_same_data_are_named_and_each_ranks_data_is_shown(
    tmp_path: Any,
) -> None:
    first, second = run_on_warm_ranks(_fit, 2, str(tmp_path))
    for (strategy, is_divided), (texts, rows, is_plain) in first.items():
        assert len(texts) == (0 if is_divided else 1), (strategy, texts)
        assert all(
            text.startswith("ranks 0, 1 read the same data: their first 2 batches are equal")
            for text in texts
        )
        assert second[strategy, is_divided][:2] == ([], [])
        assert is_plain
        assert second[strategy, is_divided][2]
        for rank, row in enumerate(rows):
            batches = [make_batch(10 * step + rank * is_divided) for step in range(2)]
            assert (row["rank"], row["device"]) == (rank, "cpu")
            assert row["batch_size"] == len(batches[0]["label"])
            assert row["samples"] == sum(len(batch["label"]) for batch in batches)
            ids = torch.cat([batch["ids"] for batch in batches])
            assert row["ids"]["ids"] == [int(ids.min()), int(ids.max())]
    logged = (tmp_path / "lightning_logs/True/metrics.csv").read_text()
    assert "data/rank_1/ids_max" in logged
