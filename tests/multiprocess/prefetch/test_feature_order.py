"""Batches whose features come in another order, or of which one is missing, train as without
look-ahead."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

ROWS, SIZE = 40, 5
ORDERS = ("fgh", "fgh", "fgh", "hfg", "hfg", "fgh", "gfh", "fgh")
MISSING = ("fgh",) * 5 + ("fg", "fgh")
Ids = dict[str, Tensor]


def one_each(keys: list[str], ids: Tensor) -> KeyedJaggedTensor:
    """Return features with one id in each bag."""
    return KeyedJaggedTensor(keys, ids, lengths=torch.ones(len(ids), dtype=torch.long))


def _by_names(ids: Ids) -> Any:
    values = torch.cat(list(ids.values()))
    lengths = torch.ones(len(values), dtype=torch.long)
    return {"names": list(ids), "values": values, "lengths": lengths}


def _rows_of_names(m: Any, batch: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: m.tables[name](ids) for name, ids in batch}


def _bags(features: Callable[[Any], KeyedJaggedTensor]) -> Callable[[Any, Any], dict[str, Tensor]]:
    return lambda m, batch: m.ebc(features(batch)).to_dict()


FORMS: dict[str, tuple[Callable[[Ids], Any], Any, tuple[int, int] | None]] = {
    "a KeyedJaggedTensor": (
        lambda ids: {"features": one_each(list(ids), torch.cat(list(ids.values())))},
        _bags(lambda batch: batch["features"]),
        (8, 7),
    ),
    "names, ids and lengths": (
        _by_names,
        _bags(lambda b: KeyedJaggedTensor(b["names"], b["values"], lengths=b["lengths"])),
        (8, 4),
    ),
    "a table of each name": (lambda ids: list(ids.items()), _rows_of_names, (24, 12)),
    "a dict": (
        dict,
        _bags(lambda batch: one_each(list(batch), torch.cat(list(batch.values())))),
        None,
    ),
    "a KeyedJaggedTensor of each": (
        lambda ids: {key: one_each([key], feature) for key, feature in ids.items()},
        _bags(lambda batch: KeyedJaggedTensor.concat(list(batch.values()))),
        None,
    ),
}
"""How a batch is made of ids, and looked up; of how many lookups how many are sent ahead, where
that does not depend on what the step computes."""


class Reordered(pl.LightningModule):
    """Looks features up, and weighs each of them differently."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.look_up = FORMS[form][1]
        if form == "a table of each name":
            self.tables = nn.ModuleDict({key: nn.Embedding(ROWS, 4) for key in "fgh"})
        else:
            shape = {"num_embeddings": ROWS, "embedding_dim": 4}
            self.ebc = EmbeddingBagCollection([
                EmbeddingBagConfig(name=f"t_{key}", feature_names=[key], **shape) for key in "fgh"
            ])
        self.losses: list[float] = []
        self.ahead = (0, 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.look_up(self, batch)
        loss = sum((rows[key] ** 2).sum() * weight for weight, key in enumerate("fgh", 1)) / 100
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_end(self) -> None:
        count = self.trainer.strategy.lookups_ahead.get("training 0")
        if count is not None:
            self.ahead = (count.lookups, count.ahead)


def _fit(
    form: str, orders: tuple[str, ...], depth: int
) -> tuple[list[float], tuple[int, int], str]:
    """Return losses, lookups and how many were sent ahead, and the error."""
    model, rank = Reordered(form), rank_and_num_ranks()[0]
    batches = []
    for step, order in enumerate(orders):
        draw = torch.Generator().manual_seed(100 * step + rank)
        ids = {key: torch.randint(0, ROWS, (SIZE,), generator=draw) for key in "fgh"}
        batches.append(FORMS[form][0]({key: ids[key] for key in order}))
    error = ""
    trainer = make_trainer({"convert_embeddings": "all", "prefetch": {"depth": depth}})
    try:
        trainer.fit(model, DataLoader(batches, batch_size=None, collate_fn=_as_it_is))  # type: ignore[arg-type]
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return model.losses, model.ahead, error


def _as_it_is(batch: Any) -> Any:
    return batch


def _fit_both(form: str, orders: tuple[str, ...]) -> Any:
    return _fit(form, orders, 1), _fit(form, orders, 3)


def test_features_in_another_order_are_looked_up_as_the_step_calls() -> None:
    for results in run_each_on_ranks({form: (_fit_both, form, ORDERS) for form in FORMS}, 2):
        for form, (_, _, count) in FORMS.items():
            (plain, _, failed), (ahead, counted, failed_too) = results[form]
            assert (failed, failed_too) == ("", ""), form
            assert len(plain) == len(ORDERS), form
            assert ahead == plain, form
            assert count is None or counted == count, (form, counted)


def test_a_missing_feature_is_named_as_without_look_ahead() -> None:
    forms = ("a KeyedJaggedTensor", "names, ids and lengths", "a dict")
    for results in run_each_on_ranks({form: (_fit_both, form, MISSING) for form in forms}, 2):
        for (plain, _, failed), (ahead, _, failed_too) in results.values():
            assert "needs the features ['h'], but was called with ['f', 'g']" in failed
            assert failed_too == failed
            assert ahead == plain
            assert len(plain) == MISSING.index("fg")
