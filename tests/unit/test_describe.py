"""What is said of checkpoints, and of the difference between two, is what is in them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from lightning_distrec import chunks as chunks_module
from lightning_distrec.checkpoint.lazy_tensors import MappedTensor
from lightning_distrec.checkpoint.tools.compare import Difference, compare, largest_difference, print_comparison
from lightning_distrec.checkpoint.tools.describe import describe, print_description
from lightning_distrec.checkpoint.tools.export import export
from lightning_distrec.errors import CheckpointError
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


def _folder(path: Path, state: dict[str, Any] | None = None, plan: dict[str, Any] = PLAN, **more: Any) -> Path:
    cut = dict(_state() if state is None else state)
    for name, value in cut.items():
        if name.endswith(("users.weight", "films.weight")):
            cut[name] = by_rows(value, 120)
        elif name.endswith("items.weight"):
            cut[name] = by_columns(value, 8, 20)
    optimizer = {
        "optimizer": "torch.optim.adagrad.Adagrad",
        "state": {"films.weight": {"sum": by_rows(cut["films.weight"].chunks[0].tensor, 9), "step": torch.tensor(4.0)}},
        "param_groups": [{"lr": 0.1, "params": ["mlp.weight", "films.weight"]}],
    }
    whole = {"state_dict": cut, "optimizer_states": [optimizer], **more}
    return write_folder(path, whole, plan=plan, num_ranks=3)


def _text(show: Callable[[Console], None]) -> str:
    console = Console(width=120, markup=False, emoji=False)
    with console.capture() as captured:
        show(console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def test_a_folder_is_described_by_its_tables_tensors_optimizers_and_writer(tmp_path: Path) -> None:
    path = _folder(tmp_path / "a.ckpt")
    found = describe(path).as_json()
    assert json.loads(json.dumps(found)) == found
    listed = [
        (t["name"], t["shape"], t["dtype"], t["num_bytes"], t["sharding_type"], t["ranks"])
        for t in found.pop("tensors")
    ]
    assert listed == [
        ("sequences.embeddings.items.weight", [500, 32], "float16", 32000, "column_wise", [0, 2]),
        ("ebc.embedding_bags.users.weight", [300, 16], "float32", 19200, "row_wise", [0, 1, 2]),
        ("films.weight", [400, 8], "float32", 12800, "table_wise", [1]),
        ("mlp.weight", [100, 90], "float32", 36000, None, None),
        ("mlp.bias", [7], "bfloat16", 14, None, None),
        ("count", [], "int64", 8, None, None),
    ]
    assert found == {
        "complete": True,
        "path": str(path),
        "kind": "checkpoint of lightning_distrec",
        "bytes_on_disk": sum(file.stat().st_size for file in path.iterdir()),
        "problem": None,
        "base": None,
        "changed_rows": {},
        "row_bits": 32,
        "step": 30,
        "epoch": 2,
        "num_ranks": 3,
        "versions": "torch 2.13.0",
        "lightning": "2.6.0",
        "plan": PLAN,
        "plan_file": False,
        "optimizers": [
            {"optimizer": "torch.optim.adagrad.Adagrad", "num_tensors": 2, "num_bytes": 120 * 8 * 4 + 4},
        ],
    }


def test_tables_of_a_collection_that_is_the_module_itself_are_found(tmp_path: Path) -> None:
    state = {"embedding_bags.users.weight": torch.rand(300, 16), "films.weight": torch.rand(9, 4)}
    found = describe(_folder(tmp_path / "a.ckpt", state, {".users": PLAN["ebc.users"]}))
    assert {tensor.name: tensor.sharding_type for tensor in found.tensors} == {
        "embedding_bags.users.weight": "row_wise",
        "films.weight": None,
    }


def test_people_read_the_largest_first_and_how_many_more_there_are(tmp_path: Path) -> None:
    state = _state() | {f"layer {i:02}": torch.rand(10 + i) for i in range(30)}
    found = describe(_folder(tmp_path / "a.ckpt", state))
    text = _text(lambda console: print_description(found, console, show_all=False))
    first, *lines = text.splitlines()
    assert first.startswith(f"{tmp_path}/a.ckpt: checkpoint of lightning_distrec, complete, ")
    assert first.endswith("kB on disk")
    assert lines[:4] == [
        "epoch      2",
        "step       30",
        "written by 3 ranks",
        "with       torch 2.13.0, lightning 2.6.0",
    ]
    rows = [" ".join(line.split()) for line in lines[6:]]
    assert rows[1] == "ebc.embedding_bags.users.weight 300 x 16 float32 19.2 kB row_wise fused 0-2"
    assert rows[2] == "films.weight 400 x 8 float32 12.8 kB table_wise dense 1"
    assert rows[4] == "layer 29 39 float32 156 bytes"
    assert len(rows) == 22
    assert lines[-2:] == [
        "and 16 smaller tensors, 946 bytes in all; --all lists them",
        "optimizer 0, torch.optim.adagrad.Adagrad: 2 tensors, 3.8 kB",
    ]
    everything = _text(lambda console: print_description(found, console, show_all=True))
    assert all(name in everything for name in state)
    assert "--all" not in everything


def test_plain_files_are_described_too(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "a.ckpt")
    for suffix in ("pt", "safetensors", "ckpt"):
        export(folder, tmp_path / f"out.{suffix}")
    kinds = {"pt": "state_dict", "safetensors": "safetensors file", "ckpt": "Lightning checkpoint"}
    wanted = sorted((t.name, t.shape, t.dtype, t.num_bytes) for t in describe(folder).tensors)
    for suffix, kind in kinds.items():
        found = describe(tmp_path / f"out.{suffix}")
        assert (found.kind, found.problem) == (kind, None)
        assert sorted((t.name, t.shape, t.dtype, t.num_bytes) for t in found.tensors) == wanted
        assert found.bytes_on_disk == (tmp_path / f"out.{suffix}").stat().st_size
        assert (found.step, found.epoch) == ((30, 2) if suffix == "ckpt" else (None, None))
    assert [(o.num_tensors, o.num_bytes) for o in describe(tmp_path / "out.ckpt").optimizers] == [(2, 3844)]


def _without_marker(path: Path) -> None:
    (path / "complete.json").unlink()


def _without_rank(path: Path) -> None:
    (path / "rank_0.pt").unlink()


def _cut_marker(path: Path) -> None:
    (path / "complete.json").write_text((path / "complete.json").read_text()[:50])


def _later_format(path: Path) -> None:
    (path / "complete.json").write_text((path / "complete.json").read_text().replace('"format": 1', '"format": 99'))


def _overwrite(name: str) -> Callable[[Path], None]:
    def of(path: Path) -> None:
        size = (path / name).stat().st_size
        (path / name).write_bytes(b"x" * size)

    return of


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_marker, "is not a complete checkpoint: complete.json, which is written last, is missing"),
        (_without_rank, "is damaged: rank_0.pt is missing, and should have"),
        (_cut_marker, "complete.json is damaged: "),
        (_later_format, "has format 99, and this version of lightning_distrec reads format 1"),
        (_overwrite(".metadata"), ".metadata is no metadata of a checkpoint: "),
        (_overwrite("state.pt"), "state.pt cannot be read: it holds something other than tensors and plain types"),
    ],
)
def test_what_is_wrong_with_a_folder_is_reported(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    path = _folder(tmp_path / "a.ckpt")
    damage(path)
    found = describe(path)
    assert said in (found.problem or "")
    assert found.as_json()["complete"] is False
    assert found.bytes_on_disk == sum(file.stat().st_size for file in path.iterdir())
    text = _text(lambda console: print_description(found, console, show_all=False))
    assert text.startswith(f"{path}: folder, CANNOT BE LOADED, ")


class Code:
    """Something that is no plain type."""


def test_files_that_would_run_code_or_are_something_else_are_not_read(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": Code()}, tmp_path / "code.ckpt")
    (tmp_path / "text.safetensors").write_text("nothing of the kind")
    assert "Nothing in it was run." in (describe(tmp_path / "code.ckpt").problem or "")
    assert "is no safetensors file" in (describe(tmp_path / "text.safetensors").problem or "")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*none.ckpt"):
        describe(tmp_path / "none.ckpt")


# ------------------------------------------------------------------------------------------------------- differences


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (torch.arange(10.0), torch.arange(10.0), 0.0),
        (torch.tensor([1.0, 2.0, -3.0]), torch.tensor([1.0, 2.5, -4.0]), 1.0),
        (torch.tensor([1.0, math.nan, math.inf]), torch.tensor([1.5, math.nan, math.inf]), 0.5),
        (torch.tensor([1.0, 2.0]), torch.tensor([math.nan, 2.0]), math.nan),
        (torch.tensor([math.inf, 0.0]), torch.tensor([-math.inf, 0.0]), math.inf),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([6e4, 1.0]).half(), torch.tensor([-6e4, 1.0]).half(), 120_000.0),
        (torch.tensor([200, 3], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8), 199.0),
        (torch.tensor([2**62]), torch.tensor([2**62 + 1]), 1.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 4j]), 3.0),
        (torch.tensor(5), torch.tensor(7), 2.0),
        (torch.empty(0, 4), torch.empty(0, 4), 0.0),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).double(), 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), 0.0),
        (torch.tensor([1.0, 0.1]), torch.tensor([1.0, 0.1]).bfloat16(), 9.765625e-05),
    ],
)
def test_the_largest_difference_of_two_tensors(a: Tensor, b: Tensor, wanted: float) -> None:
    for found in (
        largest_difference(MappedTensor(a), MappedTensor(b)),
        largest_difference(MappedTensor(b), MappedTensor(a)),
    ):
        assert found == pytest.approx(wanted, rel=1e-4, abs=0, nan_ok=True)


def test_a_difference_is_found_in_every_chunk_of_any_sharding_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks_module, "BLOCK_BYTES", 700)
    table = torch.rand(300, 16)
    write_folder(tmp_path / "rows.ckpt", {"state_dict": {"t": by_rows(table, 100)}})
    for row in (0, 99, 100, 137, 299):
        other = table.clone()
        other[row, 3] += 8.0
        write_folder(tmp_path / "columns.ckpt", {"state_dict": {"t": by_columns(other, 4, 8)}})
        found = compare(tmp_path / "rows.ckpt", tmp_path / "columns.ckpt", values=True)
        assert found.values == {"state_dict/t": pytest.approx(8.0)}
        assert (found.facts, found.tensors, found.others, found.num_compared) == ([], [], [], 1)


def test_what_only_one_has_and_what_has_another_shape_or_type_is_reported(tmp_path: Path) -> None:
    base = {"same": torch.rand(3), "shape": torch.rand(3, 2), "type": torch.ones(4), "left": torch.tensor(1.0)}
    torch.save(base, tmp_path / "a.pt")
    other = {"same": base["same"], "shape": torch.rand(2, 3), "type": torch.ones(4).half(), "right": torch.rand(5)}
    save_file(other, tmp_path / "b.safetensors")
    found = compare(tmp_path / "a.pt", tmp_path / "b.safetensors", values=True)
    assert found.tensors == [
        Difference("state_dict/shape", "3 x 2 float32", "2 x 3 float32"),
        Difference("state_dict/type", "4 float32", "4 float16"),
        Difference("state_dict/left", "scalar float32", None),
        Difference("state_dict/right", None, "5 float32"),
    ]
    assert (found.values, found.num_compared, found.is_same) == ({}, 2, False)
    text = _text(lambda console: print_comparison(found, console))
    assert [line.split("  ")[0] for line in text.splitlines()[4:8]] == [d.name for d in found.tensors]
    assert "missing" in text
    assert text.endswith("2 of 2 tensors are equal")


def test_steps_writers_plans_and_what_training_keeps_are_compared(tmp_path: Path) -> None:
    state = _state()
    _folder(tmp_path / "a.ckpt", state, callbacks={"Stop": {"wait": 1, "best": math.nan}}, hyper_parameters={"dim": 4})
    plan = {
        "ebc.users": PLAN["ebc.users"],
        "films": {"sharding_type": "row_wise", "kernel": "dense", "ranks": [0, 1, 2]},
    }
    more = {"callbacks": {"Stop": {"wait": 2, "best": math.nan}}, "hyper_parameters": {}}
    _folder(tmp_path / "b.ckpt", state, plan, global_step=31, **more)
    found = compare(tmp_path / "a.ckpt", tmp_path / "b.ckpt", values=True)
    assert found.facts == [
        Difference("step", "30", "31"),
        Difference("plan of sequences.items", "column_wise, fused, ranks 0, 2", None),
        Difference("plan of films", "table_wise, dense, ranks 1", "row_wise, dense, ranks 0-2"),
    ]
    assert found.others == [
        Difference("callbacks/Stop/wait", "1", "2"),
        Difference("hyper_parameters/dim", "4", None),
    ]
    assert (found.tensors, found.values, found.is_same) == ([], {}, False)


def test_numbers_of_parameters_and_their_names_are_the_same_thing(tmp_path: Path) -> None:
    _folder(tmp_path / "a.ckpt")
    export(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    found = compare(tmp_path / "a.ckpt", tmp_path / "b.ckpt", values=True)
    assert (found.is_same, found.num_compared) == (True, 8)
    text = _text(lambda console: print_comparison(found, console))
    assert text == "no difference: facts, numbers and all values of 8 tensors are the same"


def test_values_are_not_read_unless_asked_for(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3), "b": torch.zeros(2)}, tmp_path / "a.pt")
    torch.save({"a": torch.tensor([0.0, math.nan, 0.0]), "b": torch.ones(2)}, tmp_path / "b.pt")
    found = compare(tmp_path / "a.pt", tmp_path / "b.pt", values=False)
    assert (found.is_same, found.num_compared) == (True, None)
    found = compare(tmp_path / "a.pt", tmp_path / "b.pt", values=True)
    text = _text(lambda console: print_comparison(found, console)).splitlines()
    assert [line.split() for line in text[-3:-1]] == [["state_dict/a", "nan"], ["state_dict/b", "1"]]
    assert json.loads(json.dumps(found.as_json()))["values"] == {"state_dict/a": "nan", "state_dict/b": 1.0}


def test_only_the_first_of_many_differences_is_printed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_folder(tmp_path / f"{name}.ckpt", {"state_dict": {}, "loops": {f"x{i}": name for i in range(60)}})
    found = compare(tmp_path / "a.ckpt", tmp_path / "b.ckpt", values=False)
    assert len(found.others) == 60
    text = _text(lambda console: print_comparison(found, console))
    assert text.endswith("and 20 more; --json lists them")
    assert text.count("loops/x") == 40


def test_only_the_largest_of_many_differences_in_values_are_printed(tmp_path: Path) -> None:
    torch.save({f"t{i}": torch.zeros(2) for i in range(50)}, tmp_path / "a.pt")
    torch.save({f"t{i}": torch.full((2,), float(i)) for i in range(50)}, tmp_path / "b.pt")
    found = compare(tmp_path / "a.pt", tmp_path / "b.pt", values=True)
    lines = _text(lambda console: print_comparison(found, console)).splitlines()
    assert [line.split()[-1] for line in lines[4:44]] == [str(i) for i in range(49, 9, -1)]
    assert lines[44:] == ["and 9 more; --json lists them", "1 of 50 tensors are equal"]
