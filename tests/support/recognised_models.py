"""Models that call their tables in all ways in which the inputs of a lookup come out of a batch."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from tests.support.embedding_models import whole_state
from tests.support.plain_loop import OPTIMIZERS
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

STEPS, SIZES = 5, (6, 6, 4, 6, 3)
ROWS, COLUMNS, DIM = 40, 6, 8
CUTS = ("table_wise", "row_wise", "column_wise")
Batch = dict[str, Any]


def draw(step: int, rank: int, size: int | None = None) -> Batch:
    """Return one rank's batch of plain tensors; bags of feature "f" and "g" have 0 to 3 ids."""
    size = SIZES[step % len(SIZES)] if size is None else size
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, ROWS, shape, generator=generator)

    lengths = torch.randint(0, 4, (2 * size,), generator=generator)
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = int(ends[-1])
    return {
        "values": ids(total),
        "lengths": lengths,
        "offsets": ends,
        "weights": torch.rand(total, generator=generator) + 0.5,
        "sparse": ids(size, COLUMNS),
        "user": ids(size, 5),
        "positive": ids(size, 5),
        "negative": ids(size, 5),
        "label": torch.randint(0, 2, (size,), generator=generator).float(),
    }


class Recommender(pl.LightningModule):
    """Looks up and scores; keeps its losses, its state, what was sent ahead.

    optimizer: a name of `OPTIMIZERS`.
    """

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.optimizer_name = optimizer
        self.build()
        self.score = nn.LazyLinear(1)
        self.losses: list[float] = []
        self.final_state: dict[str, Tensor] = {}
        self.counts: dict[str, tuple[int, int]] = {}
        with torch.no_grad():
            self.score(self.rows(self.prepared(draw(0, 0), 0), 0))

    def build(self) -> None:
        """Make the tables."""
        self.table = nn.Embedding(ROWS, DIM)

    def prepared(self, batch: Batch, step: int) -> Any:
        """Return the batch of a step in the form that the loader gives it."""
        return batch

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        """Return what was looked up, (size, columns)."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.rows(batch, batch_idx))
        self.log("loss", loss, batch_size=1)
        return loss

    def loss(self, rows: Tensor) -> Tensor:
        """Return the loss of looked up rows, and keep it."""
        loss = (self.score(rows.float()) - 0.3).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.optimizer_name]
        return kind(self.parameters(), **options)

    def keep(self) -> None:
        """Keep what lookups were sent ahead."""
        ahead = self.trainer.strategy.lookups_ahead
        self.counts = {kind: (count.lookups, count.ahead) for kind, count in ahead.items()}

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)
        self.keep()


class Bags(Recommender):
    """Over an EmbeddingBagCollection of two tables."""

    weighted = False

    def build(self) -> None:
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
                ),
                EmbeddingBagConfig(
                    name="u", num_embeddings=ROWS, embedding_dim=2 * DIM, feature_names=["g", "f"]
                ),
            ],
            is_weighted=self.weighted,
        )

    def features(self, batch: Any) -> KeyedJaggedTensor:
        """Return what is looked up."""
        raise NotImplementedError

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return self.ebc(self.features(batch)).values()


def jagged(batch: Batch, **parts: Any) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor of the batch's values."""
    return KeyedJaggedTensor(["f", "g"], batch["values"], **parts)


class WholeKjt(Bags):
    """The batch has the KeyedJaggedTensor."""

    def prepared(self, batch: Batch, step: int) -> Any:
        return {"features": jagged(batch, lengths=batch["lengths"]), "label": batch["label"]}

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return batch["features"]


@dataclass
class Clicks:
    """A batch as a dataclass."""

    label: Tensor
    inner: list[Any]


class DataclassBatch(Bags):
    """The KeyedJaggedTensor lies in a list in a dataclass."""

    def prepared(self, batch: Batch, step: int) -> Any:
        return Clicks(batch["label"], [jagged(batch, lengths=batch["lengths"])])

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return batch.inner[0]


class TupleBatch(Bags):
    """The batch is a tuple."""

    def prepared(self, batch: Batch, step: int) -> Any:
        return jagged(batch, lengths=batch["lengths"]), batch["label"]

    def features(self, batch: Any) -> KeyedJaggedTensor:
        features, _ = batch
        return features


class ByLengths(Bags):
    """The KeyedJaggedTensor is made in the step, of lengths."""

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return jagged(batch, lengths=batch["lengths"])


