"""A device without memory, at any stage of a job, is an error of torch or of ours on every rank;
nothing hangs. What torch has kept of an earlier model is free."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.host_cuda.matrix import CASES, STRATEGIES, batches_of, module_of
from tests.support.host_cuda.runs import DeviceRanks, device_ranks
from tests.support.ranks import RankFailed, rank_and_num_ranks, words_of_ranks
from tests.support.trainers import DEFAULTS, make_trainer

LIMIT_SECONDS = 60
MEMORY = 64 << 20
KINDS = {
    "torchrec_sharded": "bags, Adagrad",
    "ddp_tuned": "ddp_tuned",
    "fsdp_tuned": "fsdp_tuned",
    "pipeline_parallel": "pipeline_parallel",
}
STAGES = ("setup", "forward", "backward", "save")


class Fills(pl.Callback):
    """Takes all memory of some ranks' devices when a stage begins."""

    def __init__(self, stage: str, ranks: tuple[int, ...]) -> None:
        self.stage, self.ranks = stage, ranks
        self.taken: list[Tensor] = []

    def _fill(self, stage: str) -> None:
        size = MEMORY if stage == self.stage and rank_and_num_ranks()[0] in self.ranks else 0
        while size:
            try:
                self.taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2

    def setup(self, *_: Any, **__: Any) -> None:
        self._fill("setup")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._fill("forward")

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            self._fill("backward")

    def on_train_end(self, *_: Any) -> None:
        self._fill("save")


def train(case: str, stage: str, ranks: tuple[int, ...], path: str) -> None:
    """Train, and save."""
    settings: dict[str, Any] = DEFAULTS | {"accelerator": "gpu", "devices": 2, "max_steps": 4}
    strategy = STRATEGIES[CASES[case].strategy](**CASES[case].options)
    trainer = pl.Trainer(strategy=strategy, callbacks=[Fills(stage, ranks)], **settings)
    trainer.fit(module_of(CASES[case]), batches_of(CASES[case]))
    trainer.save_checkpoint(path)


@pytest.fixture(scope="module")
def devices() -> Iterator[DeviceRanks]:
    """Two ranks with little memory."""
    with device_ranks(2, MEMORY) as ranks:
        yield ranks


FULL = [("torchrec_sharded", stage, ranks) for stage in STAGES for ranks in ((1,), (0, 1))]
FULL += [(strategy, "backward", (0,)) for strategy in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "stage", "ranks"), FULL, ids=str)
def test_a_full_device_is_an_error_on_every_rank_within_seconds(
    devices: DeviceRanks, strategy: str, stage: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    path, case = str(tmp_path / "saved.ckpt"), KINDS[strategy]
    try:
        devices.call(train, case, stage, ranks, path, timeout_seconds=LIMIT_SECONDS, ends=True)
        words = {}
    except RankFailed as failed:
        words = words_of_ranks(failed)
    if stage == "save" and not words:
        return  # what is saved comes to the host piece by piece
    assert words.keys() == {0, 1}
    for rank, said in words.items():
        assert "was not done" not in said
        # Outside of a run torch tells the others that a rank has ended, and not why.
        assert "OutOfMemoryError: CUDA out of memory" in said or (
            stage == "save" and rank not in ranks
        )


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
