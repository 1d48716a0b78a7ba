"""A trained module is called outside of the Trainer, as recommend() and evaluation loops do; steps
may return None."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_distrec import TorchRecShardedStrategy, TunedFSDPStrategy
from lightning_distrec.errors import ShardingError
from tests.support.click_model import seeded
from tests.support.embedding_models import TwoTower, loader, pairs, train_unsharded
from tests.support.ranks import rank_and_num_ranks, run_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS, make_trainer

STEPS = 6


class SkipsEvenBatches(TwoTower):
    """Returns no loss for every other batch, which Lightning allows on one rank."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else None


def _recommend(model: TwoTower, users: Tensor, items: Tensor) -> Tensor:
    """Return the three best items of each user, by scores computed in two blocks of items."""
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(users, block) for block in items.chunk(2)], dim=1)
    return scores.topk(3).indices


def _train_and_call(kind: type[TwoTower]) -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    model = seeded(kind)
    trainer = make_trainer({"convert_embeddings": "all"})
    trainer.fit(model, loader([pairs(step, rank) for step in range(STEPS)]))
    users, items = pairs(STEPS, rank)
    called = model(users, items)
    called.sum().backward()  # a loop of the user's own may go on training dense layers
    actual = {"called": called.detach(), "recommended": _recommend(model, users, items)}
    actual["predicted"] = torch.cat(trainer.predict(model, loader([(users, items)])))  # type: ignore[arg-type]
    return actual | {"recommended again": _recommend(model, users, items)}


def _wanted(kind: type[TwoTower], num_ranks: int) -> list[dict[str, Any]]:
    batches = [[pairs(step, rank) for rank in range(num_ranks)] for step in range(STEPS)]
    if kind is SkipsEvenBatches:
        batches = batches[1::2]
    trained = train_unsharded(seeded(TwoTower), batches)
    actual = []
    for rank in range(num_ranks):
        users, items = pairs(STEPS, rank)
        scores, best = trained(users, items).detach(), _recommend(trained, users, items)
        actual.append({
            "called": scores,
            "predicted": scores,
            "recommended": best,
            "recommended again": best,
        })
    return actual


@pytest.mark.parametrize(("num_ranks", "kind"), [(1, SkipsEvenBatches), (2, TwoTower)])
def test_a_trained_module_is_called_outside_of_the_trainer(
    num_ranks: int, kind: type[TwoTower]
) -> None:
    actual = run_on_warm_ranks(_train_and_call, num_ranks, kind)
    for rank, expected in enumerate(_wanted(kind, num_ranks)):
        for label, values in expected.items():
            torch.testing.assert_close(actual[rank][label], values, atol=1e-5, rtol=0, msg=label)


def _call_on_rank_0(strategy: type[DDPStrategy], options: dict[str, Any]) -> list[str]:
    """Return what a call on rank 0 alone says while the other rank fits again, and then has ended;
    "" elsewhere."""
    rank, _ = rank_and_num_ranks()
    model, batches = seeded(TwoTower), loader([pairs(step, rank) for step in range(2)])
    Trainer(strategy=strategy(**options), devices=2, **DEFAULTS).fit(model, batches)
    users, items = pairs(STEPS, rank)
    model(users, items)  # on every rank it is a lookup like others
    said = []
    for is_last in (False, True):
        if rank == 0:
            with pytest.raises(ShardingError) as refused:
                model(users, items)
            said.append(str(refused.value))
        if not is_last:
            Trainer(strategy=strategy(**options), devices=2, **DEFAULTS).fit(model, batches)
    return said


@pytest.mark.parametrize(
    ("strategy", "options"),
    [(TorchRecShardedStrategy, {"convert_embeddings": "all"}), (TunedFSDPStrategy, {})],
)
def test_a_call_on_one_rank_alone_is_refused_with_two_ways_out(
    strategy: type[DDPStrategy], options: dict[str, Any]
) -> None:
    again, ended = run_on_ranks(_call_on_rank_0, 2, strategy, options)[0]
    assert "was called after the run on 1 of 2 ranks; others have begun another run." in again
    assert "Call it on every rank" in again
    assert "or call trainer.strategy.unshard() on every rank first" in again
    assert "others have reached the end of their program" in ended
