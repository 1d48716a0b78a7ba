"""Sharded tables that a finetuning callback unfreezes learn from then on, as in a plain loop."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from tests.support.click_model import FEATURES, ClickModel, bag_configs, rank_loader, seeded
from tests.support.plain_loop import (
    OPTIMIZERS,
    USUAL,
    State,
    assert_equal,
    fit_with_each,
    global_batches,
    loss_of,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer


class Unfreezes(BaseFinetuning):
    """Lets the tables learn from epoch 1 on, at half the rate."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.ebc)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.ebc, optimizer, initial_denom_lr=2.0)


class LearnsInPart(ClickModel):
    """Gives its optimizer what learns at the start."""

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], **self.options)


def finetune_plain(name: str) -> State:
    """Train the dense layers for an epoch and everything for two, by a plain loop."""
    model = seeded(LearnsInPart, *OPTIMIZERS[name])
    model.ebc.requires_grad_(False)
    optimizer = model.configure_optimizers()
    for epoch in range(3):
        if epoch == 1:
            model.ebc.requires_grad_(True)
            tables = list(model.ebc.parameters())
            optimizer.add_param_group({"params": tables, "lr": OPTIMIZERS[name][1]["lr"] / 2})
        for batch in global_batches(4):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model.state_dict()


class WithBackbone(ClickModel):
    """Has its tables in a backbone, which its optimizer does not know at the start."""

    def _build(self) -> None:
        self.ebc = None
        self.backbone = nn.ModuleDict({"tables": EmbeddingBagCollection(tables=bag_configs())})

    def configure_model(self) -> None:
        """Everything is built."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.mlp(self.backbone["tables"](features).values()).squeeze(-1)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.mlp.parameters(), **self.options)


def _backbone(strategy: dict[str, Any]) -> dict[str, tuple[State, list[float]]]:
    rank, _ = rank_and_num_ranks()
    actual = {}
    for name in USUAL:
        model = seeded(WithBackbone, *OPTIMIZERS[name])
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.3)
        trainer = make_trainer(strategy, max_epochs=4, callbacks=[callback])
        trainer.fit(model, rank_loader(3, rank))
        actual[name] = (
            model.final_state,
            [group["lr"] for group in trainer.optimizers[0].param_groups],
        )
    return actual


def _resumed_backbone(path: str) -> State:
    for max_epochs, ckpt_path in ((2, None), (4, path)):
        model = seeded(WithBackbone, *OPTIMIZERS["Adam"])
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.3)
        trainer = make_trainer(
            {"sharding_types": ["row_wise"]}, max_epochs=max_epochs, callbacks=[callback]
        )
        trainer.fit(model, rank_loader(3, rank_and_num_ranks()[0]), ckpt_path=ckpt_path)
        trainer.save_checkpoint(path)
    return model.final_state


def train_backbone(name: str) -> tuple[State, list[float]]:
    """Train the backbone from epoch 1 on, its rate doubled at every epoch until it is that of the
    rest."""
    model = seeded(WithBackbone, *OPTIMIZERS[name])
    model.backbone.requires_grad_(False)
    optimizer = model.configure_optimizers()
    full = OPTIMIZERS[name][1]["lr"]
    for epoch in range(4):
        if epoch == 1:
            model.backbone.requires_grad_(True)
            optimizer.add_param_group({
                "params": list(model.backbone.parameters()),
                "lr": 0.3 * full,
            })
        elif epoch > 1:
            optimizer.param_groups[1]["lr"] = min(full, 2 * optimizer.param_groups[1]["lr"])
        for batch in global_batches(3):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model.state_dict(), [group["lr"] for group in optimizer.param_groups]


@pytest.fixture(scope="module")
def finetuned() -> dict[str, Any]:
    """What rank 0 trained, by cut."""
    calls: dict[str, tuple[Any, ...]] = {}
    for cut in ("row_wise", "table_wise"):
        strategy, options = {"sharding_types": [cut]}, {"max_epochs": 3, "callbacks": [Unfreezes()]}
        calls[cut] = (fit_with_each, LearnsInPart, USUAL, strategy, options, 4)
        calls[f"backbone {cut}"] = (_backbone, strategy)
    return run_each_on_ranks(calls, 2)[0]


@pytest.mark.parametrize("cut", ["row_wise", "table_wise"])
def test_tables_that_a_finetuning_callback_unfreezes_learn_from_then_on(
    finetuned: dict[str, Any], cut: str
) -> None:
    assert_equal(finetuned[cut], finetune_plain)


def test_what_was_unfrozen_learns_on_in_a_resumed_run(tmp_path: Path) -> None:
    actual = run_on_warm_ranks(_resumed_backbone, 2, str(tmp_path / "checkpoint.ckpt"))[0]
    start = seeded(WithBackbone, *OPTIMIZERS["SGD"]).state_dict()
    assert_equal({"Adam": actual}, lambda name: train_backbone(name)[0], start)


@pytest.mark.parametrize("cut", ["row_wise", "table_wise"])
def test_tables_in_a_backbone_are_finetuned_as_in_a_plain_loop(
    finetuned: dict[str, Any], cut: str
) -> None:
    # Not compared with DDP, which never averages the gradients of what was frozen when it began.
    actual = finetuned[f"backbone {cut}"]
    start = seeded(WithBackbone, *OPTIMIZERS["SGD"]).state_dict()
    assert_equal(
        {n: state for n, (state, _) in actual.items()}, lambda n: train_backbone(n)[0], start
    )
    for name, (_, rates) in actual.items():
        assert rates == pytest.approx(train_backbone(name)[1])
