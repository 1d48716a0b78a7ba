"""A run that goes on with newer data: what is known keeps its row and its optimizer's state to the
bit, and what is new begins as the module was built."""

import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pytest
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec import PublishRows, TorchRecShardedStrategy, TunedDDPStrategy
from lightning_distrec.data import ColumnData, Columns
from lightning_distrec.errors import DistRecError
from tests.support.plain_checkpoints import plain_checkpoint
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

ROWS_PER_STEP = 16
VOCABULARIES = ("city", "films")
STEPS = 5
NUM_STEPS = 10
"""Of an epoch."""
BEFORE: dict[str, Any] = {
    "city": {"kind": "vocabulary", "rows": 10},
    "films": {"kind": "vocabulary", "rows": 12, "max_length": 3},
    "user": {"kind": "hash", "rows": 11},
    "old": {"kind": "hash", "rows": 6, "column": "user"},
    "row": {"kind": "number"},
    "price": {"kind": "number", "standardize": True},
}
AFTER: dict[str, Any] = {
    "city": {"kind": "vocabulary", "rows": 10},
    "films": {"kind": "vocabulary", "rows": 17, "max_length": 3},
    "user": {"kind": "hash", "rows": 31},
    "new": {"kind": "hash", "rows": 7, "column": "user"},
    "row": {"kind": "number"},
    "price": {"kind": "number", "standardize": True},
}


def day(number: int) -> pa.Table:
    """Return clicks; the second day has other cities and items, and some of the first's."""
    num_rows = NUM_STEPS * ROWS_PER_STEP
    draw = np.random.default_rng(number)
    sizes = draw.integers(0, 5, num_rows)
    return pa.table({
        "row": np.arange(num_rows, dtype=np.float64),
        "city": [f"c{number}" for number in draw.integers(4 * number, 4 * number + 8, num_rows)],
        "films": [
            [f"f{film}" for film in draw.integers(6 * number, 6 * number + 9, size)]
            for size in sizes
        ],
        "user": [f"u{user}" for user in draw.integers(0, 40, num_rows)],
        "price": draw.lognormal(number, size=num_rows),
        "clicked": draw.integers(0, 2, num_rows),
    })


