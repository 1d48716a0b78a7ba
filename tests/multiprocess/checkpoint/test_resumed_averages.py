"""Callbacks and hooks that begin a fit see what the checkpoint has, as under Lightning's own
strategies."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from tests.support.drawing_runs import Noisy, SavesAt, Splitting, WithTable
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

MAKE: dict[str, Any] = {
    "ddp_tuned": TunedDDPStrategy,
    "torchrec_sharded": lambda: TorchRecShardedStrategy(convert_embeddings="all"),
    "fsdp_tuned": TunedFSDPStrategy,
}


class Averages(StochasticWeightAveraging):
    """A user's own, which has more state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "of_user": 1}


def _scheduled(base: type[Noisy]) -> Any:
    class Scheduled(base):  # type: ignore[misc, valid-type]
        """Its rate falls; remembers a weight that it had when the fit began."""

        at_start = 0.0

        def on_fit_start(self) -> None:
            super().on_fit_start()
            self.at_start = float(self.trainer.strategy.full_parameter("model.0.weight").sum())

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
            ]

    return Scheduled()


def _average(strategy: str, path: str) -> Any:
    seen, weights, starts = [], [], []
    for resumed in (False, True):
        pl.seed_everything(5)
        module = _scheduled(WithTable if strategy == "torchrec_sharded" else Noisy)
        # the third of five epochs, the second of the averaging
        saves = SavesAt(f"{path}.{resumed}", "epoch", 11)
        trainer = pl.Trainer(
            strategy=MAKE[strategy](),
            devices=rank_and_num_ranks()[1],
            callbacks=[Averages(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2), saves],
            **(DEFAULTS | {"enable_checkpointing": True, "use_distributed_sampler": True})
            | {"limit_val_batches": 0, "max_epochs": 5},
        )
        trainer.fit(module, Splitting(), ckpt_path=f"{path}.False" if resumed else None)
        starts.append(module.at_start)
        seen.append(module.seen if resumed else module.seen[saves.num_seen :])
        weights.append(trainer.strategy.full_parameter("model.0.weight"))
    return seen, weights, starts


@pytest.mark.parametrize(
    "strategy",
    ["ddp_tuned", *(pytest.param(name, marks=pytest.mark.slow) for name in list(MAKE)[1:])],
)
def test_an_average_of_the_users_own_continues_in_its_phase_with_another_scheduler(
    strategy: str, tmp_path: Any
) -> None:
    for outcomes in run_each_on_ranks({"it": (_average, strategy, str(tmp_path / "it"))}, 2):
        seen, weights, starts = outcomes["it"]
        assert len(seen[0]) > 5
        assert seen[1] == seen[0]
        torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
        assert starts[1] != starts[0]  # on_fit_start has the weights of the checkpoint
