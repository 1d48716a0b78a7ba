"""Classes that pages show train as they do in one process."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from tests.docs.snippets import blocks_of
from tests.support.embedding_models import whole_state
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS, make_trainer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how_to/train_sharded.md"
IDS = torch.arange(48).reshape(6, 8) % 20
"""(num_steps, num_examples)."""


def _model() -> Any:
    (text,) = [
        block.text
        for block in blocks_of(PAGE.read_text("utf-8"))
        if "class WithTables" in block.text
    ]
    shown: dict[str, Any] = {}
    exec(text, shown)

    class Trained(shown["WithTables"]):
        def configure_model(self) -> None:
            super().configure_model()
            nn.init.constant_(self.ebc.embedding_bags["t"].weight, 0.5)

        def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
            features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))
            return (self.ebc(features).values().sum(1) - ids).square().mean()

        def configure_optimizers(self) -> None:
            """The table's steps in backward."""

        def on_train_end(self) -> None:
            self.final_state = whole_state(self)

    return Trained()


def _fit() -> dict[str, Tensor]:
    model = _model()
    make_trainer().fit(
        model,
        DataLoader(list(IDS.chunk(rank_and_num_ranks()[1], 1)[rank_and_num_ranks()[0]]), None),
    )
    return model.final_state


@pytest.mark.filterwarnings("ignore")
def test_a_table_that_a_page_gives_an_optimizer_in_backward_trains() -> None:
    expected = _model()
    pl.Trainer(strategy="auto", devices=1, **DEFAULTS).fit(expected, DataLoader(list(IDS), None))
    (weight,) = run_each_on_ranks({"fit": (_fit,)}, 2)[0]["fit"].values()
    torch.testing.assert_close(weight, next(expected.parameters()).detach())
    assert (weight - 0.5).abs().max() > 0.1
