"""Hooks that are called ahead of the step of their batch may not go by counters, which are not
there yet."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.errors import ConfigError
from tests.support.trainers import one_process_trainer

READS: dict[str, Any] = {
    "global_step": lambda module: module.global_step,
    "fit_loop": lambda module: module.trainer.fit_loop.epoch_loop.batch_idx,
    "current_epoch": lambda module: module.epochs.append(module.current_epoch),
}
HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Hooked(pl.LightningModule):
    """Reads something in a hook of its batches."""

    def __init__(self, hook: str, read: str) -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(20, 4), READS[read]
        self.epochs: list[int] = []
        setattr(self, hook, self._called)

    def _called(self, batch: Tensor, *_: Any, **__: Any) -> Tensor:
        self.read(self)
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.table(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.table(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(hook: str, read: str, depth: int) -> list[int]:
    strategy = TorchRecShardedStrategy(convert_embeddings="all", prefetch={"depth": depth})
    module, data = Hooked(hook, read), DataLoader(torch.arange(12), batch_size=4)  # type: ignore[arg-type]
    one_process_trainer(strategy, max_epochs=2).fit(module, data, data)
    return module.epochs


@pytest.mark.parametrize("read", ["global_step", "fit_loop"])
def test_reading_a_counter_ahead_of_its_step_is_an_error(read: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"trainer\.{read} is read in a hook that prepares a batch"
    ):
        _fit(HOOKS[list(READS).index(read)], read, 2)


def test_counters_can_be_read_where_nothing_runs_ahead() -> None:
    assert _fit("on_after_batch_transfer", "global_step", 1) == []


def test_the_epoch_that_a_hook_reads_is_that_of_its_batch() -> None:
    for hook in HOOKS:
        epochs = _fit(hook, "current_epoch", 3)
        assert epochs == _fit(hook, "current_epoch", 1)
        assert len(epochs) > 6