class Sums(pl.LightningModule):
    """Adds up the vectors of all tables, so that its layers do not depend on how many there are.

    plain: what tables are that are nn.EmbeddingBags. optimizer: a class of torch.optim.
    """

    def __init__(self, features: dict[str, Any], plain: str | None, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.plain = plain
        self.optimizer = optimizer
        self.trained: list[list[int]] = []
        tables = Columns(features).tables
        if plain:
            prefix = "x_" * (plain == "of other names")
            self.bags = nn.ModuleDict()
            for name, about in tables.items():
                self.bags[prefix + name] = nn.EmbeddingBag(about.rows, 8, mode="sum")
            if plain == "ddp":  # a layer that is tied to a table
                self.cities = nn.Linear(8, tables["city"].rows, bias=False)
                self.cities.weight = self.bags["city"].weight
        else:
            configs = []
            for name, about in tables.items():
                features = list(about.features)
                configs.append(
                    EmbeddingBagConfig(
                        name=f"t_{name}",
                        num_embeddings=about.rows,
                        embedding_dim=8,
                        feature_names=features,
                    )
                )
            self.bags = EmbeddingBagCollection(tables=configs)
        self.top = nn.Linear(9, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        ids = batch["ids"]
        if self.plain:
            looked_up = [
                self.bags[name](ids[name].values(), ids[name].offsets()[:-1]) for name in self.bags
            ]
        else:
            looked_up = list(self.bags(ids).to_dict().values())
        return self.top(torch.cat([sum(looked_up), batch["dense"][:, 1:]], 1)).squeeze(1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.trained.append(batch["dense"][:, 0].int().tolist())
        return nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = {"initial_accumulator_value": 0.25} if self.optimizer == "Adagrad" else {}
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.05, **options)


class SavesWhatIsLoaded(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def fit(
    folder: str, number: int, case: dict[str, Any], checkpoint: str | None = None
) -> list[list[int]]:
    """Train on a day, five steps or, resumed, an epoch more; return the rows of this rank."""
    features = case.get("features", AFTER)
    if number == 1:
        features = case.get("before", BEFORE)
    num_ranks = rank_and_num_ranks()[1]
    model = case.get("model") or Sums(features, case.get("plain"), case["optimizer"])
    case["model"] = model if case.get("again") else None
    data = ColumnData(
        day(number),
        features,
        "clicked",
        batch_size=ROWS_PER_STEP // num_ranks,
        buffer_rows=50,
        grow=number == 2 and case.get("grow", True),
    )
    kind = TunedDDPStrategy if case.get("plain") == "ddp" else TorchRecShardedStrategy
    options = dict(case.get("strategy", {}))
    if case.get("starts") and checkpoint:
        options["checkpoint"] = {"start_from": checkpoint}
        checkpoint = None
    trainer = pl.Trainer(
        strategy=case.get("stock") or kind(**options),
        devices=num_ranks,
        max_steps=STEPS + NUM_STEPS * (checkpoint is not None),
        callbacks=[SavesWhatIsLoaded(f"{folder}/loaded.ckpt"), *case.get("callbacks", [])],
        **DEFAULTS | {"max_epochs": -1},
    )
    trainer.fit(model, data, ckpt_path=checkpoint)
    trainer.save_checkpoint(f"{folder}/day{number}.ckpt")
    return model.trained


def fit_both(folder: str, case: dict[str, Any]) -> list[list[int]]:
    fit(folder, 1, case)
    return fit(folder, 2, case, f"{folder}/day1.ckpt")


ROW: dict[str, Any] = {"sharding_types": ["row_wise"]}
CASES: dict[str, dict[str, Any]] = {
    "fused": {"optimizer": "Adagrad", "strategy": ROW},
    "columns": {
        "optimizer": "Adam",
        "strategy": {"sharding_types": ["column_wise"], "checkpoint": {"distributed": True}},
    },
    "sparse": {
        "optimizer": "Adagrad",
        "strategy": {"sharding_types": ["table_wise"], "embedding_update": "sparse"},
    },
    "dense": {"optimizer": "Rprop", "strategy": {**ROW, "embedding_update": "dense"}},
    "replicated": {"optimizer": "Adam", "strategy": {"sharding_types": ["data_parallel"]}},
    "plain": {
        "optimizer": "Adagrad",
        "plain": "sharded",
        "strategy": {**ROW, "convert_embeddings": "all"},
    },
    "ddp": {"optimizer": "Rprop", "plain": "ddp"},
    "factored": {"optimizer": "Adafactor", "plain": "ddp"},
    "started": {"optimizer": "Adagrad", "strategy": ROW, "starts": True},
}


def values_of(number: int, table: str) -> list[str]:
    """Return a day's values by falling count, those of equal counts by their letters."""
    counts: dict[str, int] = {}
    for row in day(number)[table].to_pylist():
        for value in row if isinstance(row, list) else [row]:
            counts[value] = counts.get(value, 0) + 1
    return sorted(counts, key=lambda value: (-counts[value], value))[: BEFORE[table]["rows"] - 1]


def merged_by_hand(table: str) -> dict[str, int]:
    """Return the row of each value that has one on the second day."""
    row_of = {value: row for row, value in enumerate(values_of(1, table), 1)}
    values = values_of(2, table)
    for value in values:
        if value in row_of:
            continue
        free = max(row_of.values()) + 1
        if free == AFTER[table]["rows"]:
            retired = max((v for v in row_of if v not in values), key=lambda v: row_of[v])
            free = row_of.pop(retired)
        row_of[value] = free
    return row_of


def expected_rows(table: str, saved: Tensor, built: Tensor) -> Tensor:
    """Return what a table, or an optimizer's state of it, is after loading, row by row."""
    rows = built.clone()
    if table == "user":
        return torch.cat([saved[:1], saved[1:].repeat_interleave(3, 0)])
    saved_values = values_of(1, table)
    new = {row for value, row in merged_by_hand(table).items() if value not in saved_values}
    for row in range(len(saved)):
        if row not in new:
            rows[row] = saved[row]
    return rows


def key_of(model: Sums, table: str) -> str:
    return f"bags.{table}.weight" if model.plain else f"bags.embedding_bags.t_{table}.weight"


def trained_plain(
    model: Sums, loaded: dict[str, Any], batches: list[dict[str, Any]]
) -> dict[str, Tensor]:
    """Return the weights of one process that goes on from a checkpoint's weights and state."""
    model.load_state_dict(loaded["state_dict"])
    optimizer = model.configure_optimizers()
    states = loaded["optimizer_states"][0]["state"]
    for name, parameter in model.named_parameters():
        if name in states:
            saved = {key: torch.as_tensor(value).clone() for key, value in states[name].items()}
            optimizer.state[parameter].update(saved)
    for batch in batches:
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    return model.state_dict()


QUICK = ("fused", "columns", "ddp", "started")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_what_stays_is_equal_to_the_bit_and_what_is_new_begins(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = str(tmp_path)
    ranks = run_on_warm_ranks(fit_both, 2, folder, case, timeout_seconds=90)
    first, loaded, last = (
        plain_checkpoint(tmp_path / f"{file}.ckpt") for file in ("day1", "loaded", "day2")
    )
    model = Sums(AFTER, case.get("plain"), case["optimizer"])
    built = model.state_dict()
    columns = loaded["ColumnData"]["columns"]
    old_states = first["optimizer_states"][0]["state"]
    states = loaded["optimizer_states"][0]["state"]
    for table in VOCABULARIES:
        values = {value: row for row, value in enumerate(columns["vocabularies"][table], 1)}
        assert values == merged_by_hand(table), table
    for table in (*VOCABULARIES, "user"):
        key = key_of(model, table)
        weight = loaded["state_dict"][key]
        saved = first["state_dict"][key]
        assert torch.equal(weight, expected_rows(table, saved, built[key])), table
        for kind in states[key].keys() - {"step"}:
            saved = old_states[key][kind]
            if len(saved) != len(first["state_dict"][key]):  # a number for each column
                assert torch.equal(states[key][kind], saved), (table, kind)
                continue
            begins = {"sum": 0.25, "step_size": 0.05}
            start = torch.full((len(weight), *saved.shape[1:]), begins.get(kind, 0.0))
            expected = start if name == "started" else expected_rows(table, saved, start)
            assert torch.equal(states[key][kind], expected), (table, kind)
        assert float(states[key]["step"]) == (0 if name == "started" else STEPS)
    key = key_of(model, "new")
    assert torch.equal(loaded["state_dict"][key], built[key])
    assert key_of(model, "old") not in loaded["state_dict"]
    for key in ("top.weight", "top.bias"):
        assert torch.equal(loaded["state_dict"][key], first["state_dict"][key])
    for part in ("moments", "boundaries"):
        assert columns[part] == first["ColumnData"]["columns"][part]
    # The second day has as many rows as the first, and none of its epoch is left out.
    steps = [sum(rows, []) for rows in zip(*ranks, strict=True)]
    if name != "started":
        assert sorted(sum(steps, [])) == list(range(NUM_STEPS * ROWS_PER_STEP))
    batches = [Columns.from_plain(columns)(day(2).take(rows)) for rows in steps]
    for key, value in trained_plain(model, loaded, batches).items():
        torch.testing.assert_close(last["state_dict"][key], value, atol=1e-5, rtol=1e-5, msg=key)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a hash of other rows": (
        {"features": AFTER | {"user": {"kind": "hash", "rows": 25}}},
        "'user': rows=25 would .* Set rows=11 as .*, or 31, by which each row becomes 3",
    ),
    "a smaller vocabulary": (
        {"features": AFTER | {"city": {"kind": "vocabulary", "rows": 9}}},
        "'city': a vocabulary grows only. Set rows=10",
    ),
    "another kind": (
        {"features": AFTER | {"city": {"kind": "hash", "rows": 10}}},
        "trained with another feature 'city'.*another name",
    ),
    "a table of another kind": (
        {"features": {"u": {**BEFORE["user"], "seed": 2, "column": "user", "table": "user"}}},
        "trained with another feature 'u'",
    ),
    "not told": (
        {"grow": False, "features": BEFORE | {"city": BEFORE["city"] | {"min_count": 2}}},
        "another feature 'city'.*grow=True",
    ),
    "Lightning's strategy": (
        {"stock": "auto", "features": BEFORE},
        "SingleDeviceStrategy cannot give rows",
    ),
    "no table": ({"plain": "of other names"}, "'city' change, and the module has no table of 10"),
    "a module that was trained": (
        {"again": True, "features": BEFORE},
        "the module was in a fit before",
    ),
    "a module that was tested": (
        {"predicts": True, "features": BEFORE},
        "or has loaded weights, .* Build the module again",
    ),
    "averages": ({"callbacks": [WeightAveraging()]}, "WeightAveraging would be of other values"),
    "weights alone": ({"starts": True, "file": "bare.pt"}, "the checkpoint has no features of a"),
}


def failures(folder: str) -> dict[str, str]:
    fit(folder, 1, {"optimizer": "Adam"})
    torch.save(plain_checkpoint(f"{folder}/day1.ckpt")["state_dict"], f"{folder}/bare.pt")
    messages = {}
    for name, (case, _) in REFUSED.items():
        case = {"optimizer": "Adam", **case}
        path = f"{folder}/{case.pop('file', 'day1.ckpt')}"
        if case.get("again"):
            fit(f"{folder}/again", 1, case)
        if case.get("predicts"):
            case["model"] = Sums(BEFORE, None, "Adam")
            trainer = pl.Trainer(strategy=TorchRecShardedStrategy(), devices=1, **DEFAULTS)
            trainer.predict(case["model"], ColumnData(day(1), BEFORE, "clicked"), ckpt_path=path)
        try:
            fit(f"{folder}/failed", 2, case, path)
        except DistRecError as error:
            messages[name] = str(error)
    strategy = TorchRecShardedStrategy(checkpoint={"start_from": f"{folder}/day1.ckpt"})
    trainer = pl.Trainer(strategy=strategy, devices=1, **DEFAULTS)
    model = Sums(BEFORE, None, "Adam")
    data = ColumnData(day(2), BEFORE, "clicked", grow=True)
    trainer.predict(model, data)
    with pytest.raises(DistRecError, match="or has loaded weights"):
        trainer.fit(model, data)
    return messages


def test_what_cannot_grow_is_refused_with_what_to_do(tmp_path: Path) -> None:
    messages = run_on_warm_ranks(failures, 1, str(tmp_path), timeout_seconds=90)[0]
    for name, (_, expected) in REFUSED.items():
        assert re.search(expected, messages.get(name, "no error")), (name, messages.get(name))


def publish_both(folder: str) -> None:
    features = {name: BEFORE[name] for name in ("city", "row", "price")}
    for day, checkpoint in ((1, None), (2, f"{folder}/day1.ckpt")):
        publish = PublishRows(f"{folder}/published", every_n_steps=STEPS)
        case = {"optimizer": "Adagrad", "callbacks": [publish]}
        case |= {"before": features, "features": features}
        fit(folder, day, case, checkpoint)


def test_rows_that_are_of_other_values_are_all_published(tmp_path: Path) -> None:
    run_on_warm_ranks(publish_both, 1, str(tmp_path), timeout_seconds=90)
    manifests = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("published/*.json"))]
    assert [manifest["is_snapshot"] for manifest in manifests] == [True, True, False]
    assert [manifest["base"] for manifest in manifests] == [None, None, manifests[1]["id"]]
