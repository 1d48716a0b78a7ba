"""Values that ranks log under other names are an error that names them; in another order, each has
its own mean."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor, nn

from lightning_distrec import (
    PipelineParallelStrategy,
    TorchRecShardedStrategy,
    TunedDDPStrategy,
    TunedFSDPStrategy,
)
from lightning_distrec.errors import RankError
from tests.support.dense_models import WIDTH, Recording, loader, whole_batches
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp_tuned": TunedDDPStrategy,
    "fsdp_tuned": TunedFSDPStrategy,
    "torchrec_sharded": TorchRecShardedStrategy,
    "pipeline_parallel": lambda: PipelineParallelStrategy(microbatches=2),
}
ON_EPOCH = {"on_step": False, "on_epoch": True, "sync_dist": True}


class Logs(Recording):
    """Logs 1 as "a" on rank 0, and 100 as "b" on rank 1, or both in an order of each rank's own."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def _log(self, place: str) -> None:
        rank = rank_and_num_ranks()[0]
        if place == self.place:
            name, value = (("a", 1.0), ("b", 100.0))[rank]
            options = ON_EPOCH if place != "step" else {"on_step": True, "sync_dist": True}
            self.log(name, value, batch_size=4, **options)
        elif place == "epoch" and self.place == "order":
            for name in ("a", "b")[:: 1 - 2 * rank]:
                self.log(name, {"a": 1.0, "b": 100.0}[name] + rank, batch_size=4, **ON_EPOCH)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._log("step")
        self._log("epoch")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])
        if self.place == "count" and rank_and_num_ranks()[0]:
            self.log("more", 1.0, batch_size=4, **ON_EPOCH)

    def on_validation_batch_end(self, *_: Any) -> None:
        self._log("validation")

    def on_validation_epoch_end(self) -> None:
        self._log("validation end")


def _fit(place: str, name: str) -> tuple[str, int, dict[str, float]]:
    rank, num_ranks = rank_and_num_ranks()
    data = whole_batches(2) if name == "pipeline_parallel" else loader(rank, num_ranks)
    trainer = pl.Trainer(strategy=STRATEGIES[name](), devices=num_ranks, **DEFAULTS)
    message = ""
    try:
        trainer.fit(Logs(place), data, data)
    except RankError as error:
        message = str(error)
    means = {key: float(trainer.callback_metrics[key]) for key in ("a", "b") if place == "order"}
    return message, trainer.global_step, means


PLACES = {
    "step": (1, "a", "b"),
    "epoch": (6, "a", "b"),
    "validation": (6, "a", "b"),
    "validation end": (6, "a", "b"),
}
CASES = {
    **{place: (_fit, place, "ddp_tuned") for place in PLACES},
    **{name: (_fit, "epoch", name) for name in STRATEGIES if name != "ddp_tuned"},
}


@pytest.fixture(scope="module")
def actual() -> list[dict[str, Any]]:
    """What each rank said, by case."""
    others = {"count": (_fit, "count", "ddp_tuned"), "order": (_fit, "order", "ddp_tuned")}
    return run_each_on_ranks(CASES | others, 2)


@pytest.mark.parametrize("case", CASES)
def test_other_names_are_an_error_on_every_rank(actual: list[dict[str, Any]], case: str) -> None:
    steps, first, second = PLACES.get(case, PLACES["epoch"])
    for rank in actual:
        message, num_steps, _ = rank[case]
        assert (
            f"self.log: rank 0 reduces ['{first}'] over the ranks, and rank 1 ['{second}']: "
            "values of" in message
        )
        assert "or log it with sync_dist=False" in message
        assert num_steps == steps


def test_one_more_name_on_one_rank_is_an_error_and_no_wait(actual: list[dict[str, Any]]) -> None:
    for rank in actual:
        assert (
            "self.log: rank 0 reduces [] over the ranks, and rank 1 ['more']: values of"
            in rank["count"][0]
        )


def test_values_that_are_logged_in_another_order_keep_their_means(
    actual: list[dict[str, Any]],
) -> None:
    for rank in actual:
        assert rank["order"] == ("", 6, {"a": 1.5, "b": 100.5})