class ByLengthsSync(Bags):
    """The same, synchronized."""

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return KeyedJaggedTensor.from_lengths_sync(["f", "g"], batch["values"], batch["lengths"])


class ByOffsetsSync(Bags):
    """The same, of offsets."""

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return KeyedJaggedTensor.from_offsets_sync(["f", "g"], batch["values"], batch["offsets"])


class Weighted(Bags):
    """The same with a weight for each id."""

    weighted = True

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return jagged(batch, offsets=batch["offsets"], weights=batch["weights"])


class OneEach(Bags):
    """One id for each example and feature, the lengths made in the step."""

    def features(self, batch: Any) -> KeyedJaggedTensor:
        values = batch["sparse"].view(-1)
        return KeyedJaggedTensor(
            ["f", "g"], values, lengths=torch.full((2 * len(batch["label"]),), 3)
        )


class OneEachAtFirst(ByOffsetsSync):
    """One id in each bag of the first batch only."""

    def prepared(self, batch: Batch, step: int) -> Any:
        if step > 0:
            return batch
        number = len(batch["lengths"])
        return batch | {
            "values": batch["sparse"].flatten()[:number].clone(),
            "offsets": torch.arange(number + 1),
        }

    def features(self, batch: Any) -> KeyedJaggedTensor:
        features = jagged(batch, offsets=batch["offsets"])
        features.lengths()
        return features


def rank_of_this() -> int:
    """Return this rank's number."""
    return rank_and_num_ranks()[0]


class Sequences(Recommender):
    """Over an EmbeddingCollection."""

    def build(self) -> None:
        self.ec = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
                ),
                EmbeddingConfig(
                    name="u", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["g"]
                ),
            ]
        )

    def prepared(self, batch: Batch, step: int) -> Any:
        return jagged(batch, lengths=batch["lengths"]), batch["label"]

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.ec(batch[0])
        return torch.cat([rows["f"].values().sum(0), rows["g"].values().sum(0)]).unsqueeze(0)


class SixColumns(Recommender):
    """One nn.Embedding for each column of a matrix of ids."""

    def build(self) -> None:
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(COLUMNS))

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.cat([table(batch["sparse"][:, i]) for i, table in enumerate(self.tables)], 1)


class BagsOfMatrix(Recommender):
    """An nn.EmbeddingBag over ranges of columns."""

    def build(self) -> None:
        self.table = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.other = nn.EmbeddingBag(ROWS, DIM, mode="sum")

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.cat(
            [self.table(batch["sparse"]), self.other(input=batch["sparse"][:, 2:5])], 1
        )


class BagsByOffsets(Recommender):
    """An nn.EmbeddingBag with offsets and weights."""

    def build(self) -> None:
        self.table = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True)

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return self.table(batch["values"], batch["offsets"], per_sample_weights=batch["weights"])


class BagsOfOne(Recommender):
    """An nn.EmbeddingBag whose offsets the step makes."""

    def build(self) -> None:
        self.table = nn.EmbeddingBag(ROWS, DIM, mode="sum")

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["sparse"].view(-1)
        return self.table(ids, torch.arange(0, len(ids), COLUMNS))


class CalledThrice(Recommender):
    """One nn.Embedding for a user's items, the next and another one."""

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        user = self.table(batch["user"])
        return (
            (user * self.table(batch["positive"])) - (user * self.table(batch["negative"]))
        ).mean(1)


class Hooked(ByLengths):
    """Makes ids in the hooks around the batch's way to the device; counts their calls."""

    def __init__(self, optimizer: str = "SGD") -> None:
        self.calls = {"before": 0, "transfer": 0, "after": 0}
        super().__init__(optimizer)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls["before"] += 1
        return batch | {"values": (batch["values"] * 7 + 1) % ROWS}

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.calls["transfer"] += 1
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch | {"values": (batch["values"] * 3 + 2) % ROWS}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls["after"] += 1
        return batch | {"values": (batch["values"] * 11 + 3) % ROWS}


