"""An ordinary LightningModule around TorchRec's DLRM, DLRM_DCN or DeepFM; nothing here knows of
ranks or shards.

Source of the shapes: Naumov et al., arXiv:1906.00091 (DLRM); Wang et al., arXiv:2008.13535 (DCN
V2); Guo et al., arXiv:1703.04247 (DeepFM); MLPerf Training.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN

from lightning_distrec.errors import ConfigError
from recipes.criteo_dlrm.columns import CATEGORIES, NUM_INTEGERS, table_rows

# More bins than a plot shows: the area differs by less than 0.0005, and the memory does not grow
# with the examples.
AUROC_BINS = 2000


def build_tables(max_rows: int, dim: int) -> EmbeddingBagCollection:
    """Return one table per category; a bag of several ids is summed, as in MLPerf."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"table_{category}",
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=[category],
            )
            for category, rows in zip(CATEGORIES, table_rows(max_rows), strict=True)
        ]
    )


class ClickModel(pl.LightningModule):
    """Predicts the chance of a click."""

    def __init__(
        self,
        max_rows: int = 40_000_000,
        dim: int = 128,
        bottom: list[int] | None = None,
        top: list[int] | None = None,
        arch: str = "dlrm",
        interaction: str = "dcn",
        dcn_layers: int = 3,
        dcn_rank: int = 512,
        table_learning_rate: float = 0.005,
        learning_rate: float = 0.005,
    ) -> None:
        """Set the size of the model and its learning rates; left out, those of MLPerf's DLRM-DCNv2.

        Args:
            max_rows: no table has more rows; the same as the data's.
            dim: numbers per embedding, a multiple of 4.
            bottom: widths of the hidden layers over the integers; a last one of width `dim` is
                added.
            top: widths of the hidden layers after the interaction; a last one of width 1 is added.
            arch: "dlrm", or "deepfm": a factorization machine beside one layer over all embeddings.
                That layer has the first width of `top`, and the layer over the integers the first
                of `bottom`.
            interaction: of "dlrm": "dot", as in DLRM, or "dcn", as in DCNv2.
            dcn_layers: cross layers of "dcn".
            dcn_rank: rank of their matrices.
            table_learning_rate: Adagrad's learning rate for the embedding tables.
            learning_rate: Adagrad's learning rate for everything else.
        """
        super().__init__()
        if interaction not in ("dot", "dcn"):
            raise ConfigError(f"interaction='{interaction}': use 'dot' or 'dcn'.")
        if arch not in ("dlrm", "deepfm"):
            raise ConfigError(f"arch='{arch}': use 'dlrm' or 'deepfm'.")
        if dim < 4 or dim % 4:
            raise ConfigError(f"dim={dim}: TorchRec's kernels want a multiple of 4.")
        self.save_hyperparameters()
        # Created in configure_model, where the strategy chooses the device.
        self.model: DLRM | SimpleDeepFMNN | None = None
        self.val_auroc = BinaryAUROC(thresholds=AUROC_BINS)
        self.test_auroc = BinaryAUROC(thresholds=AUROC_BINS)

    def configure_model(self) -> None:
        """Build tables and layers; Lightning calls this again before each fit, validate and
        test."""
        if self.model is not None:
            return
        set_to = self.hparams
        bottom, top = set_to["bottom"] or [512, 256], set_to["top"] or [1024, 1024, 512, 256]
        layers = {
            "dense_in_features": NUM_INTEGERS,
            "dense_arch_layer_sizes": [*bottom, set_to["dim"]],
            "over_arch_layer_sizes": [*top, 1],
        }
        tables = build_tables(set_to["max_rows"], set_to["dim"])
        if set_to["arch"] == "deepfm":
            self.model = SimpleDeepFMNN(
                NUM_INTEGERS, tables, hidden_layer_size=bottom[0], deep_fm_dimension=top[0]
            )
            # TorchRec's own last layer ends in a sigmoid; the loss here takes log-odds.
            self.model.over_arch = nn.Linear(set_to["dim"] + top[0] + 1, 1)
        elif set_to["interaction"] == "dot":
            self.model = DLRM(tables, **layers)
        else:
            cross = {"dcn_num_layers": set_to["dcn_layers"], "dcn_low_rank_dim": set_to["dcn_rank"]}
            self.model = DLRM_DCN(tables, **layers, **cross)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the log-odds of a click, (batch_size,)."""
        assert self.model is not None, "configure_model has not been called"
        return self.model(batch["dense"], batch["ids"]).squeeze(1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss = functional.binary_cross_entropy_with_logits(self(batch), batch["label"][:, 0])
        # rank 0's, every 50 steps: one epoch has a curve, too
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a batch to the validation's AUROC and log-loss."""
        self._evaluate("val", self.val_auroc, batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add a batch to the test's AUROC and log-loss."""
        self._evaluate("test", self.test_auroc, batch)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the chance of a click, (batch_size,)."""
        return torch.sigmoid(self(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adagrad: without weight decay, a table's update needs only the rows that were
        looked up."""
        assert self.model is not None, "configure_model has not been called"
        tables = list(self.model.sparse_arch.parameters())
        ids = {id(parameter) for parameter in tables}
        dense_parameters = [
            parameter for parameter in self.model.parameters() if id(parameter) not in ids
        ]
        return torch.optim.Adagrad([
            {"params": tables, "lr": self.hparams["table_learning_rate"]},
            {"params": dense_parameters, "lr": self.hparams["learning_rate"]},
        ])

    def _evaluate(self, split: str, auroc: BinaryAUROC, batch: dict[str, Any]) -> None:
        logits, label = self(batch), batch["label"][:, 0]
        auroc.update(torch.sigmoid(logits), label.long())
        log_loss = functional.binary_cross_entropy_with_logits(logits, label)
        self.log(
            f"{split}_log_loss", log_loss, prog_bar=True, batch_size=len(label), sync_dist=True
        )
        self.log(f"{split}_auroc", auroc, prog_bar=True, batch_size=len(label))
