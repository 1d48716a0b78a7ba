"""A second model of a process takes the memory of a GPU that torch has kept of the first one, in
host memory."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.host_cuda.runs import device_ranks
from tests.support.trainers import make_trainer

TABLE_BYTES = 4 << 20
DEVICE_BYTES = 4 * TABLE_BYTES
DIM = 16


class Bag(pl.LightningModule):
    """One table, which is drawn again while it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(TABLE_BYTES // DIM // 4, DIM, mode="sum")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.bag(batch).mean()  # type: ignore[no-any-return]

    def on_train_start(self) -> None:
        nn.init.ones_(self.bag.weight)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_after_another() -> None:
    """Fit when torch has kept most of the device."""
    earlier = torch.empty(DEVICE_BYTES - TABLE_BYTES // 2, dtype=torch.uint8, device="cuda")
    kept = earlier.numel()
    del earlier
    free, total = torch.cuda.mem_get_info()
    assert free == total - kept < TABLE_BYTES, "the driver counts it as taken"
    trainer = make_trainer(
        {"convert_embeddings": "all"}, accelerator="gpu", max_steps=1, max_epochs=None
    )
    trainer.fit(Bag(), DataLoader(torch.arange(32).view(8, 4), batch_size=2))


@pytest.mark.slow
def test_what_torch_has_kept_of_an_earlier_model_is_free() -> None:
    with device_ranks(1, DEVICE_BYTES) as ranks:
        (seen,) = ranks.call(fit_after_another)
    assert not seen.error, seen.error
