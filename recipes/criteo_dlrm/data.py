"""The batches: click logs in Criteo's format, or generated ones, in order of time."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet
from torchmetrics.functional.classification import binary_auroc

from lightning_distrec.data import ColumnData, Hash, Number, Vocabulary
from lightning_distrec.errors import ConfigError
from recipes.criteo_dlrm.columns import (
    CATEGORIES,
    COLUMNS,
    INTEGERS,
    LABEL,
    MLPERF_BAG_SIZES,
    table_rows,
)
from recipes.criteo_dlrm.generator import TASKS
from recipes.criteo_dlrm.write_logs import PURCHASE, TRUTH, write_logs

MAX_VOCABULARY = 100_000
"""Tables of more rows take values by hash: counting all values of Criteo 1TB would take long."""


class CriteoDataModule(ColumnData):
    """Will this person click? The oldest examples train, the next validate, the newest test, as in
    Criteo's logs.

    A batch has the ids of 26 categories, 13 dense numbers, and the label: (batch_size, 2) generated
    clicks and purchases, or (batch_size, 1) clicks of files.
    """

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
        num_workers: int = 1,
    ) -> None:
        """Set where the data is and how batches are made of it.

        Args:
            files: .tsv, .txt, .gz or .parquet files in order of time. Left out: examples are
                generated.
            cache_dir: where generated examples and converted text are kept, as Parquet.
            batch_size: examples per rank and step.
            max_rows: no table has more rows; further values share rows, or are unknown. As the
                model's.
            multi_hot: each category is a list of values, as in MLPerf's DLRM-DCNv2; so must columns
                of files be.
            num_examples: how many to generate.
            max_ids: how many different ids a generated category has at most.
            seed: of the generator.
            val_fraction: share of the examples that validates.
            test_fraction: share of the examples, the newest, that tests.
            num_workers: threads that read and encode ahead of the batches.
        """
        if min(max_rows, num_examples, max_ids) < 1:
            raise ConfigError("max_rows, num_examples and max_ids must be at least 1.")
        bags = "-bags" if multi_hot else ""
        self.generated = (
            None if files else Path(cache_dir, f"{num_examples}-{max_ids}-{seed}{bags}.parquet")
        )
        self.generator: dict[str, Any] = {
            "examples": num_examples,
            "max_ids": max_ids,
            "seed": seed,
            "multi_hot": multi_hot,
        }
        bag_sizes: Sequence[int | None] = (
            MLPERF_BAG_SIZES if multi_hot else (None,) * len(CATEGORIES)
        )
        tables = zip(CATEGORIES, table_rows(max_rows), bag_sizes, strict=True)
        kinds = {
            name: (Vocabulary if rows <= MAX_VOCABULARY else Hash)(rows=rows, max_length=size)
            for name, rows, size in tables
        }
        super().__init__(
            train=files or self.generated,
            features=kinds | {name: Number(log=True) for name in INTEGERS},
            label=[LABEL] if files else [LABEL, PURCHASE],
            val=val_fraction,
            test=test_fraction,
            batch_size=batch_size,
            num_workers=num_workers,
            cache_dir=cache_dir,
            delimiter="\t",
            column_names=list(COLUMNS),
            label_range=(0, 1),
        )

    def prepare_data(self) -> None:
        """Generate the examples if they are not there yet; one process per node does this."""
        if self.generated is not None and not self.generated.exists():
            self.generated.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.generated.parent) as scratch:
                write_logs(str(unfinished := Path(scratch, "all.parquet")), **self.generator)
                # In one step: another node that shares the disk may write the same file.
                os.replace(unfinished, self.generated)
        super().prepare_data()

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return what the planted truth itself reaches on validation: no model can do better, but
        by luck.

        With files there is none: their truth is unknown.
        """
        if self.generated is None:
            return {}
        first, size = (
            sum(group.num_rows for group in self.groups[name]) for name in ("train", "val")
        )
        columns = parquet.read_table(self.generated, columns=[*TRUTH, LABEL, PURCHASE]).slice(
            first, size
        )
        scores: dict[str, float] = {}
        for task, truth_column, label_column in zip(TASKS, TRUTH, (LABEL, PURCHASE), strict=True):
            truth, label = (
                torch.tensor(columns[name].to_numpy()) for name in (truth_column, label_column)
            )
            entropy = torch.nn.functional.binary_cross_entropy_with_logits(truth, label.float())
            values = {"auroc": float(binary_auroc(truth, label)), "log_loss": float(entropy)}
            scores |= {f"val_{metric}_{task}": value for metric, value in values.items()}
            if task == TASKS[0]:
                scores |= {f"val_{metric}": value for metric, value in values.items()}
        return {"best possible": scores}
