"""Predictions of several ranks are one file, with a row for each example, in the order of the
data."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow.parquet as parquet
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec import PredictionWriter, TorchRecShardedStrategy, TunedDDPStrategy
from lightning_distrec.retrieval import top_k
from tests.support.click_model import seeded
from tests.support.ranks import RankFailed, run_on_warm_ranks
from tests.support.trainers import DEFAULTS


class Clicks(pl.LightningModule):
    """Predicts a chance, a vector and the nearest rows for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(200, 4), nn.Linear(4, 1)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        rows = self.table(batch["id"])
        scores, items = top_k(rows, self.table, 3, exclude=batch["id"][:, None])
        chance = self.layer(rows).squeeze(1)
        return {
            "chance": chance,
            "vector": rows.reshape(-1, 2, 2),
            "items": items,
            "scores": scores,
        }


def examples(number: int) -> DataLoader:
    return DataLoader(
        [{"id": 7 * i % 200, "name": f"item {i}"} for i in range(number)], batch_size=4
    )


def _predict(folder: str, number: int) -> None:
    options: dict[str, Any] = DEFAULTS | {"use_distributed_sampler": True}
    for strategy in (TorchRecShardedStrategy(convert_embeddings="all"), TunedDDPStrategy()):
        writer = PredictionWriter(f"{folder}/{type(strategy).__name__}.parquet", ["name"])
        trainer = pl.Trainer(strategy=strategy, devices=2, callbacks=writer, **options)
        trainer.predict(seeded(Clicks), examples(number), return_predictions=False)


def test_ranks_with_unequal_numbers_of_batches_write_each_example_once(tmp_path: Path) -> None:
    number = 17  # one rank has a batch of 4, 4 and 1, the other none in its third
    run_on_warm_ranks(_predict, 2, str(tmp_path), number)
    model = seeded(Clicks)
    ids = torch.tensor([7 * i % 200 for i in range(number)])
    expected = model.predict_step({"id": ids}, 0)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        "TorchRecShardedStrategy.parquet",
        "TunedDDPStrategy.parquet",
    ]
    for file in files:
        table = parquet.read_table(file).to_pydict()
        assert list(table) == ["index", "name", "chance", "vector", "items", "scores"]
        assert table["index"] == list(range(number))
        assert table["name"] == [f"item {i}" for i in range(number)]
        for name in expected:
            torch.testing.assert_close(torch.tensor(table[name]), expected[name].detach())


def _predict_stream(folder: str) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            yield from ({"id": i} for i in range(8))

    writer = PredictionWriter(f"{folder}/out.parquet")
    trainer = pl.Trainer(strategy=TunedDDPStrategy(), devices=2, callbacks=writer, **DEFAULTS)
    trainer.predict(seeded(Clicks), DataLoader(Stream(), batch_size=4), return_predictions=False)


def test_a_stream_over_several_ranks_has_no_order_and_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RankFailed, match="predictions cannot be brought into the order of the data"
    ):
        run_on_warm_ranks(_predict_stream, 2, str(tmp_path))
