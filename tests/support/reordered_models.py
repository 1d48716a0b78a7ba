"""Models whose batches have their features in changing orders, or lack one of them, and fits at two
depths."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

ROWS, SIZE = 40, 5
ORDERS = ("fgh", "fgh", "fgh", "hfg", "hfg", "fgh", "gfh", "fgh")
MISSING = ("fgh",) * 5 + ("fg", "fgh")


class Reordered(pl.LightningModule):
    """Looks features up, and weighs each of them differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.build()
        self.losses: list[float] = []
        self.ahead = (0, 0)

    def build(self) -> None:
        """Make the tables."""
        self.ebc = EmbeddingBagCollection([
            EmbeddingBagConfig(
                name=f"t_{key}", num_embeddings=ROWS, embedding_dim=4, feature_names=[key]
            )
            for key in "fgh"
        ])

    @staticmethod
    def batch(ids: dict[str, Tensor]) -> Any:
        """Return a batch of each feature's ids, in the order of `ids`."""
        raise NotImplementedError

    def rows(self, batch: Any) -> dict[str, Tensor]:
        """Return the rows of each feature."""
        return self.ebc(self.features(batch)).to_dict()

    def features(self, batch: Any) -> KeyedJaggedTensor:
        """Return what is looked up."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.rows(batch)
        loss = (
            sum(
                (rows[key] ** 2).sum() * weight
                for key, weight in zip("fgh", (1, 2, 3), strict=True)
            )
            / 100
        )
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_end(self) -> None:
        if count := self.trainer.strategy.lookups_ahead.get("training 0"):
            self.ahead = (count.lookups, count.ahead)


def one_each(keys: list[str], ids: Tensor) -> KeyedJaggedTensor:
    """Return features with one id in each bag."""
    return KeyedJaggedTensor(keys, ids, lengths=torch.ones(len(ids), dtype=torch.long))


class InKjt(Reordered):
    """The batch has the KeyedJaggedTensor."""

    @staticmethod
    def batch(ids: dict[str, Tensor]) -> Any:
        return {"features": one_each(list(ids), torch.cat(list(ids.values())))}

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return batch["features"]


class ByNames(Reordered):
    """The batch has the features' names, ids and lengths."""

    @staticmethod
    def batch(ids: dict[str, Tensor]) -> Any:
        values = torch.cat(list(ids.values()))
        return {
            "names": list(ids),
            "values": values,
            "lengths": torch.ones(len(values), dtype=torch.long),
        }

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(batch["names"], batch["values"], lengths=batch["lengths"])


class InDict(Reordered):
    """The batch is a dict of ids."""

    @staticmethod
    def batch(ids: dict[str, Tensor]) -> Any:
        return dict(ids)

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return one_each(list(batch), torch.cat(list(batch.values())))


class InList(Reordered):
    """The batch is a list of names and ids."""

    @staticmethod
    def batch(ids: dict[str, Tensor]) -> Any:
        return list(ids.items())

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return one_each([name for name, _ in batch], torch.cat([ids for _, ids in batch]))


class InDictOfKjts(Reordered):
    """The batch has a KeyedJaggedTensor for each feature."""

    @staticmethod
    def batch(ids: dict[str, Tensor]) -> Any:
        return {key: one_each([key], feature_ids) for key, feature_ids in ids.items()}

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return KeyedJaggedTensor.concat(list(batch.values()))


class TableOfName(InList):
    """A table for each name of the batch."""

    def build(self) -> None:
        self.tables = nn.ModuleDict({key: nn.Embedding(ROWS, 4) for key in "fgh"})

    def rows(self, batch: Any) -> dict[str, Tensor]:
        return {name: self.tables[name](ids) for name, ids in batch}


class TableOfKey(TableOfName):
    """A table for each key of the batch."""

    @staticmethod
    def batch(ids: dict[str, Tensor]) -> Any:
        return dict(ids)

    def rows(self, batch: Any) -> dict[str, Tensor]:
        return {name: self.tables[name](ids) for name, ids in batch.items()}


def fit(
    kind: type[Reordered], orders: tuple[str, ...], depth: int
) -> tuple[list[float], tuple[int, int], str]:
    """Train on this rank; returns losses, lookups and how many were sent ahead, and the error."""
    model, rank = kind(), rank_and_num_ranks()[0]
    batches = []
    for step, order in enumerate(orders):
        draw = torch.Generator().manual_seed(100 * step + rank)
        ids = {key: torch.randint(0, ROWS, (SIZE,), generator=draw) for key in "fgh"}
        batches.append(kind.batch({key: ids[key] for key in order}))
    error = ""
    trainer = make_trainer({"convert_embeddings": "all", "prefetch": {"depth": depth}})
    try:
        trainer.fit(model, DataLoader(batches, batch_size=None, collate_fn=_as_it_is))  # type: ignore[arg-type]
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return model.losses, model.ahead, error


def fit_at_both_depths(kind: type[Reordered], orders: tuple[str, ...]) -> Any:
    """Return what fits without and with look-ahead give."""
    return fit(kind, orders, 1), fit(kind, orders, 3)


def _as_it_is(batch: Any) -> Any:
    return batch
