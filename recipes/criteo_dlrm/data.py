"""The batches: click logs in Criteo's format, or generated ones, in order of time."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics.functional.classification import binary_auroc

from lightning_distrec.errors import ConfigError
from recipes.criteo_dlrm.columns import MLPERF_BAG_SIZES, NUM_CATEGORIES, table_rows
from recipes.criteo_dlrm.generator import BLOCK, TASKS, Block, Generator
from recipes.criteo_dlrm.store import Store, open_store, write_store
from recipes.loaders import load_batches

# Steps between the ids that the multi-hot variant makes of one id: an odd number, spread over 32 bits.
BAG_STEP = 0x9E3779B1


class ClickLogs(Dataset):
    """Examples of a store; a batch is cut out of its arrays in one go."""

    def __init__(self, store: Store, rows: Sequence[int], bag_sizes: Sequence[int]) -> None:
        """rows: of each category's table. bag_sizes: ids of each category; 1: its own id alone."""
        self.store = store
        self.rows = np.array(rows, dtype=np.int64)
        self.bag_sizes = np.array(bag_sizes)

    def __len__(self) -> int:
        return len(self.store.tokens)

    def __getitem__(self, example: int) -> dict[str, Tensor]:
        return self.__getitems__([example])

    def __getitems__(self, examples: Sequence[int]) -> dict[str, Tensor]:
        """Return the batch of these examples; DataLoader calls this once per batch.

        ids: (sum of lengths,) int64, category after category, within it example after example.
        lengths: (26 * batch_size,) int32. dense: (batch_size, 13) float32. labels: (batch_size, num_tasks) float32.
        """
        indices = np.asarray(examples)
        tokens = self.store.tokens[indices].T.astype(np.int64)
        bags = [self._bags(category, tokens[category]) for category in range(NUM_CATEGORIES)]
        return {
            "ids": torch.from_numpy(np.concatenate(bags)),
            "lengths": torch.from_numpy(np.repeat(self.bag_sizes, len(indices)).astype(np.int32)),
            "dense": torch.from_numpy(self.store.dense[indices]),
            "labels": torch.from_numpy(self.store.labels[indices]),
        }

    def _bags(self, category: int, tokens: np.ndarray) -> np.ndarray:
        """Return the ids of one category, (batch_size * bag_size,): the token's own row, then rows derived from it."""
        steps = np.arange(self.bag_sizes[category], dtype=np.int64) * BAG_STEP
        ids = 1 + (tokens[:, None] + steps) % (self.rows[category] - 1)
        return np.where(tokens[:, None] == 0, 0, ids).ravel()


