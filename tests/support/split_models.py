"""LightningModules with layers that tensor_parallel splits, unchanged, and plans for them."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import SumMetric

from tests.support.dense_models import WIDTH, Recording, loader


class Split(Recording):
    """Gets its loader from the strategy, logs sums, and can be scaled down to one process."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SumMetric()
        self.sums: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        torch.manual_seed(batch_idx)  # what is drawn between steps differs from one process
        loss = functional.mse_loss(self(batch[0]), batch[1])
        self.seen.update(batch[0].sum())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        self.log("sum", batch[0].sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))

    def on_train_epoch_end(self) -> None:
        logged = self.trainer.callback_metrics
        self.sums += [float(logged[name]) for name in ("seen", "sum", "loss_epoch") if name in logged]

    def train_dataloader(self) -> Any:
        dealt = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        batch_size = 8 // dealt["num_replicas"]
        return loader(dealt["rank"], dealt["num_replicas"], batch_size)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", functional.mse_loss(self(batch[0]), batch[1]), batch_size=len(batch[0]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics.get("val_loss", 0.0)))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


class Perceptron(Split):
    """Pairs of layers with activations, dropout and a norm without weights in between, and a layer at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8, bias=False), nn.Dropout(0.2)),
            *(nn.Linear(8, 24), nn.Softmax(1), nn.LayerNorm(24), nn.Linear(24, 8)),
        )
        self.wide, self.out = nn.Linear(8, 12), nn.Linear(12, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.wide(self.net(inputs)).tanh())


class Attention(nn.Module):
    """Heads by views, as code for one process has them; with a kernel of torch's, or by hand."""

    mask: Tensor

    def __init__(self, dim: int, heads: int, by_hand: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.by_hand, self.dropout = heads, by_hand, dropout
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.key = nn.Linear(dim, dim, bias=False)  # a bias would have a gradient of 0, but for rounding
        self.scale = nn.Parameter(torch.ones(dim))
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril().bool(), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        size, length, dim = inputs.shape
        query, key, value = (
            layer(inputs).view(size, length, self.heads, dim // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.by_hand:
            scores = (query @ key.transpose(2, 3) / (dim // self.heads) ** 0.5).masked_fill(~self.mask, -torch.inf)
            attended = functional.dropout(scores.softmax(3), self.dropout, self.training) @ value
        else:
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(size, length, dim) * self.scale)


class Gated(nn.Module):
    """A layer of which one half gates the other: chunks of what is split."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, inputs: Tensor) -> Tensor:
        gate, value = self.both(inputs).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)


class Block(nn.Module):
    """A transformer's, with norms of weights first."""

    def __init__(self, dim: int, heads: int, by_hand: bool, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.mlp = Attention(dim, heads, by_hand, dropout), Gated(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self.dropout(self.attention(self.before(inputs)))
        return inputs + self.dropout(self.mlp(self.between(inputs)))


class SmallGPT(Split):
    """Codes of inputs are looked up; blocks with attention of both kinds, and one of torch's."""

    def __init__(self, dropout: float = 0.0, dim: int = 8) -> None:
        super().__init__()
        self.codes = nn.Embedding(6, dim)
        self.blocks = nn.ModuleList(Block(dim, 4, by_hand, dropout) for by_hand in (False, True))
        self.last = nn.TransformerEncoderLayer(dim, 2, 2 * dim, dropout, batch_first=True, norm_first=True)
        self.head = nn.Linear(dim, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.codes((inputs + 3).clamp(0, 5).long())
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.last(hidden)).mean(1)


class Descending(SmallGPT):
    """Steps by gradients as they are: Adam makes any size of those that are nothing but rounding."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Dropping(SmallGPT):
    """Draws in what is split, and in what is not."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)


class Pairs(Split):
    """Pairs of layers that plan="auto" finds, at any depth, next to layers that have no partner."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Linear(12, 8), nn.SiLU(), nn.Dropout(0.1), nn.Linear(8, 12), nn.Softmax(1))
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 12), hidden, nn.Linear(12, 8))
        self.last = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.last(self.net(inputs)[:, None])[:, 0])


class Lookups(Split):
    """Tables by rows and by columns, with a row that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({
            "rows": nn.Embedding(8, 8, padding_idx=2),
            "columns": nn.Embedding(8, 8, padding_idx=1),
            "out": nn.Linear(8, 8),
        })
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        ids = (inputs * 2 + 4).clamp(0, 7).long()
        return self.head(self.net["out"](self.net["rows"](ids) * self.net["columns"](ids)).tanh().mean(1))


class ByHand(SmallGPT):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        others = [*self.codes.parameters(), *self.last.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(self.blocks.parameters(), 0.05), torch.optim.Adam(others, 0.01)]


class Frozen(SmallGPT):
    """Some of what is split does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].attention.query.requires_grad_(False)
        self.blocks[0].mlp.requires_grad_(False)


OF_PERCEPTRON = {
    **{"net.0": "colwise", "net.3": "rowwise", "net.5": "colwise", "net.8": "rowwise"},
    **{"wide": "colwise_gather_output"},
}
OF_GPT = {
    **{"blocks.*.attention.query": "colwise", "blocks.*.attention.key": "colwise"},
    **{"blocks.*.attention.value": "colwise", "blocks.*.attention.out": "rowwise"},
    **{"blocks.*.mlp.both": "colwise", "blocks.*.mlp.down": "rowwise"},
    **{"last.linear1": "colwise", "last.linear2": "rowwise", "codes": "colwise_gather_output"},
}
OF_LOOKUPS = {"net.rows": "rowwise", "net.columns": "colwise_gather_output", "net.out": "colwise_gather_output"}
MODELS: dict[str, Any] = {
    model.__name__: model for model in (Perceptron, SmallGPT, Dropping, Pairs, ByHand, Lookups, Frozen, Descending)
}
PLANS: dict[str, Any] = {
    **{"Perceptron": OF_PERCEPTRON, "SmallGPT": OF_GPT, "Dropping": OF_GPT, "Frozen": OF_GPT, "Lookups": OF_LOOKUPS},
    **{"Descending": OF_GPT, "ByHand": OF_GPT},
}
"""Kind -> plan; others have what is found."""


def seeded(kind: str) -> "pl.LightningModule":
    pl.seed_everything(5)
    return MODELS[kind]()
