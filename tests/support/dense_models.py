"""LightningModules without tables, unchanged: what data-parallel strategies have to leave as it
is."""

from typing import Any, Generic, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

NUM_SAMPLES, WIDTH = 48, 12


def samples() -> TensorDataset:
    """Return the same samples everywhere: (WIDTH,) inputs and one target each."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=draw)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def dense_batch(step: int, rank: int) -> list[Tensor]:
    """Return one rank's batch of one step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(4, WIDTH, generator=draw)
    return [inputs, inputs.sin().sum(1, keepdim=True)]


def loader(rank: int = 0, num_ranks: int = 1, batch_size: int = 4) -> DataLoader[Any]:
    """Return the samples in their order; each rank has every num_ranks-th."""
    sampler: Any = DistributedSampler(samples(), num_ranks, rank, shuffle=False)
    return DataLoader(samples(), batch_size=batch_size, sampler=sampler)


def whole_batches(num_ranks: int) -> DataLoader[Any]:
    """Return the batches of all ranks together, for one process."""
    dealt = zip(*(loader(rank, num_ranks) for rank in range(num_ranks)), strict=True)
    return DataLoader(
        [[torch.cat(parts) for parts in zip(*batches, strict=True)] for batches in dealt],
        batch_size=None,
    )


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


class Small(Recording):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


class BagsBefore(Small):
    """The same, with a table of TorchRec's before it or not."""

    def __init__(self, has_table: bool = False) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", embedding_dim=WIDTH, num_embeddings=20, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[table]) if has_table else None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.bags is not None:
            ids = (inputs > 0).long() * 5 + torch.arange(WIDTH) % 5
            lengths = torch.full((len(ids),), WIDTH)
            features = KeyedJaggedTensor(["f"], ids.flatten(), lengths=lengths)
            inputs = inputs + self.bags(features).values()
        return self.net(inputs)


class BareAndTied(Recording):
    """Parameters at the root, two layers of one weight, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.one, self.other, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 1),
        )
        self.other.weight = self.one.weight
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.other(self.one(inputs * self.scale).relu()).relu()
        return self.out(hidden + self.still(inputs))


Kind = TypeVar("Kind")


class Typed(Generic[Kind]):
    """A base class without attributes, before LightningModule: another layout of objects in
    Python."""

    def class_name(self) -> str:
        """Return the name that Lightning's errors show."""
        return type(self).__name__


class GenericFirst(Typed[int], BareAndTied):
    """A module that inherits from a generic class first."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.class_name() == "GenericFirst"
        return super().training_step(batch, batch_idx)


class WithBatchNorm(Recording):
    """Buffers that every forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        )

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
        return [
            torch.optim.SGD(self.low.parameters(), 0.05),
            torch.optim.Adam(self.high.parameters(), 0.01),
        ]


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


class DenseTable(WithEmbedding):
    """The same with dense gradients."""

    def __init__(self) -> None:
        super().__init__(sparse=False)


class Unused(Recording):
    """A layer that every other step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.one(inputs) + (self.other(inputs) if len(self.losses) % 2 else 0)


class Numbers(Recording):
    """Parameters that are single numbers, inside of a block and at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.Sequential(Scaled(), Scaled())
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.blocks(inputs)) * self.scale


class Scaled(nn.Module):
    """A layer times a number that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.factor * self.layer(inputs).tanh()


class Adversaries(Recording):
    """Two optimizers against each other: several forwards and backwards in a step, and a bare
    parameter in both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.maker = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.judge(self.maker(inputs) + self.shift)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        maker_optimizer, judge_optimizer = self.optimizers()
        self.toggle_optimizer(maker_optimizer)
        made = -self(batch[0]).mean()
        self.manual_backward(made)
        self.clip_gradients(maker_optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        maker_optimizer.step()
        maker_optimizer.zero_grad()
        self.untoggle_optimizer(maker_optimizer)
        self.toggle_optimizer(judge_optimizer)
        with torch.no_grad():
            fake = self.maker(batch[0]) + self.shift
        judged = (
            functional.softplus(self.judge(fake)).mean()
            + functional.softplus(-self.judge(batch[0])).mean()
        )
        self.manual_backward(judged)
        judge_optimizer.step()
        judge_optimizer.zero_grad()
        self.untoggle_optimizer(judge_optimizer)
        self.losses += [float(made.detach()), float(judged.detach())]

    def configure_optimizers(self) -> Any:
        maker = torch.optim.Adam([*self.maker.parameters(), self.shift], 0.01)
        return [maker, torch.optim.Adam(self.judge.parameters(), 0.01)]


class Layers(Recording):
    """Three blocks of a kind, with a validation loss and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            outputs = block(inputs)
            outputs += inputs
            inputs = outputs
        return self.out(inputs)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(float(functional.mse_loss(self(batch[0]), batch[1])))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        }


class Block(nn.Module):
    """A normalized layer of its own. Its output is a view, to which its input is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.norm(inputs).relu()).view(-1, WIDTH)


class Unfreezes(Recording):
    """Its first layer is frozen, and learns from the second epoch on, in a param group of its
    own."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.high(self.low(inputs).tanh())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.high.parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.low.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({
                "params": list(self.low.parameters()),
                "lr": 1e-3,
            })


class UnfreezesBesideATable(Unfreezes):
    """The same, with a table that learns from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(4, WIDTH, mode="sum")

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.table((inputs > 0).long() + 2 * (inputs.abs() > 1).long())
        return self.high(self.low(inputs).tanh() + rows)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class UnfreezesAlone(UnfreezesBesideATable):
    """A table alone learns at first."""

    def __init__(self) -> None:
        super().__init__()
        self.high.requires_grad_(False)


KINDS: dict[str, type[Recording]] = {
    kind.__name__: kind
    for kind in (
        BareAndTied,
        GenericFirst,
        WithBatchNorm,
        TwoByHand,
        WithEmbedding,
        DenseTable,
        Unused,
        Numbers,
        Adversaries,
        Layers,
    )
}
