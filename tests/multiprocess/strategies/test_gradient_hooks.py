"""Optimizers that step inside of backward, and hooks on gradients, of layers without tables: exact,
or refused."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor

from lightning_distrec import (
    PipelineParallelStrategy,
    TorchRecShardedStrategy,
    TunedDDPStrategy,
    TunedFSDPStrategy,
)
from lightning_distrec.errors import DistRecError
from tests.support.cases import Case, case_of, check, check_refused, concatenate
from tests.support.dense_models import WIDTH, BagsBefore, dense_batch, loader, whole_batches
from tests.support.dense_runs import make_dense_trainer
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks

FSDP: dict[str, Any] = {"min_num_parameters": 8}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp_tuned": TunedDDPStrategy,
    "fsdp_tuned": partial(TunedFSDPStrategy, **FSDP),
    "pipeline_parallel": partial(PipelineParallelStrategy, microbatches=2),
    "dense ddp": TorchRecShardedStrategy,
    "dense fsdp": partial(TorchRecShardedStrategy, dense="fsdp", fsdp=FSDP),
}


class Hooks(NamedTuple):
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


class Hooked(BagsBefore):
    """A chain of layers, with a table before it or not."""

    def __init__(self, hooks: Hooks, has_table: bool) -> None:
        super().__init__(has_table)
        self.hooks = hooks
        self.automatic_optimization = not hooks.by_hand
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )
        self.norms: list[float] = []
        self._register("__init__")

    def _register(self, place: str) -> None:
        if place != self.hooks.place or (self.hooks.kind == "reads on rank 0" and self.global_rank):
            return
        weights = list(
            (self.net[:3] if self.hooks.optimized == "others" else self.net).parameters()
        )
        if self.hooks.kind == "in backward":
            _apply_optimizer_in_backward(torch.optim.Adam, weights, {"lr": 0.02})
        for weight in weights:
            if self.hooks.kind in ("tutorial", "Adafactor"):
                kind = torch.optim.Adam if self.hooks.kind == "tutorial" else torch.optim.Adafactor
                weight.register_post_accumulate_grad_hook(_stepping(kind([weight], lr=0.02)))
            elif self.hooks.kind.startswith("reads"):
                weight.register_post_accumulate_grad_hook(self._read)
            elif self.hooks.kind == "scales":
                weight.register_hook(lambda gradient: gradient * 0.5)

    def _read(self, weight: nn.Parameter) -> None:
        norm: Any = weight.grad.norm()  # type: ignore[union-attr]
        self.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

    def setup(self, stage: str) -> None:
        self._register("setup")

    def configure_optimizers(self) -> Any:
        self._register("configure_optimizers")
        layers = {"none": [], "all": list(self.net), "others": [self.net[4]]}[self.hooks.optimized]
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

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.hooks.by_hand:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss.backward() if self.hooks.by_hand == "loss.backward" else self.manual_backward(loss)
        optimizer.step()
        return None


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    def hook(_: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return hook


def batch_of_all(step: int, rank: int) -> list[Tensor]:
    return concatenate([dense_batch(step, other) for other in range(2)])


def first_of(batches: list[Any]) -> Any:
    return batches[0]


def case(name: str, hooks: Hooks, **values: Any) -> Case:
    """Return a case of these hooks under this strategy. A pipeline has one batch for all ranks."""
    batch, join = dense_batch, concatenate
    if name == "pipeline_parallel":
        batch, join = batch_of_all, first_of
    trainer = {"max_epochs": 2, "accumulate_grad_batches": hooks.accumulates}
    fields = {"strategy": STRATEGIES[name](), "trainer": trainer, "batch": batch, "join": join}
    fields |= {"loss_limit": None} if name == "pipeline_parallel" else {}
    return case_of(Hooked, hooks, name.startswith("dense"), **fields | values)


UPDATES = {
    "in __init__": Hooks("in backward", "__init__", "none"),
    "in setup": Hooks("in backward", "setup", accumulates=2),
    "in configure_optimizers": Hooks("in backward", "configure_optimizers", "all"),
    "tutorial in on_fit_start": Hooks("tutorial", "on_fit_start", "all"),
    "tutorial in on_train_start": Hooks("tutorial", "on_train_start", "none", accumulates=2),
    "tutorial in __init__": Hooks("tutorial", "__init__", "none"),
    "tutorial in setup": Hooks("tutorial", "setup", accumulates=2),
    "tutorial in configure_optimizers": Hooks("tutorial", "configure_optimizers", "all"),
}
UPDATES |= {
    "by hand": Hooks("in backward", "on_train_start", "all", "manual"),
    "tutorial by hand": Hooks("tutorial", "on_train_start", "all", "manual"),
}
ROWS = (
    ("ddp_tuned", "in setup"),
    ("ddp_tuned", "tutorial in __init__"),
    ("fsdp_tuned", "in setup"),
    ("fsdp_tuned", "tutorial by hand"),
    ("dense ddp", "in configure_optimizers"),
    ("dense ddp", "tutorial in setup"),
    ("dense ddp", "by hand"),
    ("dense fsdp", "in __init__"),
    ("dense fsdp", "tutorial in on_train_start"),
    ("pipeline_parallel", "tutorial in configure_optimizers"),
)
CASES = {", ".join(row): case(row[0], UPDATES[row[1]]) for row in ROWS}
CASES |= {
    "ddp_tuned, one rank": case("ddp_tuned", UPDATES["tutorial in on_fit_start"], num_ranks=1),
    "fsdp_tuned, one rank": case("fsdp_tuned", UPDATES["in __init__"], num_ranks=1),
    "fsdp_tuned, twice": case("fsdp_tuned", Hooks("in backward", "__init__"), fits=2),
    "pipeline_parallel, twice": case("pipeline_parallel", Hooks("in backward", "__init__"), fits=2),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_inside_of_backward_are_those_of_one_process(name: str) -> None:
    check(CASES[name])


def norms(model: Any) -> list[float]:
    """Return the norms that were read; FSDP2 calls hooks of one block in the order of its
    parameters."""
    return sorted(model.norms)


@pytest.mark.parametrize("name", ["ddp_tuned", "fsdp_tuned"])
def test_hooks_that_read_see_gradients_of_all_ranks(name: str) -> None:
    check(case(name, Hooks("reads", "on_train_start", "all", accumulates=2), same=norms))


def num_norms(trainer: Any) -> int:
    return len(trainer.lightning_module.norms)


def test_a_hook_on_one_rank_leaves_the_collectives_of_all_alike() -> None:
    hooks = Hooks("reads on rank 0", "setup", "all", accumulates=2)
    first, second = check(case("dense ddp", hooks, look=num_norms))
    assert first.seen > 0
    assert second.seen == 0


LOST = "'net.0.weight' has a hook on its gradient that would be lost or run at other times: "
REPLACED = f"{LOST}it was registered before sharding, or unshard(), replaced the parameter. "
REFUSED: dict[str, tuple[Case, str]] = {
    "reads before": (
        case("fsdp_tuned", Hooks("reads", "__init__")),
        f"{REPLACED}Return an optimizer",
    ),
    "scales before": (
        case("dense fsdp", Hooks("scales", "setup")),
        f"{REPLACED}Return an optimizer",
    ),
    "tutorial": (
        case("dense fsdp", UPDATES["tutorial in configure_optimizers"]),
        f"{REPLACED}Return an optimizer",
    ),
    "scales": (
        case("fsdp_tuned", Hooks("scales", "on_train_start")),
        f"{LOST}FSDP2 does not call hooks of register_hook on shards",
    ),
    "Adafactor": (
        case("fsdp_tuned", Hooks("Adafactor", "on_train_start")),
        "torch.optim.Adafactor fails, or has other numbers",
    ),
    "loss.backward": (
        case("ddp_tuned", Hooks("tutorial", "__init__", "all", "loss.backward")),
        "Call self.manual_backward(loss).",
    ),
    "micro-batches": (
        case("pipeline_parallel", Hooks("scales", "__init__", "all")),
        "hooks of register_hook run for every micro-batch, and again for the batch. Return an",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hooks_that_would_be_lost_are_refused_by_the_name_of_their_parameter(name: str) -> None:
    check_refused(*REFUSED[name])


def _refusal_after_unsharding() -> str:
    model = Hooked(Hooks("in backward", "__init__", "all"), False)
    trainer = make_dense_trainer(STRATEGIES["fsdp_tuned"]())
    trainer.fit(model, whole_batches(2))
    trainer.strategy.unshard()  # type: ignore[attr-defined]
    with pytest.raises(DistRecError) as refused:
        make_dense_trainer(TunedDDPStrategy()).fit(model, loader(*rank_and_num_ranks()))
    return str(refused.value)


def test_a_module_that_was_unsharded_has_lost_them() -> None:
    for message in run_on_warm_ranks(_refusal_after_unsharding, 2):
        assert "before sharding, or unshard(), replaced" in message
