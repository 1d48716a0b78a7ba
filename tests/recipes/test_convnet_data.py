"""The pictures of the ResNet recipe: CIFAR-10's own files, moved and mirrored for training."""

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_distrec.errors import ConfigError
from recipes.convnet.data import BORDER, DEVIATION, MEAN, SIZE, TextureDataModule
from recipes.convnet.model import ResNet18

PER_FILE = 6


def _write_files(folder: Path) -> np.ndarray:
    """Write files as CIFAR-10's, and return all records: a class and 3 x 32 x 32 bytes each."""
    draw = np.random.default_rng(1)
    records = draw.integers(0, 256, (6 * PER_FILE, 1 + 3 * SIZE * SIZE), dtype=np.uint8)
    records[:, 0] = draw.integers(0, 10, len(records))
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        records[number * PER_FILE : (number + 1) * PER_FILE].tofile(folder / f"{name}.bin")
    return records


def test_cifar10s_files_are_read_and_pictures_of_training_are_moved_and_mirrored(
    tmp_path: Path,
) -> None:
    records = _write_files(tmp_path)
    data = TextureDataModule(batch_size=4, num_train=50_000, data_dir=str(tmp_path))
    assert (len(data.train), len(data.val)) == (5 * PER_FILE, PER_FILE)  # type: ignore[arg-type]
    raw = torch.from_numpy(records[:, 1:].reshape(-1, 3, SIZE, SIZE)) / 255
    for number, (picture, kind) in enumerate(data.val):  # type: ignore[arg-type, misc]
        torch.testing.assert_close(picture * DEVIATION + MEAN, raw[5 * PER_FILE + number])
        assert kind == records[5 * PER_FILE + number, 0]
        if number == PER_FILE - 1:
            break
    padded = torch.nn.functional.pad((raw[7] - MEAN) / DEVIATION, [BORDER] * 4)
    places = {}
    for down in range(2 * BORDER + 1):
        for across in range(2 * BORDER + 1):
            window = padded[:, down : down + SIZE, across : across + SIZE]
            places[down, across, False], places[down, across, True] = window, window.flip(2)
    torch.manual_seed(3)
    drawn = [data.train[7] for _ in range(20)]
    seen = {
        place
        for picture, _ in drawn
        for place, window in places.items()
        if torch.allclose(picture, window)
    }
    assert len(seen) > 10
    assert {mirrored for *_, mirrored in seen} == {False, True}
    assert all(kind == records[7, 0] for _, kind in drawn)
    trainer = pl.Trainer(accelerator="cpu", devices=1, fast_dev_run=2, enable_model_summary=False)
    trainer.fit(ResNet18(channels=2, blocks_per_stage=1), data)
    (tmp_path / "data_batch_3.bin").write_bytes(b"0" * 100)
    with pytest.raises(
        ConfigError, match="data_batch_5.bin of CIFAR-10's binary version are needed"
    ):
        TextureDataModule(data_dir=str(tmp_path))
