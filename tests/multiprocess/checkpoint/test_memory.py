"""Memory of checkpoints: those that are written in the background leave none behind, an export takes
a part of a table's."""

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.checkpoint_folders import by_columns, write_folder
from tests.support.ranks import run_on_ranks
from tests.support.trainers import make_trainer

pytestmark = pytest.mark.slow

ROWS, BATCH = 200_000, 32
STEPS, EVERY = 240, 4


class Table(pl.LightningModule):
    """A table of 12 MB, with Adagrad's state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, 16)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return self.table(ids).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Saves(pl.Callback):
    """Saves every few steps, under two names in turns, and notes the bytes that the process holds
    then."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.held_bytes: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        number, remainder = divmod(trainer.global_step, EVERY)
        if remainder == 0:
            trainer.save_checkpoint(f"{self.folder}/{number % 2}.ckpt")
            status = Path("/proc/self/status").read_text()
            self.held_bytes.append(1024 * int(status.partition("RssAnon:")[2].split()[0]))


def held_after_saves(folder: str) -> list[int]:
    """Train on this rank, and return what it held after each save."""
    saves, draw = Saves(folder), torch.Generator().manual_seed(0)
    batches = [torch.randint(0, ROWS, (BATCH, 2), generator=draw) for _ in range(STEPS)]
    checkpoint = {"distributed": False, "async_save": True}
    strategy = {"convert_embeddings": "all", "checkpoint": checkpoint}
    trainer = make_trainer(strategy, callbacks=[saves], default_root_dir=folder)
    trainer.fit(Table(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return saves.held_bytes


def test_a_process_does_not_grow_with_checkpoints_in_the_background(tmp_path: Path) -> None:
    (held,) = run_on_ranks(held_after_saves, 1, str(tmp_path))
    assert len(held) == STEPS // EVERY
    tenth = len(held) // 10
    early = statistics.median(held[tenth : 2 * tenth])
    late = statistics.median(held[-tenth:])
    assert late < 1.05 * early, [num_bytes >> 20 for num_bytes in held]


EXPORT = """
import re, sys
from pathlib import Path
from lightning_distrec.serving.export_checkpoint import export

def held(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = held("VmRSS")
export(Path(sys.argv[1]), Path(sys.argv[2]))
assert "torchrec" not in sys.modules
print(1024 * (held("VmHWM") - before))
"""


def test_a_table_is_exported_within_a_part_of_its_memory(tmp_path: Path) -> None:
    table = torch.arange(2**27, dtype=torch.int32).view(-1, 64)  # 512 MiB
    folder = tmp_path / "large.ckpt"
    write_folder(folder, {"state_dict": {"table.weight": by_columns(table, 16, 32, 48)}})
    command = [sys.executable, "-c", EXPORT, str(folder), str(tmp_path / "out.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**28
    exported = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert torch.equal(exported["table.weight"], table)
