"""`ddp_tuned` and `fsdp_tuned` have the numbers of one process, or of Lightning's `ddp` where each
rank normalizes its own batch."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from lightning_distrec import TunedDDPStrategy, TunedFSDPStrategy
from tests.support.cases import Case, assert_same, case_of, check, concatenate, run_case
from tests.support.dense_models import (
    WIDTH,
    Adversaries,
    BareAndTied,
    DenseTable,
    GenericFirst,
    Layers,
    Numbers,
    Recording,
    Small,
    TwoByHand,
    Unused,
    WithBatchNorm,
    WithEmbedding,
    dense_batch,
)
from tests.support.parameters import slow_except


class ByHand(Small):
    """Manual optimization."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ThrowsAway(ByHand):
    """Adds up a gradient without an exchange, and throws it away."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = functional.mse_loss(self(batch[0]), batch[1])
        with getattr(self.trainer.strategy, "block_backward_sync", nullcontext)():
            self.manual_backward(loss * 100)
        optimizer.zero_grad()
        self.manual_backward(functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()


class LooksBeforeStepping(ByHand):
    """Computes without gradients between backward and step, and again after the step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(functional.mse_loss(self(batch[0]), batch[1]))
            with torch.no_grad():
                self(batch[0])
            optimizer.step()


class TogglesAround(ByHand):
    """Looks with one half toggled, and learns with both."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        low, high = self.optimizers()
        self.toggle_optimizer(low)
        with torch.no_grad():
            self(batch[0])
        self.untoggle_optimizer(low)
        low.zero_grad(), high.zero_grad()
        self.manual_backward(functional.mse_loss(self(batch[0]), batch[1]))
        low.step(), high.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[0].parameters(), 0.05),
            torch.optim.SGD(self.net[2].parameters(), 0.05),
        ]


class Centers(nn.Module):
    """A layer over inputs less their running mean, which it reads and then writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs - self.mean)
        with torch.no_grad():
            self.mean.lerp_(inputs.mean(0), 0.3)
        return outputs


class Centered(Recording):
    """Blocks of that kind, and one whose weight is divided by a norm that every forward
    estimates."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Centers(), Centers())
        self.normed = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.normed(self.blocks(inputs)))


class AddsAGroup(Numbers):
    """Sets its rate in the step, and gives its optimizer a group when the gradients are there."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01 / (1 + batch_idx)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(self.out.parameters()), "lr": 0.02})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.blocks.parameters(), self.scale], lr=1e-2)


class Keeps(nn.Module):
    """Computes with a parameter that it has in a dict too, as TorchRec's
    PositionWeightedModuleCollection does."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, out)
        self.kept = {"weights": [self.layer.weight]}
        vars(self)["bias"] = self.layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.kept["weights"][0], self.bias)


class KeepsParameters(Recording):
    """Layers that keep parameters in a dict, a list and an attribute; lists of them for the
    optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Keeps(WIDTH), nn.Tanh(), Keeps(WIDTH), nn.Tanh(), Keeps(1))
        self.low = list(self.net[0].parameters())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [{"params": self.low}, {"params": self.net[1:].parameters(), "lr": 3e-3}], lr=1e-2
        )


