"""ScaledLearningRate multiplies what optimizers and schedulers say by the ranks' factor, at every
step and once."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distrec import ScaledLearningRate
from tests.multiprocess.optimizers.test_learning_rates import ScheduledModel
from tests.support.click_model import (
    ClickModel,
    join_batches,
    largest_difference,
    make_batch,
    rank_loader,
    seeded,
)
from tests.support.counting_rates import (
    SCHEDULERS,
    CountingRates,
    batches,
    rates_of_plain_loop,
)
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS, make_trainer

Rates = list[list[float]]
EPOCHS = 3


def fit(
    module: CountingRates, scaling: dict[str, Any] | None, strategy: str = "ddp", **options: Any
) -> tuple[Rates, Rates]:
    """Train on this rank. scaling: arguments of ScaledLearningRate; None: without it.

    Returns the rates that each step used, and those that the groups held after it.
    """
    ckpt_path = options.pop("ckpt_path", None)
    scalings = [] if scaling is None else [ScaledLearningRate(**scaling)]
    callbacks = [*options.pop("callbacks", []), *scalings]
    settings = DEFAULTS | {"max_epochs": EPOCHS, "callbacks": callbacks} | options
    trainer = pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **settings)
    trainer.fit(module, batches(), ckpt_path=ckpt_path)
    return module.used, module.shown


def rates(
    kind: type[CountingRates], scaling: dict[str, Any], schedule: str, options: dict[str, Any]
) -> tuple[Rates, Rates]:
    return fit(kind(schedule) if schedule else kind(), scaling, **options)


def check(actual: Rates, expected: Rates) -> None:
    assert len(actual) == len(expected)
    for step, (actual_rates, expected_rates) in enumerate(zip(actual, expected, strict=True)):
        assert actual_rates == pytest.approx(expected_rates, abs=1e-12), f"step {step}"


def test_the_factor_multiplies_what_every_scheduler_of_torch_sets() -> None:
    scaling = {"warmup_steps": 5}
    calls = {name: (rates, CountingRates, scaling, name, {}) for name in SCHEDULERS}
    for results in run_each_on_ranks(calls, 2):
        for name, (used, shown) in results.items():
            print(name)
            plain = rates_of_plain_loop(name, "step", EPOCHS)
            factors = [min(1 + step / 5, 2) for step in range(len(plain))]
            check(used, [[factor * rate for rate in plain[n]] for n, factor in enumerate(factors)])
            # it steps after the groups were looked at
            if name != "ReduceLROnPlateau":
                check(shown[:-1], plain[1:])


SCALING = {"warmup_steps": 6}


def _save(folder: str) -> Rates:
    saving = ModelCheckpoint(
        folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=True
    )
    options = {"callbacks": [saving], "enable_checkpointing": True, "strategy": "ddp_tuned"}
    return fit(CountingRates("ExponentialLR"), SCALING, **options)[0]


def _resume(folder: str) -> Rates:
    path = f"{folder}/epoch=0.ckpt"
    return fit(CountingRates("ExponentialLR"), SCALING, "ddp_tuned", ckpt_path=path)[0]


def test_a_resumed_run_goes_on_with_the_warm_up_on_the_factor_of_its_own_ranks(
    tmp_path: Path,
) -> None:
    plain = rates_of_plain_loop("ExponentialLR", "step", EPOCHS)
    for straight in run_on_warm_ranks(_save, 2, str(tmp_path)):
        check(straight, [[min(1 + n / 6, 2) * rate for rate in plain[n]] for n in range(12)])
    for resumed in run_on_warm_ranks(_resume, 2, str(tmp_path)):
        check(resumed, straight[4:])
    for resumed in run_on_warm_ranks(_resume, 3, str(tmp_path)):
        check(resumed, [[min(1 + 2 * n / 6, 3) * rate for rate in plain[n]] for n in range(4, 12)])


def _train_tables(embedding_update: str) -> tuple[dict[str, Any], list[str]]:
    model = seeded(ScheduledModel, "step")
    trainer = make_trainer(
        {"embedding_update": embedding_update},
        max_epochs=2,
        callbacks=[ScaledLearningRate(warmup_steps=4)],
    )
    kinds: list[str] = []
    model.on_train_start = lambda: kinds.extend(trainer.strategy.run_tables.fused_tables)  # type: ignore[attr-defined]
    trainer.fit(model, rank_loader(5, rank_and_num_ranks()[0]))
    return model.final_state, kinds


def test_tables_have_the_rates_of_a_plain_loop_updated_inside_of_backward_or_not() -> None:
    model = seeded(ScheduledModel, "step")
    optimizer, scheduler = model.optimizer_and_scheduler()
    for step in range(10):
        plain = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, plain, strict=True):
            group["lr"] = rate * min(1 + step / 4, 2)
        optimizer.zero_grad()
        model.training_step(
            join_batches([make_batch(1000 * (step % 5) + rank) for rank in range(2)]), step
        ).backward()
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, plain, strict=True):
            group["lr"] = rate
        scheduler.step()
    calls = {kind: (_train_tables, kind) for kind in ("fused", "sparse", "dense")}
    for kind, (state, fused) in run_each_on_ranks(calls, 2)[0].items():
        assert len(fused) == (3 if kind == "fused" else 0)
        assert max(largest_difference(state, model.state_dict()).values()) <= 1e-6, kind


def _train_tables_twice(folder: str) -> list[dict[str, Any]]:
    """Return the weights of a run that never stopped, and of one that resumes from its first
    epoch."""
    actual = []
    for ckpt_path in (None, f"{folder}/epoch=0.ckpt"):
        model = seeded(ScheduledModel, "step")
        saving = ModelCheckpoint(
            folder, save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=True
        )
        callbacks = [ScaledLearningRate(warmup_steps=8), *([] if ckpt_path else [saving])]
        trainer = make_trainer(
            max_epochs=2, callbacks=callbacks, enable_checkpointing=not ckpt_path
        )
        trainer.fit(model, rank_loader(5, rank_and_num_ranks()[0]), ckpt_path=ckpt_path)
        actual.append(model.final_state)
    return actual


def test_tables_that_are_resumed_within_the_warm_up_end_as_those_that_never_stopped(
    tmp_path: Path,
) -> None:
    for straight, resumed in run_on_warm_ranks(_train_tables_twice, 2, str(tmp_path)):
        assert max(largest_difference(resumed, straight).values()) <= 1e-7


class ByHand(ClickModel):
    """Steps by hand, forward and backward first."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class SetsItsRate(ClickModel):
    """Sets its rate inside of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.5
        return super().training_step(batch, batch_idx)


def _train_click_model(kind: type[ClickModel], embedding_update: str) -> None:
    model = seeded(kind, torch.optim.SGD, {"lr": 0.1})
    trainer = make_trainer({"embedding_update": embedding_update}, callbacks=[ScaledLearningRate()])
    trainer.fit(model, rank_loader(2, rank_and_num_ranks()[0]))


@pytest.mark.parametrize(
    ("kind", "update", "message"),
    [
        (ByHand, "fused", "this backward runs outside of optimizer.step.*Set embedding_update"),
        (
            SetsItsRate,
            "auto",
            "param group 0 of SGD was set during a step.*in on_train_batch_start",
        ),
    ],
)
def test_rates_that_would_not_be_scaled_are_reported(
    kind: type[ClickModel], update: str, message: str
) -> None:
    with pytest.raises(RankFailed, match=f"OptimizerError: ScaledLearningRate: .*{message}"):
        run_on_warm_ranks(_train_click_model, 2, kind, update)