class HookedData(pl.LightningDataModule):
    """The same hooks, of a datamodule."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches
        self.calls = {"before": 0, "transfer": 0, "after": 0}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    on_before_batch_transfer = Hooked.on_before_batch_transfer
    on_after_batch_transfer = Hooked.on_after_batch_transfer

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.calls["transfer"] += 1
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch | {"values": (batch["values"] * 3 + 2) % ROWS}


class Declares(Bags):
    """Makes what it looks up in sparse_inputs; keeps what that returned."""

    def __init__(self, optimizer: str = "SGD") -> None:
        self.made: list[Any] = []
        self.in_step: list[Any] = []
        super().__init__(optimizer)
        self.made.clear()
        self.in_step.clear()

    def sparse_inputs(self, batch: Any) -> Any:
        """Return the features: two columns one after the other, hashed."""
        ids = torch.cat([batch["sparse"][:, 1], batch["sparse"][:, 4]]) * 13 % ROWS
        features = KeyedJaggedTensor(
            ["f", "g"], ids, lengths=torch.ones(len(ids), dtype=torch.long)
        )
        self.made.append(features)
        return {"features": features, "batch": batch}

    def features(self, batch: Any) -> KeyedJaggedTensor:
        features = self.sparse_inputs(batch)["features"]
        assert self.sparse_inputs(batch)["features"].keys() == ["f", "g"]
        self.in_step.append(features)
        return features


class TargetFirst(Recommender):
    """Looks rows of a target up without a gradient, before those that learn."""

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.table(batch["positive"])
        assert not target.requires_grad
        learning = self.table(batch["user"])
        assert learning.requires_grad or not torch.is_grad_enabled()
        return (learning * (1 + target)).mean(1)


class TargetLast(Recommender):
    """The same the other way round, of the same ids too."""

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        learning = self.table(batch["user"])
        with torch.no_grad():
            targets = [self.table(batch["user"]), self.table(batch["positive"])]
        assert not any(target.requires_grad for target in targets)
        return (learning * (1 + targets[0] + targets[1])).mean(1)


class TargetBags(Bags):
    """The same over a collection of bags."""

    def prepared(self, batch: Batch, step: int) -> Any:
        return {
            "one": jagged(batch, lengths=batch["lengths"]),
            "other": jagged(batch, lengths=batch["lengths"].flip(0)),
        }

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.ebc(batch["other"]).values()
        assert not target.requires_grad
        return self.ebc(batch["one"]).values() * (1 + target)


class ChangesRate(Recommender):
    """Changes the learning rate inside of its step, before it looks up."""

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        if self._trainer is not None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.5 / (1 + batch_idx)
        return self.table(batch["user"]).mean(1)


class ChangesRateOfBags(WholeKjt):
    """The same over a collection, in every other step."""

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        if self._trainer is not None and batch_idx % 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
        return super().rows(batch, batch_idx)


class Freezes(Recommender):
    """Freezes and unfreezes a table inside of its step."""

    def build(self) -> None:
        self.table, self.other = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        for weight in self.table.parameters():
            weight.requires_grad_(batch_idx not in (1, 2))
        return (self.table(batch["user"]) * self.other(batch["positive"])).mean(1)


class EveryOther(Recommender):
    """Looks one of its tables up in every other step only."""

    parity = 0

    def build(self) -> None:
        self.table, self.other = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.table(batch["user"])
        return (
            rows * self.other(batch["positive"]) if batch_idx % 2 == self.parity else rows
        ).mean(1)


class EveryOtherLater(EveryOther):
    """The same, not in the first step."""

    parity = 1


class EveryOtherBags(WholeKjt):
    """Looks its collection up in every other step only."""

    def build(self) -> None:
        super().build()
        self.table = nn.Embedding(ROWS, 5 * DIM)

    def prepared(self, batch: Batch, step: int) -> Any:
        return super().prepared(batch, step) | {"ids": batch["user"][:, 0]}

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.table(batch["ids"])
        return rows if batch_idx % 2 else rows + super().rows(batch, batch_idx)


class Alternates(Recommender):
    """Manual optimization: the second lookup sees what the first backward has updated."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return self.table(batch["user"]).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        tables, dense = self.optimizers()
        for ids, optimizers in (
            (batch["user"], [tables]),
            (batch["user"], [tables, dense]),
            (batch["negative"], [dense]),
        ):
            loss = self.loss(self.table(ids).mean(1))
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.optimizer_name]
        return kind(self.table.parameters(), **options), kind(self.score.parameters(), **options)


