"""Settings of `fsdp_tuned`: what each does, and what is refused."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.nn import functional

from lightning_distrec import TunedFSDPStrategy
from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.fully_sharded.fsdp_options import num_replicas
from tests.support.cases import Case, case_of, check_refused
from tests.support.dense_models import (
    WIDTH,
    BareAndTied,
    Layers,
    Recording,
    Small,
    WithEmbedding,
    dense_batch,
    loader,
)
from tests.support.dense_runs import make_dense_trainer, whole_weights
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks

SMALL = {"min_num_parameters": 8}


class Reset(nn.Module):
    """A layer of its own that knows how to draw its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, 1))
        self.register_buffer("shift", torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.ones_(self.shift)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight + self.shift


class OnMeta(Recording):
    """Built without memory; each rank would draw other weights."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), Reset())

    def setup(self, stage: str) -> None:
        torch.manual_seed(7 + rank_and_num_ranks()[0])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


def _on_meta() -> tuple[dict[str, Tensor], list[float]]:
    model, batches = OnMeta(), loader(*rank_and_num_ranks())
    make_dense_trainer(TunedFSDPStrategy(**SMALL)).fit(model, batches)
    trainer = make_dense_trainer(TunedFSDPStrategy(**SMALL), max_epochs=0)
    trainer.fit(OnMeta(), batches)
    return whole_weights(trainer), model.losses


class Reaches(Recording):
    """Uses the weight of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.out.weight, self.out.bias)


class OldList(Small):
    """Keeps its parameters before they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        kept = list(self.parameters())
        self.kept = lambda: kept  # a list in an attribute would follow the module

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.kept())


class WithLBFGS(Small):
    """An optimizer of one flat vector."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NoReset(Small):
    """On the meta device, without a way to draw its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, device="meta"))


class Eighths(Precision):
    """A precision that we do not know."""

    precision = "8-true"  # type: ignore[assignment]


def pruned() -> dict[str, Any]:
    return {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]}


def refused(kind: type, trainer: Any = None, **options: Any) -> Case:
    strategy = TunedFSDPStrategy(**options or SMALL)
    fields = {"batch": dense_batch, "strategy": strategy, "trainer": trainer or {}}
    return case_of(kind, **fields)


REFUSED: dict[str, Case] = {
    "a step uses the weights of a block without calling it": refused(Reaches),
    "param group 0, a parameter of shape (8, 12) that is not in the module": refused(OldList),
    "LBFGS flattens all parameters into one vector": refused(WithLBFGS),
    "ModelPruning would prune 'weight' of Linear, which is sharded": refused(Small, pruned),
    "'table' has sparse gradients, which FSDP2 does not reduce": refused(WithEmbedding),
    "'NoReset' (NoReset) is on the meta device and has no reset_parameters": refused(NoReset),
    "wrap: the module has no 'Linea', neither as a class nor as a path. Did you mean": refused(
        Small, wrap=["Linea"]
    ),
    "wrap: 'blocks' is a ModuleList, which is never called itself": refused(
        Layers, wrap=["blocks"]
    ),
    "wrap: 'one' shares a weight with another submodule": refused(BareAndTied, wrap=["one"]),
    "replicas=3: 2 ranks cannot be divided evenly among them": refused(Small, replicas=3),
    "fsdp_tuned supports '32-true'": refused(Small, {"plugins": Eighths()}),
}


def test_weights_without_memory_are_drawn_and_are_rank_0s() -> None:
    weights, losses = run_on_warm_ranks(_on_meta, 2)[0]
    drawn = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), Reset())
    torch.manual_seed(7)
    for layer in (drawn[0], drawn[2]):
        layer.reset_parameters()
    for name, value in drawn.state_dict().items():
        assert torch.equal(weights[f"net.{name}"], value), name
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(message: str) -> None:
    check_refused(REFUSED[message], message)


def test_replicas_by_node_are_cut_over_its_ranks() -> None:
    assert num_replicas("nodes", [4] * 8) == 2
    assert num_replicas("nodes", [2, 2]) == 1
    with pytest.raises(
        ConfigError, match="replicas='nodes': nodes have unequal numbers of ranks .1, 3."
    ):
        num_replicas("nodes", [3, 3, 3, 1])
