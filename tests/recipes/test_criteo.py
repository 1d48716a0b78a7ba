"""Click logs: what the generator plants, what files hold of it, and what a batch does."""

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import binary_auroc
from torchrec import KeyedJaggedTensor

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.errors import DataError
from recipes.criteo_dlrm.columns import (
    CATEGORIES,
    INTEGERS,
    MLPERF_BAG_SIZES,
    MLPERF_ROWS,
    NUM_CATEGORIES,
    table_rows,
)
from recipes.criteo_dlrm.data import CriteoDataModule
from recipes.criteo_dlrm.generator import Generator
from recipes.criteo_dlrm.model import ClickModel
from recipes.criteo_dlrm.write_logs import write_logs
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(seed=3, max_ids=1000)


def module(folder: Path, **settings: object) -> CriteoDataModule:
    data = CriteoDataModule(
        cache_dir=str(folder), num_examples=5000, max_ids=1000, seed=3, **settings
    )
    data.prepare_data()
    data.setup("fit")
    return data


def test_the_same_seed_gives_the_same_examples_however_many_are_asked_for(
    generator: Generator,
) -> None:
    few, many = generator.block(1, 10), Generator(seed=3, max_ids=1000).block(1, 500)
    for name in ("integers", "tokens", "labels", "log_odds"):
        assert np.array_equal(getattr(few, name), getattr(many, name)[:10])
    assert not np.array_equal(few.tokens, generator.block(2, 10).tokens)


def test_labels_follow_the_planted_truth_and_ids_zipfs_law(generator: Generator) -> None:
    block = generator.block(0)
    chances = 1 / (1 + np.exp(-block.log_odds.astype(np.float64)))
    # Of 65,536 draws, a mean lies within 5 standard deviations of the chance.
    assert block.labels.mean(0) == pytest.approx(chances.mean(0), abs=5 * 0.5 / 256)
    auroc = binary_auroc(
        torch.from_numpy(block.log_odds[:, 0]), torch.from_numpy(block.labels[:, 0]).long()
    )
    assert 0.75 < auroc < 0.9
    tokens = block.tokens[:, 0]
    counts = np.sort(np.unique(tokens[tokens > 0], return_counts=True)[1])[::-1]
    # Id k has what lies between k and k + 1 under x ** -1.05.
    between = np.diff(np.arange(1, 12) ** -0.05)
    assert counts[0] / counts[9] == pytest.approx(between[0] / between[9], rel=0.1)


def test_a_line_of_criteos_own_kind_is_read(tmp_path: Path) -> None:
    line = "\t".join(["1", "-2", "", *"3" * 11, "05db9164", "FFFFFFFF", *[""] * 24]) + "\n"
    (file := tmp_path / "day.txt").write_text(10 * line)
    data = CriteoDataModule([str(file)], str(tmp_path), batch_size=10)
    data.prepare_data()
    data.setup()
    (batch,) = data.train_dataloader()
    assert batch["dense"][0].tolist() == pytest.approx([0, 0, *[np.log(4)] * 11])
    ids = batch["ids"].values().view(NUM_CATEGORIES, 8)[:, 0].tolist()
    assert all(ids[:2])
    assert not any(ids[2:])
    assert batch["label"].tolist() == [[1]] * 8


@pytest.mark.parametrize("multi_hot", [False, True])
def test_a_batch_has_the_rows_of_its_tables_and_the_bags_of_mlperf(
    tmp_path: Path, multi_hot: bool
) -> None:
    data = module(tmp_path, max_rows=500, multi_hot=multi_hot)
    batch = next(iter(data.val_dataloader()))
    written = parquet.read_table(data.generated).slice(4000, 500)
    bags = iter(batch["ids"].values().split(batch["ids"].lengths().tolist()))
    for category, rows, size in zip(CATEGORIES, table_rows(500), MLPERF_BAG_SIZES, strict=True):
        for values in written[category].to_pylist():
            ids = next(bags).tolist()
            assert len(ids) == ((size if values else 0) if multi_hot else 1)
            assert all(0 <= row < rows for row in ids)
            assert multi_hot or bool(values) or ids == [0]
    # Facts of the benchmark: 204 million rows in all, 214 ids per example.
    assert (sum(MLPERF_ROWS), sum(MLPERF_BAG_SIZES)) == (204_184_588, 214)
    first = [written[name][0].as_py() for name in INTEGERS]
    assert batch["dense"][0].tolist() == pytest.approx([
        np.log1p(max(value or 0, 0)) for value in first
    ])


