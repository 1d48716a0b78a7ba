"""Tables sharded by TorchRec beside dense layers cut by FSDP2 give the numbers of one unsharded
process."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.cases import case_of, check, check_refused, click_case
from tests.support.click_model import EvaluatedModel, SequenceModel
from tests.support.dense_models import BareAndTied, dense_batch
from tests.support.parameters import slow_except
from tests.support.plain_loop import EVERY_CUT
from tests.support.resuming import Life, Run, live, problems_of

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


@pytest.mark.parametrize("name", slow_except(["Adam, clipped", "averaged"], CASES))
def test_weights_are_those_of_one_process(name: str) -> None:
    assert [outcome.seen for outcome in check(CASES[name])] == [True, True]


def test_a_resumed_run_goes_on_as_one_that_never_stopped() -> None:
    run = Run(strategy=HYBRID, trainer={"gradient_clip_val": 0.05})
    life = Life(run, 2, ((2, {}), (2, {"strategy": EVERY_CUT})))
    assert problems_of(life, live({"life": life})["life"]) == []


def test_a_module_without_tables_is_pointed_to_its_strategy() -> None:
    case = case_of(BareAndTied, batch=dense_batch, strategy={"dense": "fsdp"})
    words = "dense='fsdp': no embedding table of the module is sharded"
    for error in check_refused(case, words):
        assert "strategy='fsdp_tuned'" in error
