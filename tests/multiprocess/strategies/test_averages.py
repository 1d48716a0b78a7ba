"""Weight averages over shards are the averages of the unsharded run; summaries count whole
tables."""

import copy
import io
import logging
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelSummary,
    RichModelSummary,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_avg_fn

from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.weights.shard_access import without_guard
from tests.support.click_model import (
    ClickModel,
    join_batches,
    largest_difference,
    make_batch,
    rank_loader,
    seeded,
    train_sharded,
)
from tests.support.plain_checkpoints import plain_checkpoint
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks

SGD = (torch.optim.SGD, {"lr": 1.0})
ADAM = (torch.optim.Adam, {"lr": 0.001})
STEPS, EPOCHS = 4, 4


class Averaged(ClickModel):
    """Keeps what it was validated with, and saves a checkpoint in the middle."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.validated: list[float] = []
        self.folder = ""

    def val_dataloader(self) -> Any:
        return rank_loader(1, rank_and_num_ranks()[0])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.append(float(self(batch).sum()))

    def on_train_epoch_start(self) -> None:
        if self.folder and self.current_epoch == 2:
            self.trainer.save_checkpoint(f"{self.folder}/saved.ckpt")


class Reference:
    """The same run by a plain loop, with a moving average after every step."""

    def __init__(self, optimizer: Any, epochs: int) -> None:
        self.model = seeded(Averaged, *optimizer)
        self.averaged = AveragedModel(self.model, avg_fn=get_ema_avg_fn(0.9))
        self.validated: list[list[float]] = []
        self.after_two_epochs: dict[str, Tensor] = {}
        stepper = self.model.configure_optimizers()
        for epoch in range(epochs):
            for step in range(STEPS):
                train_step(self.model, stepper, step)
                self.averaged.update_parameters(self.model)
            self.validated.append([
                float(self.averaged.module(make_batch(rank)).sum().detach()) for rank in range(2)
            ])
            if epoch == 1:
                self.after_two_epochs = copy.deepcopy(self.state)

    @property
    def state(self) -> dict[str, Tensor]:
        """The averaged weights."""
        return {key: value.detach() for key, value in self.averaged.module.state_dict().items()}


def train_step(model: ClickModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step on the global batch of two ranks."""
    optimizer.zero_grad()
    model.training_step(
        join_batches([make_batch(1000 * step + rank) for rank in range(2)]), step
    ).backward()
    optimizer.step()


def _moving(optimizer: Any, folder: str, fits: int) -> tuple[dict[str, Tensor], list[float]]:
    model = seeded(Averaged, *optimizer)
    model.folder = folder
    for _ in range(fits):
        train_sharded(model, STEPS, max_epochs=EPOCHS, callbacks=[EMAWeightAveraging(decay=0.9)])
    return model.final_state, model.validated


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_a_moving_average_is_that_of_the_unsharded_run(optimizer: Any, tmp_path: Path) -> None:
    actual = run_on_warm_ranks(_moving, 2, optimizer, str(tmp_path), 1)
    reference = Reference(optimizer, EPOCHS)
    limit = 1e-6 if optimizer is SGD else 1e-5
    # The callback moves the average into the model before the model's own on_train_end.
    assert max(largest_difference(actual[0][0], reference.state).values()) <= limit
    for rank in range(2):
        assert actual[rank][1] == pytest.approx(
            [rank_results[rank] for rank_results in reference.validated], abs=1e-4
        )
    saved = plain_checkpoint(tmp_path / "saved.ckpt")
    assert (
        max(largest_difference(saved["state_dict"], reference.after_two_epochs).values()) <= limit
    )
    assert (
        max(largest_difference(saved["current_model_state"], reference.after_two_epochs).values())
        > 1e-4
    )


def test_a_second_fit_averages_again() -> None:
    actual = run_on_warm_ranks(_moving, 2, SGD, "", 2)[0][0]
    first = Reference(SGD, EPOCHS)
    repeated = seeded(Averaged, *SGD)
    repeated.load_state_dict(first.state)
    averaged = AveragedModel(repeated, avg_fn=get_ema_avg_fn(0.9))
    stepper = repeated.configure_optimizers()
    for step in range(STEPS * EPOCHS):
        train_step(repeated, stepper, step % STEPS)
        averaged.update_parameters(repeated)
    assert max(largest_difference(actual, averaged.module.state_dict()).values()) <= 1e-6


def _stochastic(optimizer: Any) -> dict[str, Tensor]:
    model = seeded(Averaged, *optimizer)
    average = StochasticWeightAveraging(
        swa_lrs=0.5, swa_epoch_start=2, annealing_epochs=2, annealing_strategy="linear"
    )
    train_sharded(model, STEPS, max_epochs=EPOCHS, callbacks=[average])
    return model.final_state


def test_stochastic_weight_averaging_is_that_of_the_unsharded_run() -> None:
    actual = run_on_warm_ranks(_stochastic, 2, SGD)[0]
    model = seeded(Averaged, *SGD)
    stepper = model.configure_optimizers()
    averaged, scheduler = AveragedModel(model), None
    for epoch in range(EPOCHS):
        if epoch == 1:  # swa_epoch_start counts from 1
            stepper.param_groups[0]["initial_lr"] = 0.5
            scheduler = SWALR(stepper, swa_lr=0.5, anneal_epochs=2, anneal_strategy="linear")
        if scheduler is not None:
            averaged.update_parameters(model)
        for step in range(STEPS):
            train_step(model, stepper, step)
        if scheduler is not None:
            scheduler.step()
    assert max(largest_difference(actual, averaged.module.state_dict()).values()) <= 1e-6


def _summaries() -> tuple[str, str, int]:
    lines: list[str] = []
    logger = logging.getLogger("lightning.pytorch.callbacks.model_summary")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    model = seeded(ClickModel, *SGD)
    train_sharded(
        model,
        1,
        {"sharding_types": ["row_wise"]},
        callbacks=[ModelSummary()],
        enable_model_summary=True,
    )
    rich = io.StringIO()
    with redirect_stdout(rich):
        options = {"callbacks": [RichModelSummary()], "enable_model_summary": True}
        train_sharded(seeded(ClickModel, *ADAM), 1, {"sharding_types": ["column_wise"]}, **options)
    with without_guard():
        local = sum(p.numel() for p in model.ebc.parameters())
    return "\n".join(lines), rich.getvalue(), local


def test_summaries_count_whole_tables() -> None:
    plain, rich, local = run_on_warm_ranks(_summaries, 2)[0]
    tables_values = 60 * 16 + 37 * 8 + 11 * 8
    assert local < tables_values  # what a rank has is less, also after the summary
    whole = tables_values + 56 * 16 + 16
    assert "ebc" in plain
    for message in (plain, rich):
        assert "1.3 K" in message, message  # 1,344 of tables
        assert f"{whole / 1000:.1f} K" in message, message


def _copies() -> str:
    model = seeded(ClickModel, *SGD)
    train_sharded(model, 1)
    model.trainer = None
    copied = copy.deepcopy(model)
    assert torch.equal(copied.mlp[0].weight, model.mlp[0].weight)
    assert isinstance(copied.ebc, nn.Module)
    with pytest.raises(ShardingError) as reported:
        copied(make_batch(0))
    return str(reported.value)


def test_a_deep_copy_has_no_rows_and_reports_it_when_it_is_called() -> None:
    assert "its tables hold no rows" in run_on_warm_ranks(_copies, 2)[0]
