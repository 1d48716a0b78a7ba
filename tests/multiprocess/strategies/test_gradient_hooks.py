"""Optimizers that step inside of backward, and hooks on gradients, of layers without tables: exact,
or refused."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import (
    PipelineParallelStrategy,
    TorchRecShardedStrategy,
    TunedDDPStrategy,
    TunedFSDPStrategy,
)
from lightning_distrec.errors import DistRecError
from tests.support.dense_models import WIDTH, Recording, loader, whole_batches
from tests.support.parameters import slow_except
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

FSDP: dict[str, Any] = {"min_num_parameters": 8}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp_tuned": TunedDDPStrategy,
    "fsdp_tuned": lambda: TunedFSDPStrategy(**FSDP),
    "pipeline_parallel": lambda: PipelineParallelStrategy(microbatches=2),
    "dense ddp": TorchRecShardedStrategy,
    "dense fsdp": lambda: TorchRecShardedStrategy(dense="fsdp", fsdp=FSDP),
}
SHARDED = ("fsdp_tuned", "dense fsdp")


class Case(NamedTuple):
    """What is registered on which layers, and when."""

    kind: str
    place: str
    """The hook in which it is registered."""
    optimized: str = "others"
    """What configure_optimizers has: parameters of "none" of the layers, "all" of them, or those
    without hooks."""
    by_hand: str = ""
    """The backward that training_step calls; "": Lightning does."""
    accumulates: int = 1


class Hooked(Recording):
    """A chain of layers, with a table before it or not."""

    def __init__(self, case: Case, has_table: bool) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = not case.by_hand
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )
        table = EmbeddingBagConfig(
            name="t", embedding_dim=WIDTH, num_embeddings=20, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[table]) if has_table else None
        self.norms: list[float] = []
        self._register("__init__")

    def _register(self, place: str) -> None:
        if place != self.case.place or (self.case.kind == "reads on rank 0" and self.global_rank):
            return
        weights = list((self.net[:3] if self.case.optimized == "others" else self.net).parameters())
        if self.case.kind == "in backward":
            _apply_optimizer_in_backward(torch.optim.Adam, weights, {"lr": 0.02})
        for weight in weights:
            if self.case.kind in ("tutorial", "Adafactor"):
                kind = torch.optim.Adam if self.case.kind == "tutorial" else torch.optim.Adafactor
                weight.register_post_accumulate_grad_hook(_stepping(kind([weight], lr=0.02)))
            elif self.case.kind.startswith("reads"):
                weight.register_post_accumulate_grad_hook(self._read)
            elif self.case.kind == "scales":
                weight.register_hook(lambda gradient: gradient * 0.5)

    def _read(self, weight: nn.Parameter) -> None:
        norm: Any = weight.grad.norm()  # type: ignore[union-attr]
        self.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    def setup(self, stage: str) -> None:
        self._register("setup")

    def configure_optimizers(self) -> Any:
        self._register("configure_optimizers")
        layers = {"none": [], "all": list(self.net), "others": [self.net[4]]}[self.case.optimized]
        weights = [
            weight
            for layer in [*layers, *filter(None, [self.bags])]
            for weight in layer.parameters()
        ]
        return torch.optim.SGD(weights, lr=0.02) if weights else None

    def on_fit_start(self) -> None:
        self._register("on_fit_start")

    def on_train_start(self) -> None:
        self._register("on_train_start")

    def on_train_epoch_start(self) -> None:
        for weight in self.net.parameters() if self.current_epoch else ():
            for optimizer in getattr(weight, "_in_backward_optimizers", ()):
                optimizer.param_groups[0]["lr"] = 0.005

    def forward(self, inputs: Tensor) -> Tensor:
        if self.bags is not None:
            ids = (inputs > 0).long() * 5 + torch.arange(WIDTH) % 5
            lengths = torch.full((len(ids),), WIDTH)
            inputs = (
                inputs
                + self.bags(KeyedJaggedTensor(["f"], ids.flatten(), lengths=lengths)).values()
            )
        return self.net(inputs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.case.by_hand:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss.backward() if self.case.by_hand == "loss.backward" else self.manual_backward(loss)
        optimizer.step()
        return None


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    def hook(_: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return hook


def _fit(model: Hooked, strategy: Any, data: Any, devices: int) -> pl.Trainer:
    settings = DEFAULTS | {"max_epochs": 2, "accumulate_grad_batches": model.case.accumulates}
    trainer = pl.Trainer(strategy=strategy, devices=devices, **settings)
    trainer.fit(model, data)
    return trainer


def _one_process(case: Case, has_table: bool, fits: int = 1) -> Hooked:
    pl.seed_everything(5)
    model = Hooked(case, has_table)
    for _ in range(fits):
        _fit(model, "auto", whole_batches(2), 1)
    return model


def _on_rank(case: Case, name: str, fits: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    rank, num_ranks = rank_and_num_ranks()
    pl.seed_everything(5)
    model = Hooked(case, name.startswith("dense"))
    data = (
        whole_batches(2)
        if name == "pipeline_parallel" or num_ranks == 1
        else loader(rank, num_ranks)
    )
    for _ in range(fits):
        trainer = _fit(model, STRATEGIES[name](), data, num_ranks)
    strategy: Any = trainer.strategy
    return {key: value.clone() for key, value in strategy.full_state_dict().items()}, model.norms


def _refusal(case: Case, name: str) -> str:
    try:
        _on_rank(case, name)
    except DistRecError as error:
        return str(error)
    return ""


def _refusal_after_unsharding(case: Case, name: str) -> str:
    rank, num_ranks = rank_and_num_ranks()
    model = Hooked(case, False)
    trainer = _fit(model, STRATEGIES[name](), whole_batches(2), num_ranks)
    trainer.strategy.unshard()  # type: ignore[attr-defined]
    for parameter in model.parameters():
        parameter.data = parameter.data.new_zeros(parameter.shape, device="cpu")
    try:
        _fit(model, TunedDDPStrategy(), loader(rank, num_ranks), num_ranks)
    except DistRecError as error:
        return str(error)
    return ""


UPDATES = [
    Case("in backward", "__init__", "none"),
    Case("in backward", "setup", accumulates=2),
    Case("in backward", "configure_optimizers", "all"),
    Case("in backward", "on_train_start"),
    Case("tutorial", "on_fit_start", "all"),
    Case("tutorial", "on_train_start", "none", accumulates=2),
]
BEFORE_SHARDING = [
    Case("tutorial", "__init__", "none"),
    Case("tutorial", "setup", accumulates=2),
    Case("tutorial", "configure_optimizers", "all"),
]


def _assert_equal(
    cases: list[Case], name: str, num_ranks: int, fits: int = 1
) -> list[tuple[Hooked, Any]]:
    calls = {str(case): (_on_rank, case, name, fits) for case in cases}
    ranks, pairs = run_each_on_ranks(calls, num_ranks), []
    for case in cases:
        model = _one_process(case, name.startswith("dense"), fits)
        state, _ = ranks[0][str(case)]
        for key, value in model.state_dict().items():
            place = f"{case} {key}: "
            torch.testing.assert_close(
                state[key], value, rtol=0, atol=1e-6, msg=functools.partial(str.__add__, place)
            )
        pairs.append((model, [rank[str(case)][1] for rank in ranks]))
    return pairs


@pytest.mark.parametrize("name", slow_except(["ddp_tuned", "dense fsdp"], STRATEGIES))
def test_updates_inside_of_backward_are_those_of_one_process(name: str) -> None:
    _assert_equal(UPDATES + ([] if name in SHARDED else BEFORE_SHARDING), name, 2)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "pipeline_parallel"])
def test_so_they_are_on_one_rank(name: str) -> None:
    _assert_equal([UPDATES[0], UPDATES[4]], name, 1)


@pytest.mark.parametrize("name", ["ddp_tuned", "fsdp_tuned", "dense ddp"])
def test_so_they_are_by_hand(name: str) -> None:
    _assert_equal(
        [Case(kind, "on_train_start", "all", "manual") for kind in ("in backward", "tutorial")],
        name,
        2,
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_second_fit_takes_them_over_again(name: str) -> None:
    _assert_equal([Case("in backward", "__init__")], name, 2, fits=2)


def test_hooks_that_read_see_gradients_of_all_ranks() -> None:
    for name in ("ddp_tuned", "fsdp_tuned"):
        [(model, norms)] = _assert_equal(
            [Case("reads", "on_train_start", "all", accumulates=2)], name, 2
        )
        assert norms[0] == norms[1]
        # FSDP2 calls those of one block in the order of its parameters.
        assert sorted(norms[0]) == pytest.approx(sorted(model.norms), abs=1e-5)


def test_a_hook_on_one_rank_leaves_the_collectives_of_all_alike() -> None:
    for name in ("ddp_tuned", "dense ddp"):
        [(_, norms)] = _assert_equal(
            [Case("reads on rank 0", "setup", "all", accumulates=2)], name, 2
        )
        assert norms[0]
        assert not norms[1]


def test_hooks_that_would_be_lost_are_refused_by_the_name_of_their_parameter() -> None:
    lost = "'net.0.weight' has a hook on its gradient that would be lost or run at other times: "
    replaced = (
        f"{lost}it was registered before sharding, or unshard(), replaced the parameter. "
        "Return an optimizer"
    )
    cases = {
        (name, case): replaced
        for name in SHARDED
        for case in (Case("reads", "__init__"), Case("scales", "setup"))
    }
    cases["dense fsdp", BEFORE_SHARDING[2]] = replaced
    cases["fsdp_tuned", Case("scales", "on_train_start")] = (
        f"{lost}FSDP2 does not call hooks of register_hook on shards"
    )
    cases["fsdp_tuned", Case("Adafactor", "on_train_start")] = (
        "torch.optim.Adafactor fails, or has other numbers"
    )
    cases["ddp_tuned", Case("tutorial", "__init__", "all", "loss.backward")] = (
        "Call self.manual_backward(loss)."
    )
    micro = (
        "hooks of register_hook run for every micro-batch, and again for the batch. Return an "
        "optimizer"
    )
    cases["pipeline_parallel", Case("scales", "__init__", "all")] = micro
    ranks = run_each_on_ranks({str(key): (_refusal, key[1], key[0]) for key in cases}, 2)
    for messages in ranks:
        for key, expected in cases.items():
            assert expected in messages[str(key)], key


def test_a_module_that_was_unsharded_has_lost_them() -> None:
    case = Case("in backward", "__init__", "all")
    calls = {
        name: (_refusal_after_unsharding, case, name)
        for name in ("fsdp_tuned", "pipeline_parallel")
    }
    for messages in run_each_on_ranks(calls, 2):
        assert all(
            "before sharding, or unshard(), replaced" in message for message in messages.values()
        ), messages
