"""Values that ranks log under other names are an error that names them; in another order, each has
its own mean."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_distrec import (
    PipelineParallelStrategy,
    TorchRecShardedStrategy,
    TunedDDPStrategy,
    TunedFSDPStrategy,
)
from lightning_distrec.errors import RankError
from tests.support.dense_models import Small, loader, whole_batches
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp_tuned": TunedDDPStrategy,
    "fsdp_tuned": TunedFSDPStrategy,
    "torchrec_sharded": TorchRecShardedStrategy,
    "pipeline_parallel": lambda: PipelineParallelStrategy(microbatches=2),
}
ON_EPOCH = {"on_step": False, "on_epoch": True, "sync_dist": True}


class Logs(Small):
    """Logs 1 as "a" on rank 0, and 100 as "b" on rank 1, or both in an order of each rank's own."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

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


PLACES = {"step": 1, "epoch": 6, "validation": 6, "validation end": 6}
"""Place -> how many steps are made before the error."""


def test_other_names_are_an_error_on_every_rank_and_another_order_is_none() -> None:
    places = [*PLACES, "count", "order"]
    calls = {place: (_fit, place, "ddp_tuned") for place in places}
    others = {name: (_fit, "epoch", name) for name in STRATEGIES if name != "ddp_tuned"}
    for rank in run_each_on_ranks(calls | others, 2):
        for case in [*PLACES, *others]:
            message, num_steps, _ = rank[case]
            words = "self.log: rank 0 reduces ['a'] over the ranks, and rank 1 ['b']: values of"
            assert words in message, case
            assert "or log it with sync_dist=False" in message
            assert num_steps == PLACES.get(case, PLACES["epoch"]), case
        words = "self.log: rank 0 reduces [] over the ranks, and rank 1 ['more']: values of"
        assert words in rank["count"][0], "one more name on one rank is no wait"
        assert rank["order"] == ("", 6, {"a": 1.5, "b": 100.5}), "each has its own mean"
