"""Exported files are those that the libraries themselves would have written, and nothing else is
left behind."""

import os
import resource
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_distrec import chunks as chunks_module
from lightning_distrec.errors import CheckpointError
from lightning_distrec.serving.export_checkpoint import export
from tests.support.checkpoint_folders import by_columns, by_rows, edit_marker, write_folder


def weights() -> dict[str, Tensor]:
    """Return tensors of many shapes and types, some larger than what is kept in a folder's
    state.pt."""
    draw = torch.Generator().manual_seed(3)
    return {
        "ebc.embedding_bags.users.weight": torch.rand(3000, 16, generator=draw),
        "ebc.embedding_bags.items.weight": torch.rand(500, 32, generator=draw).half(),
        "mlp.weight": torch.rand(100, 90, generator=draw),
        "mlp.bias": torch.rand(7, generator=draw).bfloat16(),
        "count": torch.tensor(5),
        "nothing": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
        'a \u00fc "name"': torch.rand(6, 5, generator=draw).T,
        "wide": torch.rand(3, generator=draw).double(),
        "half.b": torch.rand(3, generator=draw).half(),
    }


def _folder(path: Path, **extra: Any) -> Path:
    cut: dict[str, Any] = dict(weights())
    cut["ebc.embedding_bags.users.weight"] = by_rows(cut["ebc.embedding_bags.users.weight"], 1300)
    cut["ebc.embedding_bags.items.weight"] = by_columns(
        cut["ebc.embedding_bags.items.weight"], 8, 20
    )
    return write_folder(path, {"state_dict": cut, **extra})


def _same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        actual[key].dtype == expected[key].dtype and torch.equal(actual[key], expected[key])
        for key in expected
    )


@pytest.fixture
def _piecewise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "BLOCK_BYTES", 4000)


@pytest.mark.usefixtures("_piecewise")
def test_a_pt_file_has_the_records_that_torch_writes_aligned_as_there(tmp_path: Path) -> None:
    export(_folder(tmp_path / "a.ckpt"), tmp_path / "found.pt")
    (tmp_path / "by torch").mkdir()
    expected = tmp_path / "by torch" / "found.pt"
    torch.save({key: value.contiguous() for key, value in weights().items()}, expected)
    assert _records(tmp_path / "found.pt") == _records(expected)
    offsets = [
        storage.untyped_storage().data_ptr() % 64
        for storage in torch.load(tmp_path / "found.pt", weights_only=True, mmap=True).values()
        if storage.numel()
    ]
    assert set(offsets) == {0}
    for mmap in (False, True):
        assert _same(torch.load(tmp_path / "found.pt", weights_only=True, mmap=mmap), weights())


