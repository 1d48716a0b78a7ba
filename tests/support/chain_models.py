"""LightningModules that are a chain of blocks, unchanged: what pipeline_parallel cuts into
stages."""

from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MaxMetric, MeanSquaredError

from tests.support.dense_models import WIDTH, Recording, loader


class Logging(Recording):
    """Logs its losses, and remembers what every rank has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = float(self.trainer.callback_metrics["loss"])
        assert float(outputs["loss"]) * self.trainer.accumulate_grad_batches == logged
        self.losses.append(logged)

    def train_dataloader(self) -> Any:
        dealt = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        return loader(dealt["rank"], dealt["num_replicas"])

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log(
            "val_loss", functional.mse_loss(self(batch[0]), batch[1]), batch_size=len(batch[0])
        )

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics.get("val_loss", 0.0)))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


class Sequence(Logging):
    """Its model is one nn.Sequential, with nothing before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 16),
            nn.Tanh(),
            nn.Linear(16, 24),
            nn.GELU(),
            nn.Linear(24, 8),
            nn.Tanh(),
            nn.Linear(8, 1),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


class Transformer(Logging):
    """Weights before and after its blocks, and an argument that all blocks get."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(WIDTH), persistent=False
        )
        self.lift, self.places = nn.Linear(1, 8), nn.Parameter(torch.randn(WIDTH, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.lift(inputs[..., None]) + self.places
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden)).mean(1)

    def configure_optimizers(self) -> Any:
        decayed = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        undecayed = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        # the gradient of a key's bias is 0 but for rounding
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        }


class Measured(Sequence):
    """Logs metrics that are objects, and a value of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.largest = MeanSquaredError(), MaxMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        outputs = self(batch[0])
        self.error(outputs.detach(), batch[1])
        loss = functional.mse_loss(outputs, batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log_dict({"loss": loss, "rate": 0.5}, on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.largest.update(self(batch[0]))
        self.log("largest", self.largest)
        self.log("count", float(len(batch[0])), on_epoch=True, reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated += [
            float(self.trainer.callback_metrics[name]) for name in ("largest", "count")
        ]

    def on_train_epoch_end(self) -> None:
        self.validated += [
            float(self.trainer.callback_metrics[name])
            for name in ("error", "loss_epoch", "rate_epoch")
        ]


class PerExample(Logging):
    """Passes its blocks a tensor with a row for each example, one for all, and computes with the
    batch before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.model = nn.ModuleList(Shifted() for _ in range(3))
        self.register_buffer("all", torch.ones(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.model:
            hidden = layer(hidden, inputs.sin(), scale=self.all)
        return hidden.sum(1, keepdim=True)


class Permuted(Logging):
    """Its blocks return a permuted view, as ConvNeXt's do, a slice, and a repeated value; it views
    their output."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            *(ChannelsLast(how) for how in ("all", "slice", "all", "mean", "all"))
        )
        self.head = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        images = self.model(inputs.view(-1, 3, 4).permute(0, 2, 1))
        return (
            self
            .head(images.permute(0, 2, 1).view(len(inputs) * 4, 3))
            .view(len(inputs), 4)
            .sum(1, keepdim=True)
        )


class ChannelsLast(nn.Module):
    """A layer over the last dim in memory, (batch, 4, 3); what it returns has that as its middle
    one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(3, 6 if how == "slice" else 3), how

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.layer(images.permute(0, 2, 1).reshape(-1, 4, 3)).tanh()
        if self.how == "slice":
            hidden = hidden[..., ::2]
        elif self.how == "mean":
            hidden = hidden.mean(2, keepdim=True).expand_as(hidden)
        return hidden.permute(0, 2, 1)


class Shifted(nn.Module):
    """A layer of three arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return self.layer(inputs) * scale.mean() + shift


class SimpleNet(nn.Module):
    """Layers without a container, and what its forward computes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(WIDTH, 16), nn.Linear(16, 24), nn.Linear(24, 8)
        self.fc4 = nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.0)
        self.slope = 0.5

    def forward(self, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.dropout(functional.relu(self.fc1(inputs.flatten(1))))
        hidden = functional.leaky_relu(self.fc2(hidden), self.slope) + (self.training and 0.25)
        hidden = functional.dropout(hidden, 0.0, self.training)
        hidden = self.fc3(hidden if scale is None else hidden * scale)
        return self.fc4(hidden.tanh() + hidden)


class Called(Logging):
    """Its net is no container; a number of it changes while it trains, and a layer is after it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = SimpleNet(), nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.net(inputs, scale=inputs.mean(1, keepdim=True)))

    def on_train_epoch_end(self) -> None:
        self.net.slope = 0.1


class Flat(Logging):
    """Its layers are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(WIDTH, 16), nn.Linear(16, 24), nn.Linear(24, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(inputs)))))


CHAINS: dict[str, type[Logging]] = {
    kind.__name__: kind
    for kind in (Sequence, Transformer, PerExample, Measured, Permuted, Called, Flat)
}


class Drawing(Logging):
    """Draws before its blocks, in them and after them, by torch and by numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0] + torch.randn_like(batch[0]) + numpy.random.rand()
        loss = functional.mse_loss(functional.dropout(self(inputs), 0.1), inputs)
        self.log("loss", loss)
        return loss


class Unchanged(Drawing):
    """Its blocks pass on what they get: the loss is 0 where all ranks draw the same."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Identity(), nn.Linear(WIDTH, WIDTH, bias=False), nn.Identity()
        )
        self.model[1].weight = nn.Parameter(torch.eye(WIDTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0] + torch.randn_like(batch[0]) + numpy.random.rand()
        loss = functional.mse_loss(self(inputs), inputs)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)
