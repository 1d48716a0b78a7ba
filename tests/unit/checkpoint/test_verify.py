"""A changed byte anywhere in a checkpoint is found by its checksums, before anything of it is
loaded."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_distrec.checkpoint import checksums
from lightning_distrec.checkpoint.atomic_folder import MARKER
from lightning_distrec.checkpoint.checksums import (
    SummedFile,
    changed_files,
    checksums_of,
)
from lightning_distrec.checkpoint.contents import open_checkpoint, read_full, verify
from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.checkpoint.plain_state import map_nested
from lightning_distrec.checkpoint.save import RankContent, take_folder_snapshot
from lightning_distrec.checkpoint.single_file import take_file_snapshot
from lightning_distrec.cli.command_line import EXIT_ERROR
from lightning_distrec.cli.main import main
from lightning_distrec.errors import CheckpointError
from lightning_distrec.serving.export_checkpoint import export
from lightning_distrec.strategies.checkpoints.checkpoint_io import read_checked
from tests.support.checkpoint_folders import SingleRank, by_rows, write_folder
from tests.support.plain_checkpoints import load
from tests.support.resuming import differences
from tests.support.trainers import one_process_trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a table in three pieces, and a layer."""
    state = {"table": by_rows(torch.rand(300, 16), 120), "layer": torch.rand(100, 90)}
    return write_folder(tmp_path / "it.ckpt", {"state_dict": state}, num_ranks=1)


def _flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def test_a_changed_number_of_a_table_is_found_by_what_reads_all_of_it(
    folder: Path, tmp_path: Path
) -> None:
    tensors = folder / "rank_0.safetensors"
    table = load(folder, 0, 1).checkpoint["state_dict"]["table"].read()
    position = tensors.read_bytes().index(table[7].numpy().tobytes()) + 5
    _flip(tensors, position)
    assert verify(folder) == [tensors.name]
    damage = r"it.ckpt is damaged: rank_0.safetensors does not match its checksum"
    with pytest.raises(CheckpointError, match=damage):
        read_full(folder, with_optimizers=False)
    with pytest.raises(CheckpointError, match=damage):
        export(folder, tmp_path / "it.pt")
    assert not (tmp_path / "it.pt").exists()
    assert main(["checkpoint", "inspect", str(folder), "--verify"]) == EXIT_ERROR


def test_a_changed_marker_is_no_marker(folder: Path) -> None:
    text = (folder / MARKER).read_text()
    (folder / MARKER).write_text(text.replace('"global_step": 30', '"global_step": 31'))
    with pytest.raises(
        CheckpointError, match="complete.json is damaged: it does not match its checksum"
    ):
        verify(folder)


def test_a_changed_byte_of_any_file_is_found(folder: Path) -> None:
    assert verify(folder) == []
    for file in sorted(folder.iterdir()):
        for position in (0, file.stat().st_size // 2, file.stat().st_size - 1):
            if file.name != MARKER:
                _flip(file, position)
                assert verify(folder) == [file.name]
                _flip(file, position)


def _content(path: Path) -> Any:
    """Return all that a restart reads of a checkpoint."""
    loaded = read_checked(lambda: open_checkpoint(path), path, SingleRank(), False, False)  # type: ignore[arg-type]
    content = [loaded.checkpoint, loaded.rank_state, loaded.rank_0_state]
    return map_nested(content, lambda leaf, _: materialized(leaf))


@pytest.mark.parametrize("take", [take_folder_snapshot, take_file_snapshot])
def test_what_loads_of_a_damaged_checkpoint_is_what_was_saved(take: Any, tmp_path: Path) -> None:
    state = {"table": by_rows(torch.rand(240, 50), 80), "layer": torch.rand(64, 70)}
    checkpoint = {"state_dict": state, "epoch": 2, "global_step": 30, "loops": {}}
    path, numbers, num_errors = tmp_path / "it.ckpt", random.Random(0), 0
    rank_state = {"generators": torch.arange(5000, dtype=torch.uint8)}
    saved = RankContent(path=path, checkpoint=checkpoint, rank_state=rank_state)
    take(saved, SingleRank()).write(SingleRank())
    expected = _content(path)
    files = [path] if path.is_file() else sorted(path.iterdir())
    for number in range(80):
        # Large files more often, but small ones too: markers, metadata.
        file = numbers.choices(files, [file.stat().st_size ** 0.5 for file in files])[0]
        content = file.read_bytes()
        begin, size = numbers.randrange(len(content)), numbers.choice([1, 64, 4096])
        damaged = bytes(255 - byte for byte in content[begin : begin + size])
        damage = (damaged, bytes(len(damaged)), b"")[number % 3]
        file.write_bytes(content[:begin] + damage + content[begin + size :])
        try:
            assert differences(_content(path), expected, "checkpoint", 0.0) == [], (file, begin)
        except CheckpointError as error:
            num_errors += path.name in str(error)
        file.write_bytes(content)
    assert num_errors > 60


class Layer(pl.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(40, 40)


def test_load_from_checkpoint_compares_the_checksums_of_a_plain_file(tmp_path: Path) -> None:
    trainer = one_process_trainer()
    trainer.strategy.connect(Layer())
    trainer.save_checkpoint(path := tmp_path / "plain.ckpt")
    weight = trainer.model.layer.weight.detach()
    assert torch.equal(Layer.load_from_checkpoint(path).layer.weight, weight)
    _flip(path, path.read_bytes().index(weight.numpy().tobytes()) + 7)
    with pytest.raises(
        CheckpointError, match=r"plain.ckpt is damaged: archive/data/0 in plain.ckpt does not match"
    ):
        Layer.load_from_checkpoint(path)


class OneOf(SingleRank):
    """One of some ranks, one after the other: each takes its share, the last one has the others'
    too."""

    def __init__(self, rank: int, num_ranks: int, shares: list[Any]) -> None:
        self.rank, self.num_ranks, self.shares = rank, num_ranks, shares

    def all_gather(self, value: Any) -> list[Any]:
        self.shares.append(value)
        # What ranks to come would report is not known yet: only the last one's result counts.
        return self.shares if len(self.shares) == self.num_ranks else [value]


def test_ranks_read_each_byte_once_and_find_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 1000)
    sizes = {"a": 0, "b": 1, "c": 12_345, "d": 999, "e": 1000, "f": 1001}
    contents = {name: bytes(i % 251 for i in range(size)) for name, size in sizes.items()}
    files = []
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        files.append(SummedFile(name, tmp_path / name, len(content), checksums_of(content)))
    _flip(tmp_path / "c", 11_111)
    (tmp_path / "f").write_bytes(contents["f"][:-1])
    read: list[int] = []
    read_block = checksums.read_crc32

    def note_size(path: Path, begin: int, size: int) -> int:
        read.append(size)
        return read_block(path, begin, size)

    monkeypatch.setattr(checksums, "read_crc32", note_size)
    for num_ranks in (1, 2, 3, 7):
        read.clear()
        shares: list[Any] = []
        num_read = []
        for rank in range(num_ranks):
            before = len(read)
            changed = changed_files(files, OneOf(rank, num_ranks, shares))
            num_read.append(len(read) - before)
        assert changed == ["c", "f"]
        assert sum(read) == sum(sizes.values())
        assert max(num_read) <= len(read) // num_ranks + 1
    with pytest.raises(CheckpointError, match="the ranks see different files in the place of .*a"):
        changed_files(files, OneOf(1, 2, [(7, [])]))
