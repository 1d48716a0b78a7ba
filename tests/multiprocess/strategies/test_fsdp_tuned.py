"""`fsdp_tuned` has the numbers of Lightning's `ddp`, and of one process, however the module is
cut."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_distrec import TunedFSDPStrategy
from tests.support.dense_models import KINDS, loader, whole_batches
from tests.support.parameters import slow_except
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

Outcome = tuple[list[float], dict[str, Tensor]]


def _fit(kind: str, strategy: Any, **settings: Any) -> Outcome:
    pl.seed_everything(5)
    model = KINDS[kind]()
    rank, num_ranks = rank_and_num_ranks()
    options = DEFAULTS | {"max_epochs": 2, "limit_val_batches": 2} | settings
    trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **options)
    trainer.fit(
        model, loader(rank, num_ranks), loader(rank, num_ranks) if kind == "Layers" else None
    )
    whole = (
        trainer.strategy.full_state_dict()
        if isinstance(strategy, TunedFSDPStrategy)
        else model.state_dict()
    )
    return model.losses, {name: value.clone() for name, value in whole.items()}


def _both(kind: str, options: dict[str, Any], settings: dict[str, Any]) -> tuple[Outcome, Outcome]:
    stock = {"find_unused_parameters": True} if kind == "Unused" else {}
    return (
        _fit(kind, TunedFSDPStrategy(**options), **settings),
        _fit(kind, pl.strategies.DDPStrategy(**stock), **settings),
    )


FEWER_STEPS = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
SMALL = {"min_num_parameters": 8}
CASES: dict[str, tuple[Any, ...]] = {
    "bare and tied": (_both, "BareAndTied", SMALL, {}),
    "of a generic class": (_both, "GenericFirst", SMALL, {}),
    "all for the whole step": (_both, "BareAndTied", {"wrap": []}, {}),
    "clipped and accumulated": (_both, "BareAndTied", SMALL, FEWER_STEPS),
    "batch norm": (_both, "WithBatchNorm", SMALL, {}),
    "two optimizers by hand": (_both, "TwoByHand", SMALL, {}),
    "table": (_both, "DenseTable", SMALL, {}),
    "unused layers": (_both, "Unused", SMALL, {}),
    "single numbers": (_both, "Numbers", SMALL, {"gradient_clip_val": 0.1}),
    "blocks, and validation in between": (_both, "Layers", SMALL, {"val_check_interval": 2}),
    "freed by backward only": (
        _both,
        "Layers",
        SMALL | {"reshard_after_forward": False},
        FEWER_STEPS,
    ),
    "offloaded, on a CPU to where they are": (_both, "BareAndTied", SMALL | {"offload": True}, {}),
    "computed once more": (_both, "Layers", SMALL | {"activation_checkpointing": True}, {}),
}


def _check_same(distrec: Outcome, other: Outcome, rank: int, most: float = 1e-5) -> None:
    assert distrec[0] == pytest.approx(other[0], abs=most)
    if rank == 0:
        assert distrec[1].keys() == other[1].keys()
    for name, value in distrec[1].items():
        torch.testing.assert_close(value, other[1][name], atol=most, rtol=most, msg=name)


@pytest.mark.parametrize("num_ranks", slow_except([2], [2, 3]))
def test_losses_and_weights_are_those_of_ddp(num_ranks: int) -> None:
    for rank, results in enumerate(run_each_on_ranks(CASES, num_ranks)):
        for name, (distrec, stock) in results.items():
            print(name)
            _check_same(distrec, stock, rank)


def _fit_with(kind: str, options: dict[str, Any], settings: dict[str, Any]) -> Outcome:
    return _fit(kind, TunedFSDPStrategy(**options), **settings)


AS_ONE: dict[str, tuple[Any, ...]] = {
    "BareAndTied": (_fit_with, "BareAndTied", SMALL, FEWER_STEPS),
    "Adversaries": (_fit_with, "Adversaries", SMALL, {}),
    "Adversaries, their networks as blocks": (
        _fit_with,
        "Adversaries",
        {"wrap": ["maker", "judge"]},
        {},
    ),
    "Numbers, in two replicas": (
        _fit_with,
        "Numbers",
        SMALL | {"replicas": 2},
        {"gradient_clip_val": 0.1},
    ),
    "Numbers, as 64 bits": (_fit_with, "Numbers", SMALL, {"precision": "64-true"}),
}


@pytest.mark.parametrize("num_ranks", slow_except([2], [2, 4]))
def test_weights_are_those_of_one_process_with_the_batches_of_all(num_ranks: int) -> None:
    first, *_ = run_each_on_ranks(AS_ONE, num_ranks)
    for case, (_, weights) in first.items():
        _, kind, _, settings = AS_ONE[case]
        pl.seed_everything(5)
        single = KINDS[kind]()
        trainer = pl.Trainer(**DEFAULTS | {"max_epochs": 2} | settings)
        trainer.fit(single, whole_batches(num_ranks))
        for name, value in single.state_dict().items():
            torch.testing.assert_close(
                weights[name], value, atol=1e-5, rtol=1e-5, msg=f"{case}: {name}"
            )
