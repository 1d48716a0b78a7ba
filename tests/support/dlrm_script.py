"""An ordinary training script around torchrec's own DLRM: nothing in it knows of sharding but
`--strategy`.

python -m tests.support.dlrm_script --strategy torchrec_sharded --devices 2
"""

import argparse
import json
import os

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

NUM_TABLES, NUM_ROWS, DIM, NUM_DENSE = 6, 500, 16, 4


class Clicks(Dataset):
    """Made-up clicks that depend on the ids."""

    def __init__(self, size: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, NUM_ROWS, (size, NUM_TABLES), generator=draw)
        self.dense = torch.randn(size, NUM_DENSE, generator=draw)
        self.label = ((self.ids[:, 0] % 2) ^ (self.ids[:, 1] % 2)).float()

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"ids": self.ids[i], "dense": self.dense[i], "label": self.label[i]}


class LitDLRM(pl.LightningModule):
    """DLRM as one would write it for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.names = [f"f{i}" for i in range(NUM_TABLES)]
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=[name]
            )
            for name in self.names
        ]
        self.net = DLRM(EmbeddingBagCollection(tables=tables), NUM_DENSE, [32, DIM], [32, 1])
        self.auroc = torchmetrics.classification.BinaryAUROC()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        lengths = torch.ones(ids.numel(), dtype=torch.long, device=ids.device)
        features = KeyedJaggedTensor(keys=self.names, values=ids.T.reshape(-1), lengths=lengths)
        return self.net(batch["dense"], features).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if os.environ.get("RAISE_ON_RANK") == str(self.global_rank) and batch_idx == 3:
            raise ValueError("the user's code failed")
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])
        self.log("loss", loss, prog_bar=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.auroc(self(batch), batch["label"].int())
        self.log("auroc", self.auroc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    """Train and print the metrics of rank 0 as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.strategy == "torchrec_sharded":
        import lightning_distrec  # noqa: F401  registers the strategies
    pl.seed_everything(1)
    model = LitDLRM()
    seen: list[str | None] = []
    look = pl.callbacks.LambdaCallback(
        on_train_start=lambda *_: seen.append(os.environ.get("LOCAL_WORLD_SIZE"))
    )
    trainer = pl.Trainer(
        callbacks=[look],
        strategy=arguments.strategy,
        devices=arguments.devices,
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = Clicks(2048)
    size = arguments.batch_size // arguments.devices
    trainer.fit(model, DataLoader(data, size, shuffle=False), DataLoader(data, size))
    if trainer.global_rank == 0:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        print(json.dumps({**metrics, "LOCAL_WORLD_SIZE": seen[0]}))


if __name__ == "__main__":
    main()
