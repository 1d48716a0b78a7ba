"""An ordinary LightningModule: one tower for people, one for films; near vectors belong together.

Nothing here shards a table. Evaluation shares out the films among the ranks: each scores everybody against its own.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_distrec.errors import ConfigError
from lightning_distrec.metrics import retrieval_metrics, slice_of_rank, target_ranks
from recipes.two_tower.features import FILM_TABLES, PERSON_TABLES, Catalogue
from recipes.two_tower.towers import Tower, in_batch_loss


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
        self.film_vectors: Tensor | None = None
        self.val_metrics = retrieval_metrics(10, prefix="val_")
        self.test_metrics = retrieval_metrics(10, prefix="test_")

    def configure_model(self) -> None:
        """Build the towers; Lightning calls this again before each fit, validate and test."""
        if self.people is None:
            sizes = {name: self.hparams[name] for name in ("dim", "hidden", "out")}
            self.people = Tower(PERSON_TABLES, **sizes)
            self.films = Tower(FILM_TABLES, **sizes)

    def encode_people(self, batch: dict[str, Tensor]) -> Tensor:
        """Return a vector for each person of a batch, (batch_size, out)."""
        assert self.people is not None, "configure_model has not been called"
        return self.people(batch["person_ids"], batch["person_lengths"])

    def encode_films(self, batch: dict[str, Tensor]) -> Tensor:
        """Return a vector for each film of a batch, (batch_size, out)."""
        assert self.films is not None, "configure_model has not been called"
        return self.films(batch["film_ids"], batch["film_lengths"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of finding each person's film among those of the batch."""
        people, films = self.encode_people(batch), self.encode_films(batch)
        loss = in_batch_loss(people, films, batch["item"], batch["log_share"], self.hparams["temperature"])
        # The mean over the epoch and all ranks; ranks exchange it once per epoch.
        size = len(batch["item"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=size, sync_dist=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Compute the vectors of this rank's films."""
        self.film_vectors = self._vectors_of_this_rank()

    def on_test_epoch_start(self) -> None:
        """Compute the vectors of this rank's films."""
        self.film_vectors = self._vectors_of_this_rank()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add a batch to the validation's metrics."""
        self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add a batch to the test's metrics."""
        self._evaluate(self.test_metrics, batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the vectors of people, (batch_size, dim), which films' vectors are compared with."""
        return self.encode_people(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adagrad: without weight decay, a table's update needs only the rows that were looked up."""
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

    def _vectors_of_this_rank(self) -> Tensor:
        # Lightning sets `datamodule` at run time.
        catalogue: Catalogue = self.trainer.datamodule.catalogue  # type: ignore[attr-defined]
        part = slice_of_rank(catalogue.num_films)
        batch: Any = catalogue.film_batch(1 + torch.arange(catalogue.num_films)[part])
        with torch.no_grad():
            return self.encode_films({name: tensor.to(self.device) for name, tensor in batch.items()})

    def _evaluate(self, metrics: MetricCollection, batch: dict[str, Tensor]) -> None:
        assert self.film_vectors is not None
        num_films = self.trainer.datamodule.catalogue.num_films  # type: ignore[attr-defined]
        # Places among the films: id 1 is the first. What a person has seen is not recommended again.
        ranks = target_ranks(
            self.encode_people(batch), batch["item"] - 1, self.film_vectors, num_films, excluded=batch["seen"] - 1
        )
        metrics.update(ranks)
        self.log_dict(metrics, batch_size=len(ranks))
