"""What is said of checkpoints is what is in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_distrec.errors import CheckpointError
from lightning_distrec.serving.describe import describe, print_description
from lightning_distrec.serving.export_checkpoint import export
from tests.support.checkpoint_folders import by_columns, by_rows, write_folder

PLAN = {
    "ebc.users": {"sharding_type": "row_wise", "kernel": "fused", "ranks": [0, 1, 2]},
    "sequences.items": {"sharding_type": "column_wise", "kernel": "fused", "ranks": [0, 2]},
    "films": {"sharding_type": "table_wise", "kernel": "dense", "ranks": [1]},
}


def _state() -> dict[str, Any]:
    return {
        "mlp.weight": torch.rand(100, 90),
        "mlp.bias": torch.rand(7).bfloat16(),
        "count": torch.tensor(5),
        "ebc.embedding_bags.users.weight": torch.rand(300, 16),
        "sequences.embeddings.items.weight": torch.rand(500, 32).half(),
        "films.weight": torch.rand(400, 8),
    }


def _folder(
    path: Path, state: dict[str, Any] | None = None, plan: dict[str, Any] = PLAN, **extra: Any
) -> Path:
    cut = dict(_state() if state is None else state)
    for name, value in cut.items():
        if name.endswith(("users.weight", "films.weight")):
            cut[name] = by_rows(value, 120)
        elif name.endswith("items.weight"):
            cut[name] = by_columns(value, 8, 20)
    optimizer = {
        "optimizer": "torch.optim.adagrad.Adagrad",
        "state": {
            "films.weight": {
                "sum": by_rows(cut["films.weight"].chunks[0].tensor, 9),
                "step": torch.tensor(4.0),
            }
        },
        "param_groups": [{"lr": 0.1, "params": ["mlp.weight", "films.weight"]}],
    }
    whole = {"state_dict": cut, "optimizer_states": [optimizer], **extra}
    return write_folder(path, whole, plan=plan, num_ranks=3)


def _text(show: Callable[[Console], None]) -> str:
    console = Console(width=120, markup=False, emoji=False)
    with console.capture() as captured:
        show(console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def test_a_folder_is_described_by_its_tables_tensors_optimizers_and_writer(tmp_path: Path) -> None:
    path = _folder(tmp_path / "a.ckpt")
    actual = describe(path).as_json()
    assert json.loads(json.dumps(actual)) == actual
    listed = [
        (t["name"], t["shape"], t["dtype"], t["num_bytes"], t["sharding_type"], t["ranks"])
        for t in actual.pop("tensors")
    ]
    assert listed == [
        ("sequences.embeddings.items.weight", [500, 32], "float16", 32000, "column_wise", [0, 2]),
        ("ebc.embedding_bags.users.weight", [300, 16], "float32", 19200, "row_wise", [0, 1, 2]),
        ("films.weight", [400, 8], "float32", 12800, "table_wise", [1]),
        ("mlp.weight", [100, 90], "float32", 36000, None, None),
        ("mlp.bias", [7], "bfloat16", 14, None, None),
        ("count", [], "int64", 8, None, None),
    ]
    assert actual == {
        "complete": True,
        "path": str(path),
        "kind": "checkpoint of lightning_distrec",
        "bytes_on_disk": sum(file.stat().st_size for file in path.iterdir()),
        "problem": None,
        "base": None,
        "changed_rows": {},
        "step": 30,
        "epoch": 2,
        "num_ranks": 3,
        "versions": "torch 2.13.0",
        "lightning": "2.6.0",
        "plan": PLAN,
        "plan_file": False,
        "optimizers": [
            {
                "optimizer": "torch.optim.adagrad.Adagrad",
                "num_tensors": 2,
                "num_bytes": 120 * 8 * 4 + 4,
            },
        ],
    }


def test_tables_of_a_collection_that_is_the_module_itself_are_found(tmp_path: Path) -> None:
    state = {"embedding_bags.users.weight": torch.rand(300, 16), "films.weight": torch.rand(9, 4)}
    actual = describe(_folder(tmp_path / "a.ckpt", state, {".users": PLAN["ebc.users"]}))
    assert {tensor.name: tensor.sharding_type for tensor in actual.tensors} == {
        "embedding_bags.users.weight": "row_wise",
        "films.weight": None,
    }


def test_people_read_the_largest_first_and_how_many_more_there_are(tmp_path: Path) -> None:
    state = _state() | {f"layer {i:02}": torch.rand(10 + i) for i in range(30)}
    actual = describe(_folder(tmp_path / "a.ckpt", state))
    text = _text(lambda console: print_description(actual, console, show_all=False))
    first, *lines = text.splitlines()
    assert first.startswith(f"{tmp_path}/a.ckpt: checkpoint of lightning_distrec, complete, ")
    assert first.endswith("KiB on disk")
    assert lines[:4] == [
        "epoch      2",
        "step       30",
        "written by 3 ranks",
        "with       torch 2.13.0, lightning 2.6.0",
    ]
    rows = [" ".join(line.split()) for line in lines[6:]]
    assert rows[1] == "ebc.embedding_bags.users.weight 300 x 16 float32 18.8 KiB row_wise fused 0-2"
    assert rows[2] == "films.weight 400 x 8 float32 12.5 KiB table_wise dense 1"
    assert rows[4] == "layer 29 39 float32 156 B"
    assert len(rows) == 22
    assert lines[-2:] == [
        "and 16 smaller tensors, 946 B in all; --all lists them",
        "optimizer 0, torch.optim.adagrad.Adagrad: 2 tensors, 3.8 KiB",
    ]
    full_text = _text(lambda console: print_description(actual, console, show_all=True))
    assert all(name in full_text for name in state)
    assert "--all" not in full_text


def test_plain_files_are_described_too(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "a.ckpt")
    for suffix in ("pt", "safetensors", "ckpt"):
        export(folder, tmp_path / f"out.{suffix}")
    kinds = {"pt": "state_dict", "safetensors": "safetensors file", "ckpt": "Lightning checkpoint"}
    expected = sorted((t.name, t.shape, t.dtype, t.num_bytes) for t in describe(folder).tensors)
    for suffix, kind in kinds.items():
        actual = describe(tmp_path / f"out.{suffix}")
        assert (actual.kind, actual.problem) == (kind, None)
        assert sorted((t.name, t.shape, t.dtype, t.num_bytes) for t in actual.tensors) == expected
        assert actual.bytes_on_disk == (tmp_path / f"out.{suffix}").stat().st_size
        assert (actual.step, actual.epoch) == ((30, 2) if suffix == "ckpt" else (None, None))
    assert [(o.num_tensors, o.num_bytes) for o in describe(tmp_path / "out.ckpt").optimizers] == [
        (2, 3844)
    ]


def _rewrite(old: str, new: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        marker = path / "complete.json"
        marker.write_text(marker.read_text().replace(old, new))

    return damage


def _overwrite(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).write_bytes(b"x" * (path / name).stat().st_size)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "complete.json").unlink(), "complete.json, which is written last, is"),
        (lambda path: (path / "rank_0.pt").unlink(), "is damaged: rank_0.pt is missing, and should"),
        (_rewrite("}", ""), "complete.json is damaged: "),
        (_rewrite('"format": 2', '"format": 99'), "has format 99, and this version of lightning_"),
        (_rewrite('"format": 2', '"format": 1'), "there, `lightning-distrec export "),
        (_overwrite("rank_0.safetensors"), "rank_0.safetensors is no safetensors file: "),
        (_overwrite("state.pt"), "it holds something other than tensors and plain types"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_reported(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    path = _folder(tmp_path / "a.ckpt")
    damage(path)
    actual = describe(path)
    assert message in (actual.problem or "")
    assert actual.as_json()["complete"] is False
    assert actual.bytes_on_disk == sum(file.stat().st_size for file in path.iterdir())
    text = _text(lambda console: print_description(actual, console, show_all=False))
    assert text.startswith(f"{path}: folder, CANNOT BE LOADED, ")


class Code:
    """Something that is no plain type."""


def test_files_that_would_run_code_or_are_something_else_are_not_read(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "callbacks": Code()}, tmp_path / "code.ckpt")
    (tmp_path / "text.safetensors").write_text("nothing of the kind")
    assert "Nothing in it was run." in (describe(tmp_path / "code.ckpt").problem or "")
    assert "is no safetensors file" in (describe(tmp_path / "text.safetensors").problem or "")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*none.ckpt"):
        describe(tmp_path / "none.ckpt")
