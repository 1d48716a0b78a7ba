"""Gradients compressed by PowerSGD: the numbers of torch's hook, and a resumed run goes on as if it
had not stopped."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_distrec import TunedDDPStrategy
from lightning_distrec.errors import ConfigError
from tests.support.dense_models import WIDTH, Numbers, Recording, WithEmbedding, loader
from tests.support.dense_runs import make_dense_trainer, whole_weights
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks

POWERSGD = {"matrix_rank": 2, "start_step": 2}
SMALL_BUCKETS = 0.005
"""MiB: the layers below are in several buckets."""


class Wide(Recording):
    """Matrices that are worth compressing, two of them alike, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)
        )
        self.out = nn.Linear(32, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.net(inputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.02, momentum=0.9)


class UnfreezesWide(Wide):
    """Its first layer learns from the second epoch on: there are other buckets then."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def _fit(
    kind: type[Recording] = Wide, path: str | None = None, **settings: Any
) -> tuple[list[float], dict[str, Any]]:
    pl.seed_everything(5)
    model = kind()
    options = settings.pop("options", {"powersgd": POWERSGD, "bucket_cap_mb": SMALL_BUCKETS})
    trainer = make_dense_trainer(TunedDDPStrategy(**options), **settings)
    trainer.fit(model, loader(*rank_and_num_ranks()), ckpt_path=path)
    return model.losses, whole_weights(trainer)


def _by_hand(start_step: int) -> tuple[list[float], dict[str, Any]]:
    """The same with torch's own hook, without DDP, and with all gradients in one bucket, in the
    module's order."""
    pl.seed_everything(5)
    model = Wide()
    state = PowerSGDState(None, 2, orthogonalization_epsilon=1e-8)
    state.start_powerSGD_iter = start_step
    parameters = list(model.parameters())
    optimizer = model.configure_optimizers()
    for _ in range(2):
        for inputs, targets in loader(*rank_and_num_ranks()):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            values = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
            parts = values.split([parameter.numel() for parameter in parameters])
            gradients = [
                part.view(parameter.shape)
                for part, parameter in zip(parts, parameters, strict=True)
            ]
            parts_of_bucket = {
                "index": 0,
                "buffer": values,
                "gradients": gradients,
                "is_last": True,
            }
            powerSGD_hook(
                state,
                Mock(**{f"{name}.return_value": part for name, part in parts_of_bucket.items()}),
            ).wait()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            model.losses.append(float(loss.detach()))
    return model.losses, model.state_dict()


def _with_equal_draws(fit: Callable[[], Any]) -> Any:
    """Call it where all matrices of a shape start from the same numbers, whichever bucket they are
    in."""
    draw = torch.randn

    def draw_equal(*shape: int, **options: Any) -> Tensor:
        return draw(*shape, **{"generator": torch.Generator().manual_seed(0)} | options)

    with patch.object(torch, "randn", draw_equal):
        return fit()


def _saved(folder: str) -> dict[str, Any]:
    """Train, and resume from a checkpoint of before the first compressed step, and from one of
    after it."""
    saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    straight = _fit(callbacks=[saving], enable_checkpointing=True)
    resumed = {step: _fit(path=f"{folder}/step={step}.ckpt") for step in (1, 2, 7)}
    forgotten = _fit(path=f"{folder}/step=7.ckpt", options={"bucket_cap_mb": SMALL_BUCKETS})
    return {"straight": straight, "resumed": resumed, "forgotten": forgotten}


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "powersgd: 'table' has sparse gradients": (WithEmbedding, {}),
    "powersgd with Trainer(precision='16-mixed'): what the compression leaves over": (
        Wide,
        {"plugins": pl.plugins.MixedPrecision("16-mixed", "cpu")},
    ),
}


def _refusal(kind: Any, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        _fit(kind, options={"powersgd": POWERSGD}, **settings)
    return str(refused.value)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("saved"))
    calls: dict[str, tuple[Any, ...]] = {
        "compressed": (_fit,),
        "equal draws": (_with_equal_draws, _fit),
        "by hand": (_with_equal_draws, partial(_by_hand, POWERSGD["start_step"])),
        "saved": (_saved, folder),
        "unfreezes": (_fit, UnfreezesWide),
        "accumulated": (_fit_accumulated,),
        "single numbers": (_fit, Numbers),
    }
    refusals = {output: (_refusal, *case) for output, case in REFUSED.items()}
    return [
        rank_results | {"folder": folder} for rank_results in run_each_on_ranks(calls | refusals, 2)
    ]


def _fit_accumulated() -> tuple[list[float], dict[str, Any]]:
    return _fit(accumulate_grad_batches=2, gradient_clip_val=0.5)


def _check_same(
    actual: tuple[list[float], dict[str, Any]], other: tuple[list[float], dict[str, Any]]
) -> None:
    assert actual[0] == pytest.approx(other[0][-len(actual[0]) :], abs=1e-6)
    for name, value in other[1].items():
        torch.testing.assert_close(actual[1][name], value, atol=1e-6, rtol=1e-6, msg=name)


def test_numbers_are_those_of_torchs_hook(results: list[dict[str, Any]]) -> None:
    for rank in results:
        _check_same(rank["equal draws"], rank["by hand"])
    for case in ("compressed", "unfreezes", "accumulated", "single numbers"):
        first, second = (rank[case][1] for rank in results)
        for name, value in first.items():
            assert torch.equal(value, second[name]), name
            assert bool(value.isfinite().all())


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(results: list[dict[str, Any]]) -> None:
    for rank in results:
        straight = rank["saved"]["straight"]
        for step, resumed in rank["saved"]["resumed"].items():
            assert len(resumed[0]) == 12 - step
            _check_same(resumed, straight)
        assert rank["saved"]["forgotten"][0] != pytest.approx(straight[0][7:], abs=1e-4)


def _resumed_alone(path: str) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, _ = _fit(path=path)
    return losses, [str(warning.message) for warning in caught]


@pytest.mark.slow
def test_another_number_of_ranks_drops_what_was_left_over_with_a_warning(
    results: list[dict[str, Any]],
) -> None:
    path = Path(results[0]["folder"], "step=7.ckpt")
    ranks = run_on_warm_ranks(_resumed_alone, 4, str(path))
    for losses, _ in ranks:
        assert len(losses) == 3
        assert all(loss == loss for loss in losses)
    words = "what the compression had left over on each of them is dropped"
    assert any(words in message for _, messages in ranks for message in messages)