def _records(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return the checksum of each record, and its content, which zipfile compares with the
    checksum."""
    with zipfile.ZipFile(path) as archive:
        return {
            entry.filename: (entry.CRC, archive.read(entry))
            for entry in archive.infolist()
            if not entry.filename.endswith("serialization_id")
        }


@pytest.mark.usefixtures("_piecewise")
def test_a_safetensors_file_is_the_one_that_the_library_writes(tmp_path: Path) -> None:
    export(_folder(tmp_path / "a.ckpt"), tmp_path / "found.safetensors")
    plain = {key: value.contiguous() for key, value in weights().items()}
    save_file(plain, tmp_path / "wanted.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "found.safetensors").read_bytes() == (
        tmp_path / "wanted.safetensors"
    ).read_bytes()
    assert _same(load_file(tmp_path / "found.safetensors"), weights())


def test_a_ckpt_file_holds_all_that_lightning_saves_and_numbers_for_parameters(
    tmp_path: Path,
) -> None:
    sums = torch.rand(3000, 16)
    state = {
        "optimizer": "torch.optim.adagrad.Adagrad",
        "state": {
            "b": {"step": torch.tensor(4.0)},
            "a": {"sum": by_rows(sums, 100), "step": torch.tensor(5.0)},
        },
        "param_groups": [{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "params": ["b"]}],
    }
    source = _folder(
        tmp_path / "a.ckpt",
        optimizer_states=[state],
        hyper_parameters={"dim": 4},
        callbacks={"c": 1},
    )
    export(source, tmp_path / "out.ckpt")
    actual = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert _same(actual.pop("state_dict"), weights())
    state_found = actual.pop("optimizer_states")[0]
    assert torch.equal(state_found["state"][0].pop("sum"), sums)
    assert state_found == {
        "state": {1: {"step": torch.tensor(4.0)}, 0: {"step": torch.tensor(5.0)}},
        "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}],
    }
    assert actual == {
        "epoch": 2,
        "global_step": 30,
        "pytorch-lightning_version": "2.6.0",
        "loops": {},
        "hyper_parameters": {"dim": 4},
        "callbacks": {"c": 1},
    }


@pytest.mark.parametrize("first", ["pt", "safetensors", "ckpt"])
def test_plain_files_become_one_another(tmp_path: Path, first: str) -> None:
    export(_folder(tmp_path / "a.ckpt"), tmp_path / f"first.{first}")
    for second, load in (("pt", torch.load), ("safetensors", load_file)):
        export(tmp_path / f"first.{first}", tmp_path / f"then.{second}")
        assert _same(load(tmp_path / f"then.{second}"), weights())


def test_tensors_that_share_memory_or_lie_in_larger_ones_become_tensors_of_their_own(
    tmp_path: Path,
) -> None:
    large = torch.rand(50, 8)
    tied = {
        "a": large,
        "b": large,
        "view": large[10:20, ::2],
        "parameter": torch.nn.Parameter(large[3]),
    }
    torch.save(tied, tmp_path / "tied.pt")
    for suffix, load in (("pt", torch.load), ("safetensors", load_file)):
        export(tmp_path / "tied.pt", tmp_path / f"out.{suffix}")
        assert _same(
            load(tmp_path / f"out.{suffix}"), {key: value.detach() for key, value in tied.items()}
        )
        assert 2 * large.nbytes + 200 < (tmp_path / f"out.{suffix}").stat().st_size


def _incomplete(folder: Path) -> Path:
    (_folder(folder / "a.ckpt") / "complete.json").unlink()
    return folder / "a.ckpt"


def _truncated(folder: Path) -> Path:
    path = _folder(folder / "a.ckpt")
    os.truncate(path / "rank_0.safetensors", 1000)
    return path


def _lacks_rows(folder: Path) -> Path:
    path = _folder(folder / "a.ckpt")
    edit_marker(path, lambda marker: marker["files"].pop("rank_0_1.safetensors"))
    return path


def _saved(content: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        torch.save(content, folder / "file.pt")
        return folder / "file.pt"

    return save


SPARSE = {"state_dict": {"a": torch.eye(3).to_sparse()}}


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (_saved(weights()), "out.onnx", r"its suffix decides what to write. Name it \*.pt or \*"),
        (_saved(weights()), "there.pt", "exists already. Choose another name, or replace it with"),
        (_saved(weights()), "folder.pt", "folder.pt is a folder, and a file is to be written."),
        (_saved(weights()), "no/out.pt", "the folder .*no does not exist. Create it first."),
        (lambda folder: folder / "none.ckpt", "out.pt", "there is no checkpoint .*none.ckpt"),
        (_incomplete, "out.pt", "complete.json, which is written last, is missing"),
        (_truncated, "out.pt", "is damaged: rank_0.safetensors has 1,000 bytes, and should have"),
        (_lacks_rows, "out.pt", "is damaged: the chunks of '.*' are not all of it"),
        (_saved(weights()), "out.ckpt", r"is a bare state_dict. .* Export it to \*.pt"),
        (_saved({"state_dict": {"x": 3}}), "out.safetensors", "'x' is a int, .* Export to a .pt"),
        (_saved(SPARSE), "out.safetensors", "'a' is a tensor of .*, and .* hold dense tensors"),
        (_saved(SPARSE), "out.pt", "'a' has the layout torch.sparse_coo, .* Make it dense."),
        (_saved({"a": 3, "b": []}), "out.pt", r"file.pt holds no state_dict, only \['a', 'b'\]"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    tmp_path: Path, source: Callable[[Path], Path], target: str, message: str
) -> None:
    (tmp_path / "there.pt").write_text("mine")
    (tmp_path / "folder.pt").mkdir()
    path = source(tmp_path)
    old = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=message):
        export(path, tmp_path / target)
    assert sorted(tmp_path.iterdir()) == old
    assert (tmp_path / "there.pt").read_text() == "mine"


def test_a_file_is_replaced_where_that_is_asked_for_but_never_a_folder(tmp_path: Path) -> None:
    source = _folder(tmp_path / "a.ckpt")
    (tmp_path / "there.pt").write_text("mine")
    export(source, tmp_path / "there.pt", overwrite=True)
    assert _same(torch.load(tmp_path / "there.pt", weights_only=True), weights())
    export(tmp_path / "there.pt", tmp_path / "there.pt", overwrite=True)
    assert _same(torch.load(tmp_path / "there.pt", weights_only=True), weights())
    with pytest.raises(CheckpointError, match="is a folder"):
        export(source, source, overwrite=True)


def test_too_little_space_raises_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _folder(tmp_path / "a.ckpt")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        CheckpointError, match=r"out.pt needs 260,\d+ bytes, and its file system has 1,000 free"
    ):
        export(source, tmp_path / "out.pt")


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "ckpt"])
@pytest.mark.parametrize("limit_bytes", [100, 100_000])
def test_a_write_that_fails_is_reported_and_leaves_nothing(
    tmp_path: Path, suffix: str, limit_bytes: int
) -> None:
    """A limit on files' sizes stands in for a full disk: torch's writer and ours meet it in the
    same way."""
    source = _folder(tmp_path / "a.ckpt")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, old[1]))
    try:
        with pytest.raises(
            CheckpointError, match=rf"out.{suffix} cannot be written: .* No file was left there."
        ):
            export(source, tmp_path / f"out.{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_an_export_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    source = _folder(tmp_path / "a.ckpt")

    def stop(written: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "out.pt", on_progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_progress_is_reported_and_ends_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks_module, "BLOCK_BYTES", 4000)
    messages: list[tuple[int, int]] = []
    export(
        _folder(tmp_path / "a.ckpt"),
        tmp_path / "out.pt",
        on_progress=lambda written, total: messages.append((written, total)),
    )
    total = sum(value.nbytes for value in weights().values())
    assert messages[-1] == (total, total)
    assert [written for written, _ in messages] == sorted(written for written, _ in messages)
    assert len(messages) > 50
