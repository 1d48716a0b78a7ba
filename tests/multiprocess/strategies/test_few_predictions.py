"""Fewer examples than ranks: each is predicted once, or an error on every rank says what is
missing."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from lightning_distrec.errors import DataError
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

STRATEGIES: dict[str, Any] = {
    "ddp_tuned": TunedDDPStrategy,
    "fsdp_tuned": TunedFSDPStrategy,
    "torchrec_sharded": lambda: TorchRecShardedStrategy(convert_embeddings="all"),
}


class Doubles(pl.LightningModule):
    """Doubles a number, beside a lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.table(batch[0])
        return batch[0] * 2


def _predict(name: str) -> list[int] | str:
    loader = DataLoader(TensorDataset(torch.tensor([7])), batch_size=4)
    options = DEFAULTS | {"use_distributed_sampler": True}
    trainer = pl.Trainer(strategy=STRATEGIES[name](), devices=rank_and_num_ranks()[1], **options)
    try:
        return [int(number) for batch in trainer.predict(Doubles(), loader) for number in batch]
    except DataError as error:
        return str(error)


def test_one_example_is_predicted_once_or_ranks_that_take_part_need_a_batch() -> None:
    predicted = run_each_on_ranks({name: (_predict, name) for name in STRATEGIES}, 2)
    assert [rank["ddp_tuned"] for rank in predicted] == [[14], []]
    words = "the ranks have 1, 0 batches of DataLoader: none that all of them have"
    for rank in predicted:
        assert words in rank["fsdp_tuned"]
        assert words in rank["torchrec_sharded"]