class StepsFirst(Recommender):
    """Manual optimization: the gradients of the step before are used at the beginning of a step."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return self.table(batch["user"]).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        if batch_idx:
            optimizer.step()
            optimizer.zero_grad()
        self.manual_backward(self.loss(self.rows(batch, batch_idx)))


# -- not recognised


class Hashes(ByLengths):
    """Makes its ids in the step."""

    def features(self, batch: Any) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["f", "g"], batch["values"] * 3 % ROWS, lengths=batch["lengths"])


class WritesFirst(ByLengths):
    """Writes its ids in place, in every step."""

    def features(self, batch: Any) -> KeyedJaggedTensor:
        batch["values"].mul_(3).remainder_(ROWS)
        return super().features(batch)


class Positions(Recommender):
    """Looks positions up, which no batch has."""

    def build(self) -> None:
        self.table, self.position = nn.Embedding(ROWS, DIM), nn.Embedding(5, DIM)

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.table(batch["user"]) * self.position(torch.arange(5))).mean(1)


class OneType(Positions):
    """Looks up the same number for all."""

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return self.table(batch["user"]).mean(1) * self.position(
            torch.ones(len(batch["user"]), dtype=torch.long)
        )


class OneOfTwo(Recommender):
    """One of two tables gets ids that are made in the step."""

    def build(self) -> None:
        self.table, self.other = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.table(batch["user"]) * self.other(batch["positive"] * 3 % ROWS)).mean(1)


class Shifted(Recommender):
    """All items but the last, and all but the first, of sequences as long as the longest of their
    batch."""

    def prepared(self, batch: Batch, step: int) -> Any:
        return batch | {"user": batch["user"][:, : (3, 5, 2, 3, 4)[step]].clone()}

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.table(batch["user"][:, :-1]) * self.table(batch["user"][:, 1:])).mean(1)


class OneTensorFirst(Recommender):
    """Two entries of the first batch are one tensor, those of later batches are not."""

    def prepared(self, batch: Batch, step: int) -> Any:
        return batch | ({"positive": batch["user"]} if step == 0 else {})

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.table(batch["user"]) * self.table(batch["positive"])).mean(1)


class LooksOnRankZero(Bags):
    """Rank 0 looks at its rows before all ranks add a number up."""

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.ebc(jagged(batch, lengths=batch["lengths"]))
        if self._trainer is not None:
            if self.global_rank == 0 and batch_idx > 0:
                rows.values().norm()
            self.trainer.strategy.reduce(torch.ones(1), reduce_op="sum")
        return rows.values()


class Evaluated(CalledThrice):
    """Has all steps; the second validation loader's batches are tuples."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__(optimizer)
        self.all_counts: dict[str, tuple[int, int]] = {}

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.table(batch["user"]) * self.table(batch["positive"])).mean(1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        first, other = (batch["user"], batch["negative"]) if dataloader_idx == 0 else batch
        self.log(
            "validated",
            self.score(self.table(first) * self.table(other)).mean(),
            sync_dist=True,
            batch_size=1,
        )

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log(
            "tested",
            self.score(self.table(batch["sparse"][:, 1])).mean(),
            sync_dist=True,
            batch_size=1,
        )

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.score(self.table(batch[0]).mean(1))

    def keep_more(self) -> None:
        """Keep the lookups of the run that ends."""
        self.keep()
        self.all_counts |= self.counts

    on_validation_end = on_test_end = on_predict_end = keep_more

    def on_train_end(self) -> None:
        super().on_train_end()
        self.keep_more()


def evaluate(depth: int) -> dict[str, Any]:
    """Fit with two validation loaders, test and predict; returns what was logged, predicted and
    counted."""
    rank = rank_of_this()
    model = Evaluated()

    def loader(make: Callable[[Batch], Any], first: int) -> DataLoader:
        batches = [make(draw(step, rank)) for step in range(first, first + STEPS)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    validating = [
        loader(dict, 10),
        loader(lambda batch: (batch["sparse"][:, :5], batch["user"]), 20),
    ]
    options: dict[str, Any] = {"convert_embeddings": "all", "prefetch": {"depth": depth}}
    trainer = make_trainer(options, num_sanity_val_steps=1)
    metrics: dict[str, float] = {}

    def log() -> None:
        metrics.update({
            f"{trainer.state.fn} {name}": float(value)
            for name, value in trainer.callback_metrics.items()
        })

    trainer.fit(model, loader(dict, 0), validating)
    log()
    trainer.validate(model, validating, verbose=False)
    log()
    trainer.test(model, loader(dict, 30), verbose=False)
    log()
    predicted = trainer.predict(model, loader(lambda batch: [batch["user"]], 40))
    return {
        "metrics": metrics,
        "predicted": predicted,
        "state": model.final_state,
        "counts": model.all_counts,
    }


class GoesWrong(Recommender):
    """Does something else in its third step, on some ranks."""

    fault, ranks = "", ()

    def build(self) -> None:
        self.table, self.other = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

    def wrong(self, fault: str, batch_idx: int) -> bool:
        """Whether to do this now."""
        return (
            self._trainer is not None
            and batch_idx == 2
            and self.fault == fault
            and self.global_rank in self.ranks
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.wrong("written", batch_idx):
            batch["user"].add_(1).remainder_(ROWS)

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = batch_idx
        if self.wrong("fails before", batch_idx):
            raise KeyError("out of cheese")
        rows = self.table(batch["negative" if self.wrong("another entry", batch_idx) else "user"])
        if self.wrong("fails between", batch_idx):
            raise KeyError("out of cheese")
        other = self.other(batch["user" if self.wrong("second entry", batch_idx) else "positive"])
        return (rows * other).mean(1)


def go_wrong(fault: str, ranks: tuple[int, ...], rows: str) -> tuple[str, str, float, int]:
    """Train a model that goes wrong; returns what was raised, after how many seconds, in which
    step."""
    model = GoesWrong()
    model.fault, model.ranks = fault, ranks
    batches = [draw(step, rank_of_this(), size=6) for step in range(STEPS)]
    options = {"convert_embeddings": "all", "sharding_types": [rows]}
    begin = time.perf_counter()
    try:
        make_trainer(options).fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - begin, model.last
    return "", "nothing was raised", time.perf_counter() - begin, model.last


# -- one fit


def fit(
    kind: type[Recommender],
    depth: int,
    optimizer: str = "SGD",
    strategy: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    datamodule: Callable[[list[Any]], Any] | None = None,
) -> dict[str, Any]:
    """Train on this rank; returns losses, state, counts, the reasons that were said, calls of
    hooks."""
    model = kind(optimizer)
    batches = [model.prepared(draw(step, rank_of_this()), step) for step in range(STEPS)]
    model.losses.clear()
    started = {name: value.clone() for name, value in model.state_dict().items()}
    data: Any = DataLoader(batches, batch_size=None) if datamodule is None else datamodule(batches)  # type: ignore[arg-type]
    options = {"convert_embeddings": "all", "prefetch": {"depth": depth}} | (strategy or {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        running = make_trainer(options, **(trainer or {}))
        if datamodule is None:
            running.fit(model, data)
        else:
            running.fit(model, datamodule=data)
    calls = getattr(model if datamodule is None else data, "calls", None)
    return {
        "losses": model.losses,
        "logged": {name: float(value) for name, value in running.callback_metrics.items()},
        "state": model.final_state,
        "counts": model.counts,
        "said": [
            str(warning.message)
            for warning in caught
            if "looked up as it is called" in str(warning.message)
        ],
        "calls": calls,
        "declared": _declared(model),
        "moved": moved(started, model.final_state),
    }


def _declared(model: Recommender) -> tuple[int, bool] | None:
    if not isinstance(model, Declares):
        return None
    return len(model.made), all(
        made is other for made, other in zip(model.made, model.in_step, strict=False)
    )


def moved(earlier: dict[str, Tensor], later: dict[str, Tensor]) -> dict[str, float]:
    """Return how far each weight moved; on ranks without the whole state, nothing."""
    return {
        name: float((later[name] - value).abs().max())
        for name, value in earlier.items()
        if name in later
    }


def compare(kind: type[Recommender], *args: Any, depth: int = 3) -> dict[str, Any]:
    """Return what a fit with look-ahead found, and in "different" what is not as without it, bit
    for bit."""
    plain, ahead = fit(kind, 1, *args), fit(kind, depth, *args)
    different = [key for key in ("losses", "logged") if plain[key] != ahead[key]]
    different += [key for key in ("state",) if plain[key].keys() != ahead[key].keys()]
    different += [
        key for key, value in plain["state"].items() if not torch.equal(value, ahead["state"][key])
    ]
    return {
        **{key: value for key, value in ahead.items() if key != "state"},
        "different": different,
        "plain calls": plain["calls"],
    }


def compare_at_depth_two(kind: type[Recommender], *args: Any) -> dict[str, Any]:
    """The same with one batch ahead."""
    return compare(kind, *args, depth=2)
