"""Writes what `predict` returns as one Parquet file, in the order of the data, from any number of
ranks."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_distrec.errors import ConfigError, DataError, require
from lightning_distrec.observe.throughput import value_at

INDEX = "index"
LOADER = "dataloader"
PREDICTION = "prediction"
BUFFERED_ROWS = 65_536


class PredictionWriter(BasePredictionWriter):
    """Writes a row for each example that is predicted: its index in the dataset, columns of its
    batch, predictions.

    `predict_step` returns a tensor whose first dim is the number of examples (column "prediction"),
    or a dict or tuple of these (columns by name, or "prediction_0", ...). Each rank writes a part
    next to the file, and rank 0 joins them in its memory, in the order of the dataset. The columns
    `keep` of ColumnData are written, too.

    Args:
        path: the file, *.parquet, in a folder that all ranks share; one that exists is replaced.
        columns: what of each batch is written too, as keys, positions or attributes joined by dots:
            "user", "0.item".
    """

    def __init__(self, path: str, columns: list[str] | None = None) -> None:
        super().__init__("batch")
        if not path.endswith(".parquet"):
            raise ConfigError(
                f"predictions are written as Parquet, and '{path}' is not named *.parquet."
            )
        require("pyarrow", f"writing {path}")
        self._path = Path(path)
        self._columns = list(columns or [])
        self._tables: list[Any] = []
        self._num_rows = 0
        self._writer: Any = None
        self._counts: dict[int, int] = {}

    @property
    def _parts(self) -> Path:
        return self._path.with_name(f"{self._path.name}.parts")

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Make the folder of the parts."""
        self._tables = []
        self._num_rows = 0
        self._writer = None
        self._counts = {}
        if trainer.is_global_zero:
            shutil.rmtree(self._parts, ignore_errors=True)  # of a run that was ended
            self._parts.mkdir(parents=True)
        trainer.strategy.barrier()

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keep the rows of a batch. Raises DataError: its examples are not known, or not those of
        the prediction."""
        if prediction is None:  # a rank of pipeline_parallel whose stage is not the last
            return
        import pyarrow

        predictions = _named(prediction)
        num_rows = len(next(iter(predictions.values())))
        loader = _loaders(trainer)[dataloader_idx]
        if hasattr(loader, "row_indices"):  # ColumnData's
            batch_indices = loader.row_indices(batch_idx)
        columns = {
            INDEX: pyarrow.array(self._indices(trainer, batch_indices, num_rows, dataloader_idx))
        }
        if trainer.num_predict_batches and len(trainer.num_predict_batches) > 1:
            columns[LOADER] = pyarrow.array([dataloader_idx] * num_rows)
        extra = {name: value_at(batch, name, "columns") for name in self._columns}
        for name, value in {**extra, **predictions}.items():
            columns[name] = _arrow(name, value, num_rows)
        self._tables.append(pyarrow.table(columns))
        self._num_rows += num_rows
        if self._num_rows >= BUFFERED_ROWS:
            self._flush(trainer.global_rank)

    def _indices(
        self, trainer: Trainer, indices: Sequence[int] | None, num_rows: int, loader: int
    ) -> Sequence[int]:
        if indices and len(indices) == num_rows:
            return indices
        if indices:
            raise DataError(
                f"predict_step returned {num_rows} rows for a batch of {len(indices)} examples; "
                "predictions need one for each example, as the first dim."
            )
        if trainer.world_size > 1:
            raise DataError(
                "predictions cannot be brought into the order of the data: over several ranks, "
                "that needs a DataLoader of a dataset with a length. Predict on one rank "
                "(--trainer.devices=1), or return each row's id from predict_step and write the "
                "rows yourself, in a BasePredictionWriter."
            )
        begin = self._counts.get(loader, 0)
        self._counts[loader] = begin + num_rows
        return range(begin, begin + num_rows)

    def _flush(self, rank: int) -> None:
        import pyarrow
        from pyarrow import parquet

        if not self._tables:
            return
        table = pyarrow.concat_tables(self._tables)
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._parts / f"{rank}.parquet", table.schema)
        self._writer.write_table(table)
        self._tables = []
        self._num_rows = 0

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Join the parts of all ranks. Raises DataError: rank 0 does not see all."""
        self._flush(trainer.global_rank)
        if self._writer is not None:
            self._writer.close()
        (self._parts / f"{trainer.global_rank}.done").touch()
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            num_parts = len(list(self._parts.glob("*.done")))
            if num_parts < trainer.world_size:
                raise DataError(
                    f"{self._parts} has the parts of {num_parts} of {trainer.world_size} ranks. "
                    "Write to a folder that all nodes share."
                )
            num_rows = self._join(_loaders(trainer)[0])
            rank_zero_info(f"Wrote {num_rows:,} predictions to {self._path}.")
        trainer.strategy.barrier()

    def _join(self, loader: Any) -> int:
        import pyarrow
        from pyarrow import parquet

        tables = list(map(parquet.read_table, sorted(self._parts.glob("*.parquet"))))
        if not tables:
            raise DataError("predict_step returned nothing, so there is nothing to write.")
        table = pyarrow.concat_tables(tables)
        keys = [name for name in (LOADER, INDEX) if name in table.column_names]
        table = table.sort_by([(name, "ascending") for name in keys])
        # A rank that is one row short of a batch has one of its neighbour's.
        places = numpy.stack([table[name].to_numpy() for name in keys])
        is_first = (places[:, 1:] != places[:, :-1]).any(axis=0)
        table = table.filter(numpy.append(True, is_first))
        if hasattr(loader, "row_indices"):
            kept = loader.dataset.kept_columns()
            for name in kept.column_names:
                table = table.append_column(name, kept[name].take(table[INDEX]))
        new = self._path.with_name(f"{self._path.name}.new")
        parquet.write_table(table, new)
        new.replace(self._path)
        shutil.rmtree(self._parts)
        return len(table)


def _loaders(trainer: Trainer) -> list[Any]:
    loaders = trainer.predict_dataloaders
    return loaders if isinstance(loaders, list) else [loaders]


def _named(prediction: Any) -> dict[str, Any]:
    if isinstance(prediction, Tensor):
        return {PREDICTION: prediction}
    if isinstance(prediction, Mapping) and prediction:
        return {str(name): value for name, value in prediction.items()}
    if isinstance(prediction, (list, tuple)) and prediction:
        names = getattr(prediction, "_fields", None) or [
            f"{PREDICTION}_{i}" for i in range(len(prediction))
        ]
        return dict(zip(names, prediction, strict=True))
    raise DataError(
        f"predict_step returned a {type(prediction).__name__}: predictions are written of a "
        "tensor, or of a dict or tuple of tensors."
    )


def _arrow(name: str, value: Any, num_rows: int) -> Any:
    """Return a column, with lists for tensors of several dims. Raises DataError: it has not one
    entry for each row."""
    import pyarrow

    if isinstance(value, Tensor) and value.ndim and len(value) == num_rows:
        value = value.detach().cpu()
        return _nested(
            (value.float() if value.dtype == torch.bfloat16 else value).contiguous().numpy()
        )
    if isinstance(value, (list, tuple)) and len(value) == num_rows:
        return pyarrow.array(value)
    size = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
    raise DataError(f"'{name}' is {size}, and not one entry for each of {num_rows} examples.")


def _nested(array: Any) -> Any:
    import pyarrow

    if array.ndim == 1:
        return pyarrow.array(array)
    return pyarrow.FixedSizeListArray.from_arrays(
        _nested(array.reshape(-1, *array.shape[2:])), array.shape[1]
    )
