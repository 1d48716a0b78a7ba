"""What is easily lost while weights are gathered and freed under `fsdp_tuned`: writes, unsent
gradients, averages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from lightning_distrec import TunedDDPStrategy, TunedFSDPStrategy
from lightning_distrec.errors import ConfigError, UnsupportedError
from tests.support.dense_models import WIDTH, Numbers, Recording, loader
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

BLOCKS: dict[str, Any] = {"min_num_parameters": 8}
ROOT: dict[str, Any] = {"wrap": []}
State = dict[str, Tensor]


def _trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    options = DEFAULTS | {"max_epochs": 2} | settings
    return pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **options)


def _state(trainer: pl.Trainer, model: nn.Module) -> State:
    strategy: Any = trainer.strategy
    state = (
        strategy.full_state_dict() if hasattr(strategy, "full_state_dict") else model.state_dict()
    )
    return {name: value.clone() for name, value in state.items()}


def _run(kind: type[pl.LightningModule], strategy: Any, **settings: Any) -> State:
    pl.seed_everything(5)
    model = kind()
    trainer = _trainer(strategy, **settings)
    trainer.fit(model, loader(*rank_and_num_ranks()))
    return _state(trainer, model)


class Small(Recording):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


def _looks_between_fits(strategy: Callable[[], Any]) -> State:
    """A forward outside of any run, and then another fit."""
    pl.seed_everything(5)
    model = Small()
    for _ in range(2):
        trainer = _trainer(strategy(), max_epochs=1)
        trainer.fit(model, loader(*rank_and_num_ranks()))
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
    return _state(trainer, model)


class Fails(Small):
    """Fails once, in the third step."""

    has_failed = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and not self.has_failed:
            self.has_failed = True
            raise ValueError("this once")
        return loss


def _fails_and_fits_again(strategy: Callable[[], Any]) -> State:
    pl.seed_everything(5)
    model = Fails()
    try:
        _trainer(strategy(), accumulate_grad_batches=4).fit(model, loader(*rank_and_num_ranks()))
    except ValueError:
        trainer = _trainer(strategy(), accumulate_grad_batches=4)
        trainer.fit(model, loader(*rank_and_num_ranks()))
    return _state(trainer, model)


class ByHand(Small):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ThrowsAway(ByHand):
    """Adds up a gradient without an exchange, and throws it away."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = functional.mse_loss(self(batch[0]), batch[1])
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
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


def _keeps_and_averages(strategy: Callable[[], Any]) -> State:
    """Two fits, the module sharded for good in between, with an average of its weights."""
    pl.seed_everything(5)
    model = KeepsParameters()
    for _ in range(2):
        trainer = _trainer(strategy(), callbacks=[EMAWeightAveraging(decay=0.5)])
        trainer.fit(model, loader(*rank_and_num_ranks()))
        with torch.no_grad():
            full = _state(trainer, model)
        if hasattr(trainer.strategy, "unshard"):
            trainer.strategy.unshard()
    return full


class Looks(pl.Callback):
    """Computes with the module after each step, before averages are taken."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with torch.no_grad():
            pl_module(batch[0])


def _averages_while_looked_at(strategy: Callable[[], Any]) -> State:
    return _run(Small, strategy(), callbacks=[Looks(), EMAWeightAveraging(decay=0.5)])


def _with(kind: type[pl.LightningModule], **settings: Any) -> Callable[[Callable[[], Any]], State]:
    def run(strategy: Callable[[], Any]) -> State:
        return _run(kind, strategy(), **settings)

    return run


RUNS: dict[str, Callable[[Callable[[], Any]], State]] = {
    "a forward between two fits": _looks_between_fits,
    "a run that failed": _fails_and_fits_again,
    "gradients thrown away": _with(ThrowsAway),
    "a look before the step": _with(LooksBeforeStepping),
    "a look while toggled": _with(TogglesAround),
    "buffers read and written": _with(Centered, accumulate_grad_batches=3),
    "a group added in the step": _with(AddsAGroup),
    "looks between averages": _averages_while_looked_at,
    "parameters kept in dicts and lists": _keeps_and_averages,
}


def _as_under_ddp(name: str) -> dict[str, State]:
    """Weights under ddp, and under fsdp_tuned in blocks, as a whole, and computed once more."""
    run = RUNS[name]
    return {
        "ddp": run(lambda: "ddp"),
        "blocks": run(lambda: TunedFSDPStrategy(**BLOCKS)),
        "root": run(lambda: TunedFSDPStrategy(**ROOT)),
        "recomputed": run(lambda: TunedFSDPStrategy(activation_checkpointing=True, **BLOCKS)),
    }


@pytest.fixture(scope="module")
def actual() -> list[dict[str, Any]]:
    calls: dict[str, Any] = {name: (_as_under_ddp, name) for name in RUNS}
    return run_each_on_ranks(calls | {message: (_refusal, message) for message in REFUSED}, 2, 100)


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_those_of_ddp(actual: list[dict[str, Any]], name: str) -> None:
    states = actual[0][name]
    for way in ("blocks", "root", "recomputed"):
        assert states[way].keys() == states["ddp"].keys()
        for key, value in states[way].items():
            torch.testing.assert_close(
                value, states["ddp"][key], atol=1e-5, rtol=1e-5, msg=f"{way}: {key}"
            )


class Averages(Small):
    """Keeps an average of its weights inside of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, 8).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.slow.weight.lerp_(self.net[0].weight, 0.1)
        return loss