def test_examples_are_split_in_order_and_made_once(tmp_path: Path) -> None:
    data = module(tmp_path)
    rows = {name: sum(group.num_rows for group in data.groups[name]) for name in data.groups}
    assert rows == {"train": 4000, "val": 500, "test": 500}
    labels = parquet.read_table(data.generated)["label"].to_pylist()
    assert (
        torch.cat([batch["label"] for batch in data.val_dataloader()])[:, 0].tolist()
        == labels[4000:4500]
    )
    assert (
        torch.cat([batch["label"] for batch in data.test_dataloader()])[:, 0].tolist()
        == labels[4500:]
    )
    written = data.generated.stat().st_mtime_ns
    assert module(tmp_path).generated.stat().st_mtime_ns == written
    assert {file.suffix for file in tmp_path.iterdir()} == {".parquet", ".json"}
    assert 0.75 < data.baselines()["best possible"]["val_auroc"] < 0.9


def test_files_are_read_and_have_no_known_truth(tmp_path: Path) -> None:
    write_logs(str(tmp_path / "a.tsv"), examples=60, max_ids=1000)
    write_logs(str(tmp_path / "b.parquet"), examples=40, max_ids=1000)
    data = CriteoDataModule(
        files=[str(tmp_path / "a.tsv"), str(tmp_path / "b.parquet")], cache_dir=str(tmp_path / "c")
    )
    data.prepare_data()
    data.setup("fit")
    assert sum(group.num_rows for groups in data.groups.values() for group in groups) == 100
    assert data.baselines() == {}
    with pytest.raises(DataError, match=r"none\.tsv: there is no such file"):
        CriteoDataModule(files=[str(tmp_path / "none.tsv")], cache_dir=str(tmp_path / "c")).setup()


def _weights(arch: str, interaction: str, num_ranks: int) -> dict[str, torch.Tensor]:
    """Return the weights after three steps over the same 16 examples, in full."""
    rank = rank_and_num_ranks()[0] if num_ranks > 1 else 0
    pl.seed_everything(1)
    size = {"max_rows": 50, "dim": 4, "bottom": [8], "top": [8], "dcn_layers": 1, "dcn_rank": 4}
    model = ClickModel(arch=arch, interaction=interaction, **size)
    model.configure_model()
    examples = slice(16 // num_ranks * rank, 16 // num_ranks * (rank + 1))
    batches = []
    for _ in range(3):
        ids = torch.stack([torch.randint(rows, (16,)) for rows in table_rows(50)])[:, examples]
        batch = {
            "dense": torch.rand(16, 13)[examples],
            "label": torch.randint(2, (16, 1)).float()[examples],
        }
        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        batches.append(
            batch | {"ids": KeyedJaggedTensor(list(CATEGORIES), ids.flatten(), lengths=lengths)}
        )
    strategy = TorchRecShardedStrategy() if num_ranks > 1 else "auto"
    trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **DEFAULTS)
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return trainer.strategy.full_state_dict() if num_ranks > 1 else model.state_dict()


def test_each_architecture_trains_sharded_as_in_one_process() -> None:
    kinds = [("deepfm", "dcn"), ("dlrm", "dcn"), ("dlrm", "dot")]
    sharded = run_each_on_ranks({kind: (_weights, *kind, 2) for kind in kinds}, 2)[0]
    for kind in kinds:
        torch.testing.assert_close(sharded[kind], _weights(*kind, 1), rtol=1e-4, atol=1e-5)
