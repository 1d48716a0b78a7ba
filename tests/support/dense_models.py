"""LightningModules without tables, unchanged: what data-parallel strategies have to leave as it is."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_SAMPLES, WIDTH = 48, 12


def samples() -> TensorDataset:
    """Return the same samples everywhere: (WIDTH,) inputs and one target each."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=draw)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def loader(rank: int = 0, num_ranks: int = 1, batch_size: int = 4) -> DataLoader[Any]:
    """Return the samples in their order; each rank has every num_ranks-th."""
    sampler: Any = DistributedSampler(samples(), num_ranks, rank, shuffle=False)
    return DataLoader(samples(), batch_size=batch_size, sampler=sampler)


class Recording(pl.LightningModule):
    """Remembers its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class BareAndTied(Recording):
    """Parameters at the root, two layers of one weight, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.one, self.other, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.other.weight = self.one.weight
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.other(self.one(inputs * self.scale).relu()).relu()
        return self.out(hidden + self.still(inputs))


class WithBatchNorm(Recording):
    """Buffers that every forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


class TwoByHand(Recording):
    """Two optimizers, stepped by hand, each over a part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.low, self.high = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.high(self.low(inputs).tanh())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        loss = functional.mse_loss(self(batch[0]), batch[1])
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.low.parameters(), 0.05), torch.optim.Adam(self.high.parameters(), 0.01)]


class WithEmbedding(Recording):
    """A table with sparse gradients, looked up by the signs of the inputs."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(4, 6, sparse=sparse, mode="sum")
        self.out = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.table((inputs > 0).long() + 2 * (inputs.abs() > 1).long()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.002)


class Unused(Recording):
    """A layer that every other step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.one(inputs) + (self.other(inputs) if len(self.losses) % 2 else 0)


KINDS: dict[str, type[Recording]] = {
    kind.__name__: kind for kind in (BareAndTied, WithBatchNorm, TwoByHand, WithEmbedding, Unused)
}