class Penalized(Small):
    """Learns from a gradient of its output."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].requires_grad_()
        outputs = self(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return functional.mse_loss(outputs, batch[1]) + slope.norm()


class TwoTypes(Small):
    """Weights of 32 and of 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))


class KeepsForGood(Small):
    """Has a parameter in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = (self.net[0].weight, 2)


class Lazy(Recording):
    """A layer that waits for its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(1)


class WithAdafactor(Small):
    """Its optimizer looks at whole weights."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def _under(kind: type[pl.LightningModule], *strategies: Any, **settings: Any) -> Callable[[], None]:
    def run() -> None:
        model = kind()
        for strategy in strategies:
            _trainer(strategy(), max_epochs=1, **settings).fit(model, loader(*rank_and_num_ranks()))

    return run


def _in(options: dict[str, Any]) -> Callable[[], Any]:
    return lambda: TunedFSDPStrategy(**options)


REFUSED: dict[str, Callable[[], None]] = {
    "a step has written to 'slow.weight' while it was gathered": _under(Averages, _in(ROOT)),
    "backward ran twice .gradients of gradients.": _under(Penalized, _in(BLOCKS)),
    "parameters outside of blocks: 'fine' .float64., .* are of several types": _under(
        TwoTypes, _in(ROOT)
    ),
    "'net.weight' has no shape before the first forward .a lazy module.": _under(Lazy, _in(ROOT)),
    "torch.optim.Adafactor fails, or has other numbers": _under(WithAdafactor, _in(BLOCKS)),
    "self\\['pair'\\]\\[0\\] keeps a parameter in a tuple or a set": _under(
        KeepsForGood, _in(ROOT)
    ),
    "an earlier run has sharded this module as FSDPOptions.wrap=..,": _under(
        Small, _in(ROOT), _in(BLOCKS)
    ),
    "ddp_tuned: 'net.0.weight' was sharded over the ranks by an earlier": _under(
        Small, _in(ROOT), TunedDDPStrategy
    ),
}


def _refusal(message: str) -> str:
    try:
        REFUSED[message]()
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_lost_is_reported_on_every_rank(
    actual: list[dict[str, Any]], message: str
) -> None:
    for rank_result in actual:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(rank_result[message])


def _resumes_averages(folder: str) -> list[tuple[State, State]]:
    """Runs that never stopped, and that went on from their first epoch, with averages."""
    pairs = []
    for average in (
        lambda: EMAWeightAveraging(decay=0.8),
        lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=1),
    ):
        states = []
        for path in (None, f"{folder}/{len(pairs)}/epoch=1.ckpt"):
            pl.seed_everything(5)
            model = Small()
            saving = ModelCheckpoint(f"{folder}/{len(pairs)}", filename="{epoch}", save_top_k=-1)
            callbacks = [average(), *([saving] if path is None else [])]
            settings: dict[str, Any] = {
                "callbacks": callbacks,
                "enable_checkpointing": path is None,
                "max_epochs": 4,
            }
            trainer = _trainer(TunedFSDPStrategy(**BLOCKS), **settings)
            trainer.fit(model, loader(*rank_and_num_ranks()), ckpt_path=path)
            states.append(_state(trainer, model))
        pairs.append((states[0], states[1]))
    return pairs


def test_averages_go_on_where_a_checkpoint_left_them(tmp_path: Path) -> None:
    for straight, resumed in run_on_warm_ranks(_resumes_averages, 2, str(tmp_path))[0]:
        for name, value in straight.items():
            torch.testing.assert_close(resumed[name], value, atol=1e-6, rtol=1e-6, msg=name)
