"""Random ids for all tables of a module: every kind of table is looked up, and nothing else
trains."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)

from lightning_distrec.observe.bench.synthetic import SyntheticIds
from tests.support.trainers import one_process_trainer


class Kinds(pl.LightningModule):
    """All kinds of tables, some of them built in configure_model, and a step for data that there is
    not."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.bag, self.layer = (
            nn.Embedding(30, 8),
            nn.EmbeddingBag(20, 8),
            nn.Linear(8, 1),
        )
        config = EmbeddingConfig(name="s", embedding_dim=8, num_embeddings=40, feature_names=["s"])
        self.sequences = EmbeddingCollection([config])
        self.bags: nn.Module = nn.Identity()

    def configure_model(self) -> None:
        config = EmbeddingBagConfig(
            name="w", embedding_dim=8, num_embeddings=50, feature_names=["a", "b"]
        )
        self.bags = EmbeddingBagCollection([config], is_weighted=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise AssertionError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_every_kind_of_table_is_looked_up_and_nothing_else_trains() -> None:
    model = Kinds()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    one_process_trainer(max_epochs=-1, max_steps=10).fit(
        model, datamodule=SyntheticIds(batch_size=16, ids_per_feature=2)
    )
    after = dict(model.named_parameters())
    changed = {name: int((after[name] != values).any(-1).sum()) for name, values in before.items()}
    assert changed["layer.weight"] == changed["layer.bias"] == 0
    # Of 8 x 16 x 2 ids most rows are drawn.
    assert all(
        changed[f"{name}.weight"] > 15 for name in ("rows", "bag", "sequences.embeddings.s")
    ), changed
    assert all(parameter.grad is not None for name, parameter in after.items() if "bags" in name)