class Looks(pl.Callback):
    """Computes with the module after each step, before averages are taken."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with torch.no_grad():
            pl_module(batch[0])


class TwoTables(WithEmbedding):
    """A table of many rows and one of few, stepped by SparseAdam; remembers which rows had a
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.far = nn.Embedding(500, 6, sparse=True)
        self.rows: list[list[int]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        ids = (inputs[:, :3].abs() * 100).long()
        return super().forward(inputs) + self.out(self.far(ids).mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.manual_backward(loss)
        gradient: Any = self.far.weight.grad
        self.rows.append(gradient.coalesce().indices()[0].tolist())
        for optimizer in optimizers:
            optimizer.step()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        tables = [self.table.weight, self.far.weight]
        return [
            torch.optim.SparseAdam(tables, lr=0.01),
            torch.optim.SGD(self.out.parameters(), lr=0.001),
        ]


def look_through(model: Any) -> None:
    """Compute with a module outside of any run."""
    with torch.no_grad():
        model(torch.ones(2, WIDTH))


def unshard(model: Any) -> None:
    if hasattr(model.trainer.strategy, "unshard"):
        model.trainer.strategy.unshard()


def averaged(looks: bool = False) -> dict[str, Any]:
    average = EMAWeightAveraging(decay=0.5)
    return {"max_epochs": 2, "callbacks": [Looks(), average] if looks else [average]}


def case(kind: type, strategy: Any, trainer: Any = None, **values: Any) -> Case:
    """Return a case of a module without tables. trainer: options, or a function that makes them."""
    options = trainer if callable(trainer) else {"max_epochs": 2} | (trainer or {})
    fields = {"batch": dense_batch, "join": concatenate, "limit": 1e-5}
    return case_of(kind, strategy=strategy, trainer=options, **fields | values)


def ddp(kind: type, trainer: Any = None, num_ranks: int = 2, **options: Any) -> Case:
    return case(kind, TunedDDPStrategy(**options), trainer, num_ranks=num_ranks)


def fsdp(kind: type, trainer: Any = None, num_ranks: int = 2, **options: Any) -> Case:
    strategy = TunedFSDPStrategy(**{"min_num_parameters": 8} | options)
    rests = ("still",) if issubclass(kind, BareAndTied) else ()
    return case(kind, strategy, trainer, num_ranks=num_ranks, rests=rests)


def compiled(kind: type) -> Any:
    return torch.compile(kind(), backend="aot_eager")


def sparse(kind: type, **values: Any) -> dict[str, Case]:
    fields = {"trainer": {"max_epochs": 8}} | values
    return {
        f"{kind.__name__}, {way}, {' '.join(values)}": case(
            kind, TunedDDPStrategy(sparse_grads=way), **fields
        )
        for way in ("sparse", "dense")
    }


FEWER_STEPS = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
TWICE = {"accumulate_grad_batches": 2, "max_epochs": 8}
STILL = {"rests": ("still",)}
QUICK: dict[str, Case] = {
    "ddp, three ranks, small buckets": replace(
        ddp(BareAndTied, FEWER_STEPS, 3, bucket_cap_mb=0.0005), **STILL
    ),
    "ddp, unused layers": ddp(Unused, find_unused_parameters=True),
    **sparse(WithEmbedding, trainer=TWICE),
    **sparse(TwoTables),
    "fsdp of a generic class": fsdp(GenericFirst),
    "fsdp, clipped and accumulated": fsdp(BareAndTied, FEWER_STEPS),
    "fsdp, two optimizers by hand, offloaded": fsdp(TwoByHand, offload=True),
    "fsdp, table": fsdp(DenseTable),
    "fsdp, unused layers": fsdp(Unused),
    "fsdp, adversaries as blocks": fsdp(Adversaries, wrap=["maker", "judge"]),
    "fsdp, two replicas": fsdp(Numbers, {"gradient_clip_val": 0.1}, replicas=2),
    "fsdp, 64 bits": fsdp(Numbers, {"precision": "64-true", "gradient_clip_val": 0.1}),
}
WAYS: dict[str, dict[str, Any]] = {
    "blocks": {"min_num_parameters": 8},
    "root": {"wrap": []},
    "recomputed": {"min_num_parameters": 8, "activation_checkpointing": True},
}
LOST: dict[str, Callable[..., Case]] = {
    "a forward between two fits": partial(case, Small, fits=2, between=look_through),
    "gradients thrown away": partial(case, ThrowsAway),
    "a look before the step": partial(case, LooksBeforeStepping),
    "a look while toggled": partial(case, TogglesAround),
    "a group added in the step": partial(case, AddsAGroup),
    "looks between averages": partial(case, Small, trainer=partial(averaged, True)),
    "parameters kept in dicts and lists": partial(
        case, KeepsParameters, trainer=averaged, fits=2, between=unshard
    ),
}
CASES = QUICK | {
    f"{name}, {way}": make(strategy=TunedFSDPStrategy(**options))
    for name, make in LOST.items()
    for way, options in WAYS.items()
}
QUICK_WAYS = (
    "a forward between two fits, root",
    "gradients thrown away, root",
    "a look before the step, blocks",
    "a look while toggled, root",
    "a group added in the step, blocks",
    "looks between averages, blocks",
    "parameters kept in dicts and lists, root",
)
CASES |= {
    "fsdp, compiled": replace(fsdp(Small), module=partial(compiled, Small), plain=Small),
    "fsdp, three ranks": fsdp(BareAndTied, num_ranks=3),
    "fsdp, four ranks in two replicas": fsdp(Numbers, num_ranks=4, replicas=2),
    "fsdp, adversaries on four ranks": fsdp(Adversaries, num_ranks=4),
}


@pytest.mark.parametrize("name", slow_except([*QUICK, *QUICK_WAYS], CASES))
def test_numbers_are_those_of_one_process(name: str) -> None:
    check(CASES[name])


def validated(**options: Any) -> Case:
    return replace(fsdp(Layers, {"val_check_interval": 2}, **options), val_steps=2)


AS_DDP = {
    "ddp, batch norm": ddp(WithBatchNorm),
    "fsdp, freed by backward only": fsdp(Layers, FEWER_STEPS, reshard_after_forward=False),
    "fsdp, computed once more": validated(activation_checkpointing=True),
    "fsdp, buffers read and written": fsdp(Centered, {"accumulate_grad_batches": 3}),
    "fsdp, buffers of the root": fsdp(Centered, {"accumulate_grad_batches": 3}, wrap=[]),
}


@pytest.mark.parametrize("name", AS_DDP)
def test_numbers_are_those_of_ddp_where_ranks_normalize_their_own_batches(name: str) -> None:
    outcomes = run_case(AS_DDP[name])
    expected = run_case(replace(AS_DDP[name], strategy="ddp"))
    assert [outcome.losses for outcome in outcomes] == [
        pytest.approx(outcome.losses, abs=1e-5) for outcome in expected
    ]
    assert_same(replace(AS_DDP[name], loss_limit=None), outcomes, expected[0])
