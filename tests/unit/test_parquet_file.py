"""Changed rows as a Parquet file."""

import sys
from pathlib import Path

import pandas
import pytest
import torch

from lightning_distrec.checkpoint.tools.export import export
from lightning_distrec.checkpoint.tools.parquet_file import rows_alone, write_parquet
from lightning_distrec.errors import CheckpointError


def test_parquet_is_for_changed_rows_and_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="Parquet is for changed rows. Add --since"):
        export(tmp_path, tmp_path / "rows.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(CheckpointError, match="needs the package pyarrow: pip install pyarrow"):
        export(tmp_path, tmp_path / "rows.parquet", since=tmp_path)


def test_tables_of_other_dims_and_types_are_in_one_file(tmp_path: Path) -> None:
    changes = {
        "users.weight.ids": torch.tensor([3, 2**40]),
        "users.weight.rows": torch.randn(2, 4).bfloat16(),
        "items.weight.ids": torch.tensor([0]),
        "items.weight.rows": torch.randn(1, 2),
        "layer.weight": torch.ones(3),
    }
    written: list[int] = []
    write_parquet(tmp_path / "rows.parquet", rows_alone(changes), written.append)
    found = pandas.read_parquet(tmp_path / "rows.parquet")
    assert found["table"].tolist() == ["users.weight", "users.weight", "items.weight"]
    assert found["id"].tolist() == [3, 2**40, 0]
    rows = [*changes["users.weight.rows"].float().tolist(), *changes["items.weight.rows"].tolist()]
    assert [vector.tolist() for vector in found["vector"]] == rows
    assert sum(written) == sum(each.nbytes for name, each in changes.items() if name != "layer.weight")
