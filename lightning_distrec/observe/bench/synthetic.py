"""Random ids for the embedding tables of any module, before there is data:
`lightning-distrec bench --synthetic`."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec import KeyedJaggedTensor
from typing_extensions import override

from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.sharding.tables import Table, find_tables

NUM_BATCHES = 8
"""They are drawn before the first step, and repeated."""


class SyntheticIds(pl.LightningDataModule):
    """Replaces a module's training step by lookups in all of its tables; its other layers are
    frozen.

    Args:
        batch_size: examples per rank and step.
        ids_per_feature: ids of each feature in an example, uniformly spread over the rows.
    """

    def __init__(self, batch_size: int, ids_per_feature: int = 1) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._num_ids = ids_per_feature
        self._tables: dict[str, list[Table]] = {}

    @override
    def setup(self, stage: str) -> None:
        # The Trainer sets itself.
        module = self.trainer.lightning_module  # type: ignore[union-attr]
        configure_model = module.configure_model

        def configure_and_take_over() -> None:
            configure_model()  # it may build the tables
            self._take_over(module)

        module.configure_model = configure_and_take_over  # type: ignore[method-assign]

    def _take_over(self, module: pl.LightningModule) -> None:
        for table in find_tables(module, Conversion("all")).tables:
            self._tables.setdefault(table.collection, []).append(table)
        if not self._tables:
            raise ConfigError(
                f"--synthetic: {type(module).__name__} has no embedding tables to look ids up in."
            )
        keys = {table.key for tables in self._tables.values() for table in tables}
        for name, parameter in module.named_parameters():
            if name not in keys:
                parameter.requires_grad_(False)
        module.training_step = partial(look_up, module)  # type: ignore[method-assign]

    @override
    def train_dataloader(self) -> DataLoader:
        draw = torch.Generator().manual_seed(self.trainer.global_rank)  # type: ignore[union-attr]
        batches = [self._batch(draw) for _ in range(NUM_BATCHES)]
        return DataLoader(_Endless(batches), batch_size=None)

    def _batch(self, draw: torch.Generator) -> dict[str, Any]:
        """Return path -> the input of the collection or the embedding there."""
        return {path: self._ids(tables, draw) for path, tables in self._tables.items()}

    def _ids(self, tables: list[Table], draw: torch.Generator) -> Any:
        shape = (self.batch_size, self._num_ids)
        ids = {}
        for table in tables:
            for feature in table.config.feature_names:
                ids[feature] = torch.randint(table.num_ids, shape, generator=draw)
        if tables[0].plain is not None:
            return next(iter(ids.values()))
        lengths = torch.full((len(ids) * self.batch_size,), self._num_ids)
        values = torch.cat([feature_ids.flatten() for feature_ids in ids.values()])
        is_weighted = getattr(tables[0].module, "is_weighted", lambda: False)()
        return KeyedJaggedTensor(
            list(ids), values, torch.ones(len(values)) if is_weighted else None, lengths
        )


class _Endless(IterableDataset[dict[str, Any]]):
    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return cycle(self._batches)


def look_up(module: nn.Module, batch: dict[str, Any], *_: Any) -> Tensor:
    """Return the sum of the means of what all tables return. batch: path -> input."""
    return torch.stack([
        _mean(module.get_submodule(path)(ids)) for path, ids in batch.items()
    ]).sum()


def _mean(output: Any) -> Tensor:
    if isinstance(output, tuple):  # with the ids' rows, of collections that map ids
        return _mean(output[0])
    if isinstance(output, Mapping):
        return torch.cat([jagged.values() for jagged in output.values()]).mean()
    values: Tensor = output if isinstance(output, Tensor) else output.values()
    return values.mean()
