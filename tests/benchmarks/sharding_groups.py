"""AUROC of the MovieLens recipe with tables in groups of ranks: python -m
tests.benchmarks.sharding_groups.

Four ranks in two groups, 1,024 examples in a step as in the recipe's README, five epochs, validated
after the last
only: a validation synchronises, and would come more often than every 100th step.
"""

import statistics
import sys
from typing import Any

import lightning.pytorch as pl

from lightning_distrec import TorchRecShardedStrategy
from recipes.movielens_dlrm.data import MovieLensDataModule
from recipes.movielens_dlrm.model import ClickModel
from tests.support.click_model import NO_OUTPUT
from tests.support.ranks import run_on_warm_ranks, stop_warm_ranks

SEEDS = (1, 2, 3)
INTERVALS = (None, 1, 10, 100)
EPOCHS = 5


def train(interval: int | None, seed: int, data_dir: str) -> dict[str, Any]:
    """Train on this rank; return the metrics of validation and test after the last epoch."""
    pl.seed_everything(seed)
    model = ClickModel(dim=16, hidden=64, table_learning_rate=0.004, learning_rate=0.004)
    model.configure_model()  # outside of the strategy, so that all runs start from the same rows
    groups = None if interval is None else {"size": 2, "sync_interval": interval}
    trainer = pl.Trainer(
        strategy=TorchRecShardedStrategy(sharding_groups=groups),
        accelerator="cpu",
        devices=4,
        max_epochs=EPOCHS,
        check_val_every_n_epoch=EPOCHS,
        num_sanity_val_steps=0,
        **NO_OUTPUT,
    )
    data = MovieLensDataModule(data_dir=data_dir, batch_size=256, history_length=20)
    trainer.fit(model, data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics | {"steps": trainer.global_step} | trainer.test(model, data, verbose=False)[0]


def main(data_dir: str = "data/movielens-100k") -> None:
    """Print a row for each interval."""
    MovieLensDataModule(cache_dir=data_dir).prepare_data()
    print(
        "| `sync_interval` | validation AUROC | test AUROC | test log-loss |\n| --- | --- | --- "
        "| --- |"
    )
    for interval in INTERVALS:
        actual = [run_on_warm_ranks(train, 4, interval, seed, data_dir)[0] for seed in SEEDS]
        columns = [
            f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"
            for name in ("val_auroc", "test_auroc", "test_log_loss")
            for values in [[seed_values[name] for seed_values in actual]]
        ]
        print(f"| {interval or 'no groups'} | {' | '.join(columns)} |", flush=True)
    print(f"{actual[0]['steps']} steps")
    stop_warm_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
