"""Tables sharded by TorchRec beside dense layers cut by FSDP2 give the numbers of one unsharded
process."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.errors import ConfigError
from tests.support.click_model import ClickModel, EvaluatedModel, SequenceModel, rank_loader, seeded
from tests.support.dense_models import BareAndTied, loader
from tests.support.plain_loop import EVERY_CUT, OPTIMIZERS, global_batches, limit_of, train_plain
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS, make_trainer

STEPS = 7
HYBRID: dict[str, Any] = EVERY_CUT | {"dense": "fsdp", "fsdp": {"min_num_parameters": 8}}


class WithScale(EvaluatedModel):
    """A number of its own beside its layers, which stays whole."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) * self.scale

    def on_train_end(self) -> None:
        self.final_state = {
            name: value.clone() for name, value in self.trainer.strategy.full_state_dict().items()
        }


class Sequences(SequenceModel):
    """Rows instead of bags."""

    on_train_end = WithScale.on_train_end


class ByHand(WithScale):
    """Manual optimization, clipped by its own call."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self._trainer is None:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        return None


def _fit(kind: type[ClickModel], name: str, **settings: Any) -> dict[str, Tensor]:
    model = seeded(kind, *OPTIMIZERS[name])
    # its own tables
    strategy = HYBRID if kind is not Sequences else {key: HYBRID[key] for key in ("dense", "fsdp")}
    trainer = make_trainer(strategy, **settings)
    trainer.fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
    assert any(isinstance(parameter, DTensor) for parameter in model.mlp.parameters())
    return model.final_state


CASES: dict[str, tuple[Any, ...]] = {
    **{f"{name}": (_fit, WithScale, name) for name in ("SGD", "Adagrad", "Adam")},
    "SGD, clipped": (_fit, WithScale, "SGD"),
    "Adam, clipped": (_fit, WithScale, "Adam"),
    "Adam, rows": (_fit, Sequences, "Adam"),
    "Adam, by hand": (_fit, ByHand, "Adam"),
}


def _case(case: str) -> dict[str, Tensor]:
    _, kind, name = CASES[case]
    settings = {"gradient_clip_val": 0.05} if case.endswith("clipped") else {}
    return _fit(kind, name, **settings)


@pytest.fixture(scope="module")
def actual() -> list[dict[str, Any]]:
    return run_each_on_ranks({case: (_case, case) for case in CASES}, 2)


def _scaled() -> dict[str, Tensor]:
    return _fit(
        WithScale,
        "SGD",
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 256.0))],
    )


def test_loss_scaling_reaches_tables_and_sharded_layers() -> None:
    actual = run_on_warm_ranks(_scaled, 2)[0]
    model = seeded(WithScale, *OPTIMIZERS["SGD"])
    optimizer, scaler = model.configure_optimizers(), torch.amp.GradScaler("cpu", 256.0)
    for step, batch in enumerate(global_batches(STEPS)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model.training_step(batch, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    for key, value in actual.items():
        torch.testing.assert_close(value, model.state_dict()[key], atol=1e-3, rtol=0, msg=key)


def _clip(parameters: Any) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.05)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_one_process(actual: list[dict[str, Any]], case: str) -> None:
    _, kind, name = CASES[case]
    clips = case.endswith(("clipped", "by hand"))
    reference = train_plain(
        seeded(kind, *OPTIMIZERS[name]), global_batches(STEPS), *([_clip] if clips else [])
    )
    distrec = actual[0][case]
    assert distrec.keys() == reference.keys()
    for key, value in distrec.items():
        torch.testing.assert_close(value, reference[key], atol=limit_of(name), rtol=1e-5, msg=key)


def _saved_and_resumed(folder: str) -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    saving = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    straight = seeded(WithScale, *OPTIMIZERS["Adam"])
    settings: dict[str, Any] = {
        "callbacks": [saving],
        "enable_checkpointing": True,
        "gradient_clip_val": 0.05,
    }
    make_trainer(HYBRID, **settings).fit(straight, rank_loader(STEPS, rank))
    actual = {"straight": straight.losses[3:]}
    for name, strategy in {"resumed": HYBRID, "dense on every rank": EVERY_CUT}.items():
        model = WithScale(*OPTIMIZERS["Adam"])
        trainer = make_trainer(strategy, gradient_clip_val=0.05)
        trainer.fit(model, rank_loader(STEPS, rank), ckpt_path=f"{folder}/step=3.ckpt")
        actual[name] = model.losses
        trainer.validate(model, rank_loader(2, rank), verbose=False)
        actual[f"{name}, validated"] = [float(trainer.callback_metrics["val_loss"])]
    return actual


def test_a_resumed_run_goes_on_as_one_that_never_stopped(tmp_path: Path) -> None:
    for result in run_on_warm_ranks(_saved_and_resumed, 2, str(tmp_path)):
        assert result["resumed"] == pytest.approx(result["straight"], abs=1e-6)
        assert result["dense on every rank"] == pytest.approx(result["straight"], abs=1e-6)
        assert result["resumed, validated"] == pytest.approx(
            result["dense on every rank, validated"], abs=1e-6
        )


def _twice_and_averaged() -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    actual: dict[str, Any] = {}
    for name, strategy in {"fsdp": HYBRID, "ddp": EVERY_CUT}.items():
        model = seeded(WithScale, *OPTIMIZERS["Adam"])
        for _ in range(2):
            make_trainer(strategy, accumulate_grad_batches=2).fit(model, rank_loader(STEPS, rank))
        averaged = seeded(WithScale, *OPTIMIZERS["Adam"])
        make_trainer(strategy, callbacks=[EMAWeightAveraging(decay=0.5)]).fit(
            averaged, rank_loader(STEPS, rank)
        )
        actual[name] = model.losses, averaged.final_state
    return actual


def test_further_fits_accumulation_and_averages_are_those_of_dense_layers_under_ddp() -> None:
    results = run_on_warm_ranks(_twice_and_averaged, 2)
    for result in results:
        assert result["fsdp"][0] == pytest.approx(result["ddp"][0], abs=1e-5)
    distrec, other = (results[0][name][1] for name in ("fsdp", "ddp"))
    for name, value in distrec.items():
        torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dense": "zero"}, "dense='zero' is not known. Use one of 'ddp', 'fsdp'"),
        ({"fsdp": {"wrap": []}}, "is for dense='fsdp', and dense is 'ddp'"),
        ({"dense": "fsdp", "fsdp": {"replicas": 0}}, "replicas=0: must be 'nodes', or at least 1"),
    ],
)
def test_what_an_argument_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchRecShardedStrategy(**arguments)


def _without_tables() -> str:
    rank, num_ranks = rank_and_num_ranks()
    trainer = pl.Trainer(
        strategy=TorchRecShardedStrategy(dense="fsdp"), devices=num_ranks, **DEFAULTS
    )
    try:
        trainer.fit(BareAndTied(), loader(rank, num_ranks))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_module_without_tables_is_pointed_to_its_strategy() -> None:
    for message in run_on_warm_ranks(_without_tables, 2):
        assert "dense='fsdp': no embedding table of the module is sharded" in message
        assert "strategy='fsdp_tuned'" in message
