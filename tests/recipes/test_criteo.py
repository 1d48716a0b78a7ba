"""Click logs: what the generator plants, what readers find in files, and what a batch holds of it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from lightning_distrec.errors import ConfigError, DataError
from recipes.criteo_dlrm.columns import CATEGORIES, MLPERF_BAG_SIZES, MLPERF_ROWS, NUM_CATEGORIES, table_rows
from recipes.criteo_dlrm.data import CriteoDataModule
from recipes.criteo_dlrm.generator import Generator, tokens_of
from recipes.criteo_dlrm.read_logs import read_log
from recipes.criteo_dlrm.store import open_store
from recipes.criteo_dlrm.write_logs import write_logs


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(seed=3, max_ids=1000)


def module(folder: Path, **settings: object) -> CriteoDataModule:
    data = CriteoDataModule(cache_dir=str(folder), num_examples=5000, max_ids=1000, seed=3, **settings)
    data.prepare_data()
    data.setup("fit")
    return data


def test_the_same_seed_gives_the_same_examples_however_many_are_asked_for(generator: Generator) -> None:
    few, many = generator.block(1, 10), Generator(seed=3, max_ids=1000).block(1, 500)
    for name in ("integers", "tokens", "labels", "log_odds"):
        assert np.array_equal(getattr(few, name), getattr(many, name)[:10])
    assert not np.array_equal(few.tokens, generator.block(2, 10).tokens)


def test_labels_follow_the_planted_truth_and_ids_zipfs_law(generator: Generator) -> None:
    block = generator.block(0)
    chances = 1 / (1 + np.exp(-block.log_odds.astype(np.float64)))
    # Of 65,536 draws, a mean lies within 5 standard deviations of the chance.
    assert block.labels.mean(0) == pytest.approx(chances.mean(0), abs=5 * 0.5 / 256)
    auroc = binary_auroc(torch.from_numpy(block.log_odds[:, 0]), torch.from_numpy(block.labels[:, 0]).long())
    assert 0.75 < auroc < 0.9
    tokens = block.tokens[:, 0]
    counts = np.sort(np.unique(tokens[tokens > 0], return_counts=True)[1])[::-1]
    # Id k has what lies between k and k + 1 under x ** -1.05.
    between = np.diff(np.arange(1, 12) ** -0.05)
    assert counts[0] / counts[9] == pytest.approx(between[0] / between[9], rel=0.1)


def test_different_ids_have_different_tokens() -> None:
    tokens = tokens_of(np.arange(100_000)[:, None] + np.zeros(NUM_CATEGORIES, dtype=np.int64))
    assert len(np.unique(tokens)) == 100_000 * NUM_CATEGORIES
    assert tokens.min() > 0


@pytest.mark.parametrize("name", ["day_0.tsv", "day_0.parquet"])
def test_files_hold_what_was_generated(generator: Generator, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    write_logs(str(file), examples=300, seed=3, max_ids=1000)
    read = list(read_log(file))
    expected = generator.block(0, 300)
    assert np.array_equal(np.concatenate([block.integers for block in read]), expected.integers)
    assert np.array_equal(np.concatenate([block.tokens for block in read]), expected.tokens)
    assert np.array_equal(np.concatenate([block.labels[:, 0] for block in read]), expected.labels[:, 0])


def test_a_line_of_criteos_own_kind_is_read(tmp_path: Path) -> None:
    (file := tmp_path / "day.txt").write_text(
        "\t".join(["1", "-2", "", *"3" * 11, "05db9164", "FFFFFFFF", *[""] * 24]) + "\n"
    )
    (block,) = read_log(file)
    assert block.integers.tolist() == [[-2, -1, *[3] * 11]]
    assert block.tokens[0, :3].tolist() == [0x05DB9164, 0xFFFFFFFF, 0]
    assert block.labels.tolist() == [[1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["1", *"3" * 13, "xyz", *[""] * 25], "expected 8 hexadecimal digits as C1, there is 'xyz'"),
        (["2", *"3" * 13, *[""] * 26], "expected 0 or 1 as label, there is 2"),
        (["1", "many", *"3" * 12, *[""] * 26], "Expected the columns label, I1..I13, C1..C26"),
        (["1", "3"], "Expected the columns label, I1..I13, C1..C26"),
    ],
)
def test_a_line_of_another_format_is_refused(tmp_path: Path, fields: list[str], message: str) -> None:
    (file := tmp_path / "day.tsv").write_text("\t".join(fields) + "\n")
    with pytest.raises(DataError, match=message):
        list(read_log(file))


def test_a_batch_has_the_rows_of_its_tokens_and_the_bags_of_mlperf(tmp_path: Path) -> None:
    data = module(tmp_path, max_rows=500, multi_hot=True)
    tokens, dense = open_store(data.folder).tokens[:7], open_store(data.folder).dense[:7]
    batch = data.splits["train"].dataset.__getitems__(range(7))
    bags = iter(batch["ids"].split(batch["lengths"].tolist()))
    for category, (rows, size) in enumerate(zip(table_rows(500), MLPERF_BAG_SIZES, strict=True)):
        for example in range(7):
            ids, token = next(bags).tolist(), int(tokens[example, category])
            assert len(ids) == size
            assert ids[0] == (1 + token % (rows - 1) if token else 0)
            assert all(0 < row < rows for row in ids) if token else not any(ids)
    assert torch.equal(batch["dense"], torch.from_numpy(dense.copy()))


def test_examples_are_split_in_order_and_made_once(tmp_path: Path) -> None:
    data = module(tmp_path)
    assert [list(data.splits[name].indices)[:: len(data.splits[name]) - 1] for name in ("train", "val", "test")] == [
        [0, 3999],
        [4000, 4499],
        [4500, 4999],
    ]
    written = (data.folder / "tokens").stat().st_mtime_ns
    assert (module(tmp_path).folder / "tokens").stat().st_mtime_ns == written
    assert [folder.name for folder in tmp_path.iterdir()] == [data.folder.name]
    assert 0.75 < data.baselines()["best possible"]["val_auroc"] < 0.9


def test_files_are_converted_once_and_have_no_known_truth(tmp_path: Path) -> None:
    write_logs(str(tmp_path / "a.tsv"), examples=60, max_ids=1000)
    write_logs(str(tmp_path / "b.parquet"), examples=40, max_ids=1000)
    data = CriteoDataModule(files=[str(tmp_path / "a.tsv"), str(tmp_path / "b.parquet")], cache_dir=str(tmp_path / "c"))
    data.prepare_data()
    data.setup("fit")
    assert sum(len(part) for part in data.splits.values()) == 100
    assert data.baselines() == {}
    with pytest.raises(DataError, match=r"none\.tsv: there is no such file"):
        CriteoDataModule(files=[str(tmp_path / "none.tsv")], cache_dir=str(tmp_path / "c")).prepare_data()


def test_sizes_are_those_of_mlperf() -> None:
    # Facts of the benchmark: 204 million rows in all, 214 ids per example.
    assert sum(MLPERF_ROWS) == 204_184_588
    assert sum(MLPERF_BAG_SIZES) == 214
    assert len(MLPERF_ROWS) == len(MLPERF_BAG_SIZES) == len(CATEGORIES)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        CriteoDataModule(batch_size=0)
    with pytest.raises(ConfigError, match=r"val_fraction=0\.5, test_fraction=0\.5"):
        CriteoDataModule(val_fraction=0.5, test_fraction=0.5)
