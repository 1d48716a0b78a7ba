"""Ids per example, counted before training on two ranks: they are the plain means, and training
does not notice."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec import KeyedJaggedTensor

from lightning_distrec.errors import DataError
from lightning_distrec.sharding.planning.constraints import torchrec_constraint
from lightning_distrec.strategies.tables import plan_of_run
from lightning_distrec.strategies.tables import set_up as set_up_tables
from tests.support.click_model import FEATURES, ClickModel, make_batch, seeded
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

LOOK = 3
BATCHES = (5, 2)
"""How many each rank has; the second has fewer than are looked at."""
SIZE = 8
TABLES = {"ebc.wide": ["a", "b"], "ebc.narrow": ["c"], "ebc.shared": ["b", "d"]}


def batches_of(rank: int) -> list[dict[str, Any]]:
    """Return the batches of a rank, which hold the features, and ids of a plain embedding."""
    batches = []
    for number in range(BATCHES[rank]):
        batch = make_batch(100 * rank + number)
        features = KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"])
        items = batch["lengths"][:SIZE].unsqueeze(1).repeat(1, 6)
        batches.append({"label": batch["label"], "inputs": [features, {"item": items}]})
    return batches


class Data(LightningDataModule):
    """Makes the loader anew whenever it is asked for. fails: the first time on rank 1."""

    def __init__(self, fails: bool = False, **options: Any) -> None:
        super().__init__()
        self.rank, _ = rank_and_num_ranks()
        self.fails, self.options = fails and self.rank == 1, options

    def train_dataloader(self) -> Any:
        if self.fails:
            self.fails = False
            raise OSError("the share is not mounted yet")
        return DataLoader(batches_of(self.rank), batch_size=None, **self.options)  # type: ignore[arg-type]


class TakesFeatures(ClickModel):
    """A click model whose batches hold the features, and a plain embedding with ids of their
    own."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, {"lr": 0.5})
        self.item = nn.Embedding(40, 8)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        features, remaining = batch["inputs"]
        rows = self.item(remaining["item"]).sum((1, 2))
        return self.mlp(self.ebc(features).values()).squeeze(-1) + rows


class Declares(TakesFeatures):
    """Makes its features in the step, and says how."""

    def sparse_inputs(self, batch: dict[str, Any]) -> KeyedJaggedTensor:
        features = batch["inputs"][0].to_dict()
        return KeyedJaggedTensor.from_jt_dict({
            name: features[{"a": "d", "d": "a"}.get(name, name)] for name in "abcd"
        })


def fit(
    look: int, data: Any, model: type[TakesFeatures] = TakesFeatures, **extra: Any
) -> tuple[list[float], dict[str, Any], list[str]]:
    """Return the losses, ids per example by table, and what was said, of a fit that looks at some
    batches first."""
    actual: dict[str, Any] = {}
    message: list[str] = []

    def noted(*args: Any) -> Any:
        constraints = plan_of_run.with_counted_ids(*args)
        for table in args[1].tables:
            constraint = constraints[table.full_name]
            factors = constraint.pooling_factors
            if constraint.options.pooling_factor is not None:
                factors = tuple(torchrec_constraint(table, constraint).pooling_factors or ())
            actual[table.full_name] = factors
        return constraints

    set_up_tables.with_counted_ids, plan_of_run.rank_zero_info = noted, message.append  # type: ignore[assignment]
    trained = seeded(model)
    options = {
        "convert_embeddings": "all",
        "sharding_types": ["row_wise"],
        "planning": {"estimate_pooling": look},
    }
    options["batch_size_per_rank"] = SIZE  # of larger batches the counted ids would be sent once
    trainer = make_trainer(options | extra, max_epochs=2)
    try:
        trainer.fit(
            trained,
            **({"datamodule": data} if isinstance(data, Data) else {"train_dataloaders": data}),
        )
    except DataError as error:
        message.append(str(error))
    return trained.losses, actual, message


def plain_means(names: list[str], ranks: tuple[int, ...] = (0, 1)) -> tuple[float, ...]:
    """Return ids per example over the first batches of these ranks."""
    looked_at = [batch for rank in ranks for batch in batches_of(rank)[:LOOK]]
    means = []
    for name in names:
        lengths = torch.cat([batch["inputs"][0][name].lengths() for batch in looked_at])
        means.append(int(lengths.sum()) / len(lengths))
    return tuple(means)


class Stream(IterableDataset):
    """Batches in the order in which they come."""

    def __iter__(self) -> Any:
        return iter(batches_of(1))


def _run() -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    runs: dict[str, Any] = {}
    runs["without, in order"], runs["in order"] = fit(0, Data()), fit(LOOK, Data())
    runs["without, shuffled"] = fit(0, Data(shuffle=True))
    runs["shuffled"] = fit(LOOK, Data(shuffle=True))
    runs["fails"] = fit(LOOK, Data(fails=True))
    runs["stream"] = fit(LOOK, DataLoader(Stream(), batch_size=None))
    runs["declared"] = fit(LOOK, Data(), Declares, tables={"narrow": {"pooling_factor": 9.0}})
    half = Data().train_dataloader() if rank == 0 else DataLoader([], batch_size=None)  # type: ignore[arg-type]
    runs["empty"] = fit(LOOK, half)
    return runs


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """What each rank found."""
    return run_on_warm_ranks(_run, 2)


def test_factors_are_the_plain_means_over_the_batches_of_both_ranks(
    runs: list[dict[str, Any]],
) -> None:
    expected: dict[str, Any] = {
        name: pytest.approx(plain_means(names)) for name, names in TABLES.items()
    }
    a, b, c, d = plain_means(list("abcd"))
    assert len({a, b, c, d}) == 4
    for run in runs:
        _, actual, _ = run["in order"]
        assert actual == expected | {"item": (6.0,)}
        _, actual, _ = run["declared"]
        # Each feature is counted in the batch and in what the step computes of it.
        swapped = (a + d) / 2
        assert actual["ebc.wide"] == pytest.approx((swapped, b))
        assert actual["ebc.shared"] == pytest.approx((b, swapped))
        assert actual["ebc.narrow"] == (9.0,), "a given factor stays"
    (message,) = runs[0]["in order"][2]
    assert message == (
        "torchrec_sharded: estimate_pooling: ids are counted in 5 batches of 2 ranks."
    )


def test_training_gives_the_same_losses_bit_for_bit(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        for name, without in (("in order",) * 2, ("fails", "in order"), ("shuffled",) * 2):
            losses, actual, _ = run[name]
            expected, empty, silence = run[f"without, {without}"]
            assert losses == expected
            assert len(losses) == 2 * min(BATCHES)
            assert (empty, silence) == ({}, [])
            assert None not in actual.values()


def test_what_could_not_be_looked_at_is_reported_and_the_other_ranks_batches_count(
    runs: list[dict[str, Any]],
) -> None:
    for run in runs:
        for name in ("fails", "empty"):
            assert run[name][1]["ebc.narrow"] == pytest.approx(plain_means(["c"], (0,)))
        assert "batch" in run["empty"][2][-1], "training says that a rank has nothing to train on"
    (message,) = runs[0]["fails"][2]
    assert "counted in 3 batches of 2 ranks" in message
    assert message.endswith(". not read: rank 1: OSError: the share is not mounted yet.")
    assert set(runs[0]["stream"][1].values()) == {None}
    (message,) = runs[0]["stream"][2]
    assert "ids are counted in 0 batches of 2 ranks. not read: rank 0: Stream is" in message
    assert message.endswith(
        "rank 1: Stream is an IterableDataset, which may not start twice with the same batches."
    )
