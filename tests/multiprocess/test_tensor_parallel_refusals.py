"""What would differ from one process when layers are split raises an error on all ranks, in place of other numbers."""

import copy
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

from lightning_distrec import TunedFSDPStrategy
from lightning_distrec.errors import DistRecError, UnsupportedError
from lightning_distrec.strategies.fully_sharded.tensor_parallel.first_batch import compare
from tests.support.dense_models import WIDTH, loader
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.split_models import Perceptron, Split
from tests.support.trainers import DEFAULTS

Computed = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """Computes something between the two layers of a pair."""

    def __init__(self, computed: Computed) -> None:
        super().__init__()
        self.up, self.down, self.computed = nn.Linear(WIDTH, 12), nn.Linear(12, 1), computed

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(self.computed(self.up(inputs)))


class Computes(Split):
    def __init__(self, computed: Computed) -> None:
        super().__init__()
        self.net = Between(computed)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


def _refusal(model: pl.LightningModule, plan: Any, size: int = 2, max_epochs: int = 1, **options: Any) -> str:
    strategy = TunedFSDPStrategy(tensor_parallel={"size": size, "plan": plan}, **options)
    settings = DEFAULTS | {"limit_val_batches": 0, "max_epochs": max_epochs}
    trainer = pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **settings)
    try:
        trainer.fit(model)
    except DistRecError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


PAIR = {"net.up": "colwise", "net.down": "rowwise"}


def _into_plain(hidden: Tensor) -> Tensor:
    return torch.zeros(len(hidden), 12).add_(hidden)


COMPUTED: dict[str, tuple[Computed, str]] = {
    "cumsum": (lambda hidden: hidden.cumsum(-1), "cumsum of the output of a layer that is split has other values"),
    "draws": (functional.gumbel_softmax, "gumbel_softmax of the output of a layer that is split has other values"),
    "views": (lambda hidden: hidden.view(-1, 3, 4).flatten(1), "view cannot be computed of the output .* a layer each"),
    "writes": (_into_plain, r"add_ writes the output of a layer that is split into a tensor that is not"),
}


def _computed(case: str) -> str:
    return _refusal(Computes(COMPUTED[case][0]), PAIR)


def _too_many() -> str:
    return _refusal(Perceptron(), {"net.0": "colwise"}, size=3)


def _unequal_batches() -> str:
    class Others(Perceptron):
        def train_dataloader(self) -> Any:
            return loader(*rank_and_num_ranks())

    return _refusal(Others(), {"net.0": "colwise"})


def _unequal_states() -> str:
    class Draws(Perceptron):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return functional.mse_loss(self(batch[0]), batch[1])

        def on_train_batch_end(self, *_: Any) -> None:
            torch.manual_seed(self.global_rank)

    return _refusal(Draws(), {"net.0": "colwise"}, max_epochs=2)


def _unequal_losses() -> str:
    class ByRank(Perceptron):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1 + self.global_rank)

    return _refusal(ByRank(), {"net.0": "colwise"})


def _in_no_block() -> str:
    model = Perceptron()
    model.automatic_optimization = False
    return _refusal(model, {"net.0": "colwise"}, wrap=["wide"])


def _copied() -> str:
    class Copies(Perceptron):
        def on_train_start(self) -> None:
            copy.deepcopy(self)

    return _refusal(Copies(), {"net.0": "colwise"})


def _unequal_gradients() -> str:
    """A function whose values are right, and whose gradient is not, for DTensors alone."""
    mesh = init_device_mesh("cpu", (rank_and_num_ranks()[1],))
    value = torch.arange(8.0).view(2, 4)
    split = distribute_tensor(value, mesh, [Shard(1)]).requires_grad_()

    def doubled(tensor: Tensor) -> Tensor:
        return tensor * 2 if not isinstance(tensor, DTensor) else tensor * 3 - tensor.detach()

    compare(torch.tanh, torch.tanh, (split,), {})
    compare(torch.add, torch.add, (split, distribute_tensor(value, mesh, [Replicate()])), {})
    try:
        compare(doubled, doubled, (split,), {})
    except UnsupportedError as error:
        return str(error)
    return "none"


CASES: dict[str, tuple[tuple[Any, ...], str]] = {
    **{case: ((_computed, case), f"UnsupportedError: .*{message}") for case, (_, message) in COMPUTED.items()},
    "too many": ((_too_many,), "ConfigError: tensor_parallel: 2 ranks cannot be groups of size=3. Use a divisor of 2"),
    "batches": ((_unequal_batches,), "DataError: .* have different batches. Let the Trainer make the sampler"),
    "states": ((_unequal_states,), "UnsupportedError: .*random generators have different states.*draw on all ranks"),
    "losses": ((_unequal_losses,), "UnsupportedError: .*different losses of one batch.*must not depend on the rank"),
    "no block": ((_in_no_block,), "UnsupportedError: .*'net.0' is in no block.*Name a module that contains it in wrap"),
    "copy": ((_copied,), "UnsupportedError: .*cannot be copied. Load trainer.strategy.full_state_dict"),
    "gradients": ((_unequal_gradients,), "doubled of the output of a layer that is split has other values, or grad"),
}


def test_what_would_differ_is_refused_on_all_ranks() -> None:
    for of_rank in run_each_on_ranks({case: call for case, (call, _) in CASES.items()}, 2):
        for case, (_, message) in CASES.items():
            assert re.search(message, of_rank[case], re.DOTALL), f"{case}: {of_rank[case]}"
