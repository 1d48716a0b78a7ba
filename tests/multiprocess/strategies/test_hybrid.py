"""Tables sharded by TorchRec beside dense layers cut by FSDP2 give the numbers of one unsharded
process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.errors import ConfigError
from tests.support.cases import case_of, check, check_refused, click_case
from tests.support.click_model import EvaluatedModel, SequenceModel, rank_loader, seeded
from tests.support.dense_models import BareAndTied, dense_batch
from tests.support.plain_loop import EVERY_CUT, OPTIMIZERS
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 7
FSDP: dict[str, Any] = {"dense": "fsdp", "fsdp": {"min_num_parameters": 8}}
HYBRID: dict[str, Any] = EVERY_CUT | FSDP


class WithScale(EvaluatedModel):
    """A number of its own beside its layers, which stays whole."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) * self.scale


def are_cut(trainer: Any) -> bool:
    weights = trainer.lightning_module.mlp.parameters()
    return any(isinstance(weight, DTensor) for weight in weights)


def averaged() -> dict[str, Any]:
    return {"callbacks": [EMAWeightAveraging(decay=0.5)]}


SCALED = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 256.0))]}
CLIPPED = {"gradient_clip_val": 0.05}
VALUES: dict[str, Any] = {"strategy": HYBRID, "steps": STEPS, "look": are_cut}
CASES = {
    "Adam, clipped": click_case(WithScale, "Adam", trainer=CLIPPED, **VALUES),
    "Adam, rows": click_case(SequenceModel, "Adam", **VALUES | {"strategy": FSDP}),
    "scaled": click_case(WithScale, trainer=SCALED, **VALUES | {"limit": 1e-3, "loss_limit": None}),
    "two fits, accumulated": click_case(
        WithScale, "Adagrad", fits=2, trainer={"accumulate_grad_batches": 2}, **VALUES
    ),
    "averaged": click_case(WithScale, "SGD", trainer=averaged, **VALUES),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(name: str) -> None:
    assert [outcome.seen for outcome in check(CASES[name])] == [True, True]


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


def test_a_module_without_tables_is_pointed_to_its_strategy() -> None:
    case = case_of(BareAndTied, batch=dense_batch, strategy={"dense": "fsdp"})
    words = "dense='fsdp': no embedding table of the module is sharded"
    for error in check_refused(case, words):
        assert "strategy='fsdp_tuned'" in error