class CriteoDataModule(pl.LightningDataModule):
    """Will this person click? The oldest examples train, the next validate, the newest test, as in Criteo's logs."""

    def __init__(
        self,
        files: list[str] | None = None,
        cache_dir: str = "data/criteo",
        batch_size: int = 1024,
        max_rows: int = 40_000_000,
        multi_hot: bool = False,
        num_examples: int = 600_000,
        max_ids: int = 1_000_000,
        seed: int = 1,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        num_workers: int = 0,
    ) -> None:
        """Set where the data is and how batches are made of it.

        Args:
            files: .tsv, .txt, .gz or .parquet files in order of time. Left out: examples are generated.
            cache_dir: where examples are kept as arrays, 160 bytes each.
            batch_size: examples per rank and step.
            max_rows: no table has more rows; larger ranges of ids share rows, by the remainder. As the model's.
            multi_hot: several ids per category, derived from its own, as in MLPerf's DLRM-DCNv2.
            num_examples: how many to generate.
            max_ids: how many different ids a generated category has at most.
            seed: of the generator.
            val_fraction: share of the examples that validates.
            test_fraction: share of the examples, the newest, that tests.
            num_workers: processes that build batches; 0 builds them in the training process.
        """
        super().__init__()
        if min(batch_size, max_rows, num_examples, max_ids) < 1:
            raise ConfigError("batch_size, max_rows, num_examples and max_ids must be at least 1.")
        if min(val_fraction, test_fraction) <= 0 or val_fraction + test_fraction >= 1:
            raise ConfigError(
                f"val_fraction={val_fraction}, test_fraction={test_fraction}: "
                "both must be above 0 and leave some to train on."
            )
        self.files = [Path(file) for file in files or []]
        self.batch_size = batch_size
        self.num_examples, self.max_ids, self.seed = num_examples, max_ids, seed
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.num_workers = num_workers
        self.rows = table_rows(max_rows)
        self.bag_sizes = MLPERF_BAG_SIZES if multi_hot else (1,) * NUM_CATEGORIES
        self.folder = Path(cache_dir) / self._key()
        self.splits: dict[str, Subset] = {}

    def prepare_data(self) -> None:
        """Convert or generate the examples if they are not there yet; one process per node does this."""
        if not self.folder.is_dir():
            write_store(self._read() if self.files else self._generate(), self.folder)

    def setup(self, stage: str) -> None:
        """Open the examples and split them; every process does this, with the same result."""
        if self.splits:
            return
        examples = ClickLogs(open_store(self.folder), self.rows, self.bag_sizes)
        train_end = round(len(examples) * (1 - self.val_fraction - self.test_fraction))
        val_end = round(len(examples) * (1 - self.test_fraction))
        parts = {"train": range(train_end), "val": range(train_end, val_end), "test": range(val_end, len(examples))}
        self.splits = {name: Subset(examples, part) for name, part in parts.items()}

    def train_dataloader(self) -> DataLoader:
        """Batches in random order."""
        return self._dataloader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Batches in order of time."""
        return self._dataloader("val", shuffle=False)

    def test_dataloader(self) -> DataLoader:
        """Batches in order of time."""
        return self._dataloader("test", shuffle=False)

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return what the planted truth itself reaches on validation: no model can do better, but by luck.

        With files there is none: their truth is unknown.
        """
        if self.files:
            return {}
        examples = np.array(self.splits["val"].indices)
        store = open_store(self.folder)
        truth, labels = torch.from_numpy(store.log_odds[examples]), torch.from_numpy(store.labels[examples])
        scores: dict[str, float] = {}
        for task, name in enumerate(TASKS):
            entropy = torch.nn.functional.binary_cross_entropy_with_logits(truth[:, task], labels[:, task])
            values = {"auroc": binary_auroc(truth[:, task], labels[:, task].long()), "log_loss": entropy}
            scores |= {f"val_{metric}_{name}": float(value) for metric, value in values.items()}
            if task == 0:
                scores |= {f"val_{metric}": float(value) for metric, value in values.items()}
        return {"best possible": scores}

    def _read(self) -> Iterator[Block]:
        # pyarrow is needed for files alone.
        from recipes.criteo_dlrm.read_logs import read_log

        for file in self.files:
            yield from read_log(file)

    def _generate(self) -> Iterator[Block]:
        generator = Generator(self.seed, self.max_ids)
        for number in range(math.ceil(self.num_examples / BLOCK)):
            yield generator.block(number, min(BLOCK, self.num_examples - number * BLOCK))

    def _key(self) -> str:
        """Return a folder's name that changes with the files or with the generator's settings."""
        if not self.files:
            return f"generated-{self.num_examples}-{self.max_ids}-{self.seed}"
        facts = [
            (str(file.absolute()), *((stat.st_size, stat.st_mtime_ns) if (stat := _stat(file)) else ()))
            for file in self.files
        ]
        return "files-" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def _dataloader(self, split: str, *, shuffle: bool) -> DataLoader:
        dataset = self.splits[split]
        return load_batches(dataset, self.batch_size, shuffle=shuffle, num_workers=self.num_workers)


def _stat(file: Path) -> Any:
    return file.stat() if file.exists() else None
