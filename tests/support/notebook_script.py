"""A program that trains on two ranks wherever it runs: as a script, by `python -`, or as cells of a
notebook."""

# %% what a user has in the first cells
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_distrec

FOLDER, STRATEGY, FAILS = os.environ["FOLDER"], os.environ["STRATEGY"], os.environ.get("FAILS", "")


class Ratings(pl.LightningModule):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(500, 8)
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if f"{self.global_rank} {self.global_step}" == FAILS:
            raise ValueError("on purpose")
        os.write(
            1,
            f"step {self.global_step} of rank {self.global_rank} in process "
            f"{os.getpid()};\n".encode(),
        )
        torch.ones(1_000_000).exp().sum()  # by OpenMP's threads, where a rank has more than one
        loss: Tensor = (self.layer(self.items(batch)) - 1).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("error", (self.layer(self.items(batch)) - 1).abs().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), 0.1)


def trainer(max_epochs: int) -> pl.Trainer:
    strategy: object = STRATEGY
    if STRATEGY == "torchrec_sharded":
        strategy = lightning_distrec.TorchRecShardedStrategy(min_rows=10)
    return pl.Trainer(
        strategy=strategy,  # type: ignore[arg-type]
        **{
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": max_epochs,
            "enable_progress_bar": False,
        },  # type: ignore[arg-type]
        **{"logger": False, "enable_model_summary": False, "default_root_dir": FOLDER},  # type: ignore[arg-type]
        callbacks=[ModelCheckpoint(monitor="error", filename="best")],
    )


torch.manual_seed(1)
torch.set_num_threads(2)
torch.randn(1_000_000).exp().sum()  # OpenMP has threads now, which a forked process would wait for
ids = torch.randint(0, 500, (96,))
module = Ratings()

# %%
first = trainer(int(os.environ.get("EPOCHS", "2")))
first.fit(module, DataLoader(ids, 8), DataLoader(ids, 8))
state = first.strategy.full_state_dict()  # type: ignore[attr-defined]
checkpoint = first.checkpoint_callback
actual = {
    "state": state,
    "metrics": {name: float(value) for name, value in first.callback_metrics.items()},
    "step": first.global_step,
    "epoch": first.current_epoch,
    "best": (float(checkpoint.best_model_score), checkpoint.best_model_path),  # type: ignore[union-attr, arg-type]
    "validated": first.validate(module, DataLoader(ids, 8), verbose=False),
}
if first.is_global_zero:
    torch.save(actual, os.path.join(FOLDER, "found.pt"))
