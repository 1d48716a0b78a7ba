"""An ordinary LightningModule: one tower for people, one for films; near vectors belong together.

Nothing here shards a table. Evaluation shares out the films among the ranks: each scores everybody
against its own.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchrec import KeyedJaggedTensor

from lightning_distrec.errors import ConfigError
from lightning_distrec.metrics import retrieval_metrics, slice_of_rank, target_ranks
from lightning_distrec.retrieval import SampledFrequency, in_batch_loss
from recipes.two_tower.features import FILM, PERSON, table_rows
from recipes.two_tower.towers import Tower


class TwoTower(pl.LightningModule):
    """Predicts which film a person rates next."""

    def __init__(
        self,
        dim: int = 32,
        hidden: int = 64,
        out: int = 32,
        temperature: float = 0.1,
        table_learning_rate: float = 0.05,
        learning_rate: float = 0.01,
    ) -> None:
        """Set the size of the towers and their learning rates.

        Args:
            dim: numbers per embedding, a multiple of 4.
            hidden: width of the towers' hidden layers.
            out: numbers per vector.
            temperature: what scores are divided by in the loss; scores are cosines.
            table_learning_rate: Adagrad's learning rate for the embedding tables.
            learning_rate: Adagrad's learning rate for everything else.
        """
        super().__init__()
        if dim < 4 or dim % 4:
            raise ConfigError(f"dim={dim}: TorchRec's kernels want a multiple of 4.")
        self.save_hyperparameters()
        # Created in configure_model, where the strategy chooses the device.
        self.people: Tower | None = None
        self.films: Tower | None = None
        self.frequency = SampledFrequency(num_buckets=table_rows(FILM)["item"])
        # Set as validation or test begins: of this rank's films, and what people have seen.
        self.film_vectors: Tensor | None = None
        self.seen: Tensor | None = None
        self.val_metrics = retrieval_metrics(10, prefix="val_")
        self.test_metrics = retrieval_metrics(10, prefix="test_")

    def configure_model(self) -> None:
        """Build the towers; Lightning calls this again before each fit, validate and test."""
        if self.people is None:
            sizes = {name: self.hparams[name] for name in ("dim", "hidden", "out")}
            self.people = Tower(table_rows(PERSON), **sizes)
            self.films = Tower(table_rows(FILM), **sizes)

    def sparse_inputs(self, batch: dict[str, Any]) -> dict[str, KeyedJaggedTensor]:
        """Return the features of people and those of films; strategies that prefetch lookups call
        this, too."""
        people, films = batch["ids"].split([len(PERSON), len(FILM)])
        return {"people": people, "films": films}

    def encode_people(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return a vector for each person, (batch_size, out). ids: the features of PERSON."""
        assert self.people is not None, "configure_model has not been called"
        return self.people(ids)

    def encode_films(self, ids: KeyedJaggedTensor) -> Tensor:
        """Return a vector for each film, (batch_size, out). ids: the features of FILM."""
        assert self.films is not None, "configure_model has not been called"
        return self.films(ids)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the loss of finding each person's film among those of all ranks' batches."""
        film, _ = batch["label"].long().unbind(1)
        ids = self.sparse_inputs(batch)
        loss = in_batch_loss(
            self.encode_people(ids["people"]),
            self.encode_films(ids["films"]),
            film,
            log_q=self.frequency(film),
            temperature=self.hparams["temperature"],
        )
        # The mean over the epoch and all ranks; ranks exchange it once per epoch.
        size = len(film)
        self.log(
            "train_loss",
            loss,
            on_step=False,
            on_epoch=True,
            prog_bar=True,
            batch_size=size,
            sync_dist=True,
        )
        return loss

    def on_validation_epoch_start(self) -> None:
        """Compute the vectors of this rank's films."""
        self._prepare("val")

    def on_test_epoch_start(self) -> None:
        """Compute the vectors of this rank's films."""
        self._prepare("test")

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a batch to the validation's metrics."""
        self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a batch to the test's metrics."""
        self._evaluate(self.test_metrics, batch)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the vectors of people, (batch_size, dim), which films' vectors are compared
        with."""
        return self.encode_people(self.sparse_inputs(batch)["people"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adagrad: without weight decay, a table's update needs only the rows that were
        looked up."""
        assert self.people is not None, "configure_model has not been called"
        assert self.films is not None, "configure_model has not been called"
        return torch.optim.Adagrad([
            {
                "params": [*self.people.tables.parameters(), *self.films.tables.parameters()],
                "lr": self.hparams["table_learning_rate"],
            },
            {
                "params": [*self.people.layers.parameters(), *self.films.layers.parameters()],
                "lr": self.hparams["learning_rate"],
            },
        ])

    def _prepare(self, part: str) -> None:
        # Lightning sets `datamodule` at run time.
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        ids = data.film_batch(slice_of_rank(len(data.films)))["ids"]
        with torch.no_grad():
            self.film_vectors = self.encode_films(ids.to(self.device))
        self.seen = data.seen(part).to(self.device)

    def _evaluate(self, metrics: MetricCollection, batch: dict[str, Any]) -> None:
        assert self.film_vectors is not None
        assert self.seen is not None
        film, row = batch["label"].long().unbind(1)
        num_films = len(self.trainer.datamodule.films)  # type: ignore[attr-defined]
        people = self.predict_step(batch, 0)
        # What a person has seen is not recommended again.
        metrics.update(
            target_ranks(people, film, self.film_vectors, num_films, excluded=self.seen[row])
        )
        self.log_dict(metrics, batch_size=len(row))
