"""Rows of columns under strategies: each once, resumed on other ranks, and failing on all of
them."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from pyarrow import parquet

from tests.support.column_models import ColumnModel, click_data, write_clicks
from tests.support.ranks import RankFailed, run_on_warm_ranks
from tests.support.trainers import make_ddp_trainer, make_trainer

NUM_ROWS = 300


def fit(
    folder: Path, steps: int, checkpoint: Path | None, save: Path | None, options: dict[str, Any]
) -> list[list[int]]:
    """Train up to a step, or through the epoch; return the rows of this rank."""
    kind = options.pop("strategy", "torchrec_sharded")
    model, data = ColumnModel(), click_data(folder / "clicks.parquet", **options)
    make = make_trainer if kind == "torchrec_sharded" else make_ddp_trainer
    # Within the epoch: Lightning counts an epoch that max_steps has cut as a whole one.
    saving = [ModelCheckpoint(save.parent, save.stem, every_n_train_steps=steps)] if save else []
    trainer = make(
        max_steps=steps, limit_val_batches=0, callbacks=saving, enable_checkpointing=bool(saving)
    )
    trainer.fit(model, data, ckpt_path=checkpoint)
    return model.trained


def rows(ranks: list[list[list[int]]]) -> list[int]:
    return [row for trained in ranks for batch in trained for row in batch]


def test_a_run_that_resumes_on_other_ranks_trains_each_row_of_the_epoch_once(
    tmp_path: Path,
) -> None:
    write_clicks(tmp_path, NUM_ROWS)
    saved = tmp_path / "saved.ckpt"
    first = run_on_warm_ranks(fit, 2, tmp_path, 6, None, saved, {"num_workers": 1})
    full = run_on_warm_ranks(fit, 2, tmp_path, -1, None, None, {})
    assert sorted(rows(full)) == list(range(NUM_ROWS))
    assert {len(trained) for trained in full} == {19}  # 150 rows a rank
    assert [trained[:6] for trained in full] == first
    alike = run_on_warm_ranks(fit, 2, tmp_path, -1, saved, None, {})
    assert [before + after for before, after in zip(first, alike, strict=True)] == full
    again = tmp_path / "again.ckpt"
    alone = run_on_warm_ranks(fit, 1, tmp_path, 10, saved, again, {})
    three = run_on_warm_ranks(fit, 3, tmp_path, -1, again, None, {})
    assert sorted(rows(first) + rows(alone) + rows(three)) == list(range(NUM_ROWS))
    assert sum(map(len, alone)) == 4
    assert {len(trained) for trained in three} == {-(-(NUM_ROWS - 96 - 32) // 24)}


def test_lightnings_own_ddp_trains_each_row_once_too(tmp_path: Path) -> None:
    write_clicks(tmp_path, NUM_ROWS)
    trained = run_on_warm_ranks(fit, 2, tmp_path, -1, None, None, {"strategy": "ddp"})
    assert sorted(rows(trained)) == list(range(NUM_ROWS))


def test_a_bad_row_group_is_an_error_on_all_ranks_that_says_where(tmp_path: Path) -> None:
    file = Path(write_clicks(tmp_path, NUM_ROWS))
    data = click_data(file)
    data.prepare_data()
    column = parquet.ParquetFile(file).metadata.row_group(4).column(1)
    content, changed = bytearray(file.read_bytes()), file.stat()
    content[column.dictionary_page_offset : column.dictionary_page_offset + 40] = bytes(40)
    file.write_bytes(content)
    import os

    # As if it were damaged on its way: name, size and time stay, and so does what was fitted.
    os.utime(file, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(fit, 2, tmp_path, -1, None, None, {"num_workers": 1})
    for rank in (0, 1):
        assert f"--- rank {rank} " in str(failed.value)
    assert str(failed.value).count("row group 4, column 'user'") >= 2
