"""A changed byte anywhere in a checkpoint is found by its checksums, which loading does not look at."""

import json
from pathlib import Path

import pytest
import torch

from lightning_distrec.checkpoint.contents import verify
from lightning_distrec.checkpoint.save import RankContent, take_folder_snapshot
from lightning_distrec.cli.command_line import EXIT_ERROR, EXIT_OK
from lightning_distrec.cli.main import main
from lightning_distrec.errors import CheckpointError
from tests.support.checkpoint_folders import SingleRank, by_rows, write_folder
from tests.support.plain_checkpoints import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a table in three pieces, and a layer."""
    state = {"table": by_rows(torch.rand(300, 16), 120), "layer": torch.rand(100, 90)}
    return write_folder(tmp_path / "it.ckpt", {"state_dict": state}, num_ranks=1)


def _flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def test_what_was_not_changed_is_as_it_was_written(folder: Path) -> None:
    read: list[int] = []
    assert verify(folder, read.append) == []
    assert sum(read) == sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".pt", ".distcp"))


def test_a_changed_number_of_a_table_is_named_and_loading_does_not_see_it(folder: Path) -> None:
    (tensors,) = folder.glob("*.distcp")
    old = load(folder, 0, 1).checkpoint["state_dict"]["table"].read()
    position = tensors.read_bytes().index(old[7].numpy().tobytes()) + 5
    _flip(tensors, position)
    assert verify(folder) == [f"'state_dict/table' in {tensors.name}"]
    assert not torch.equal(load(folder, 0, 1).checkpoint["state_dict"]["table"].read(), old)
    assert main(["checkpoint", "inspect", str(folder), "--verify"]) == EXIT_ERROR


def test_a_plain_file_is_verified_too(tmp_path: Path) -> None:
    state = {"layer": torch.rand(50)}
    torch.save(state, tmp_path / "a.pt")
    assert main(["checkpoint", "inspect", str(tmp_path / "a.pt"), "--verify"]) == EXIT_OK
    _flip(tmp_path / "a.pt", (tmp_path / "a.pt").read_bytes().index(state["layer"].numpy().tobytes()) + 20)
    assert verify(tmp_path / "a.pt") == ["a.pt"]
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="old.pt has no checksums"):
        verify(tmp_path / "old.pt")


def test_a_file_without_checksums_inside_is_compared_with_what_the_marker_has(tmp_path: Path) -> None:
    path = (tmp_path / "it.ckpt").absolute()
    whole = {"state_dict": {"layer": torch.rand(3)}}
    content = RankContent(path=path, checkpoint=whole, extra_files={"plan.json": b"{1}", "notes": b"12"})
    take_folder_snapshot(content, SingleRank()).write(SingleRank())
    assert verify(path) == []
    (path / "notes").write_bytes(b"13")
    assert verify(path) == ["notes"]
    (path / "plan.json").write_bytes(b"{2}")
    assert verify(path) == ["notes", "plan.json"]
    marker = json.loads((path / "complete.json").read_text())
    for checksums in ([1], {"../notes": 1}, {"gone": 1}):
        (path / "complete.json").write_text(json.dumps({**marker, "crc32": checksums}))
        with pytest.raises(CheckpointError, match="it.ckpt is damaged: its marker has no checksums, but "):
            verify(path)
