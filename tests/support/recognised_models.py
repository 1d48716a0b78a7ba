"""Models that call their tables in all ways in which the inputs of a lookup come out of a batch."""

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from lightning_distrec.errors import DistRecError
from tests.support.embedding_models import whole_state
from tests.support.plain_loop import OPTIMIZERS
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

STEPS, SIZES = 5, (6, 6, 4, 6, 3)
ROWS, COLUMNS, DIM = 40, 6, 8
Batch = dict[str, Any]


def draw(step: int, rank: int, size: int | None = None) -> Batch:
    """Return one rank's batch of plain tensors; bags of feature "f" and "g" have 0 to 3 ids."""
    size = SIZES[step % len(SIZES)] if size is None else size
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, ROWS, shape, generator=generator)

    lengths = torch.randint(0, 4, (2 * size,), generator=generator)
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = int(ends[-1])
    return {
        "values": ids(total),
        "features": KeyedJaggedTensor(["f", "g"], ids(total), lengths=lengths.clone()),
        "lengths": lengths,
        "offsets": ends,
        "weights": torch.rand(total, generator=generator) + 0.5,
        "sparse": ids(size, COLUMNS),
        "user": ids(size, 5),
        "positive": ids(size, 5),
        "negative": ids(size, 5),
        "label": torch.randint(0, 2, (size,), generator=generator).float(),
    }


class Recommender(pl.LightningModule):
    """Looks up and scores; keeps its losses, its state, what was sent ahead.

    optimizer: a name of `OPTIMIZERS`.
    """

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.optimizer_name = optimizer
        self.build()
        self.score = nn.LazyLinear(1)
        self.losses: list[float] = []
        self.final_state: dict[str, Tensor] = {}
        self.counts: dict[str, tuple[int, int]] = {}
        with torch.no_grad():
            self.score(self.rows(self.prepared(draw(0, 0), 0), 0))

    def build(self) -> None:
        """Make the tables."""
        self.table = nn.Embedding(ROWS, DIM)

    def prepared(self, batch: Batch, step: int) -> Any:
        """Return the batch of a step in the form that the loader gives it."""
        return batch

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        """Return what was looked up, (size, columns)."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.rows(batch, batch_idx))
        self.log("loss", loss, batch_size=1)
        return loss

    def loss(self, rows: Tensor) -> Tensor:
        """Return the loss of looked up rows, and keep it."""
        loss = (self.score(rows.float()) - 0.3).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.optimizer_name]
        return kind(self.parameters(), **options)

    def keep(self) -> None:
        """Keep what lookups were sent ahead."""
        ahead = self.trainer.strategy.lookups_ahead
        self.counts = {kind: (count.lookups, count.ahead) for kind, count in ahead.items()}

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)
        self.keep()


def collection(is_weighted: bool = False) -> EmbeddingBagCollection:
    """Return two tables of bags."""
    tables = []
    for name, dim, features in (("t", DIM, ["f"]), ("u", 2 * DIM, ["g", "f"])):
        config = EmbeddingBagConfig(
            name=name, num_embeddings=ROWS, embedding_dim=dim, feature_names=features
        )
        tables.append(config)
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


class Bags(Recommender):
    """Over an EmbeddingBagCollection of two tables."""

    def build(self) -> None:
        self.ebc = collection()

    def features(self, batch: Any) -> KeyedJaggedTensor:
        """Return what is looked up."""
        return jagged(batch, lengths=batch["lengths"])

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return self.ebc(self.features(batch)).values()


def jagged(batch: Batch, **parts: Any) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor of the batch's values."""
    return KeyedJaggedTensor(["f", "g"], batch["values"], **parts)


class Sequences(Recommender):
    """Over an EmbeddingCollection."""

    def build(self) -> None:
        shape = {"num_embeddings": ROWS, "embedding_dim": DIM}
        pairs = (("t", "f"), ("u", "g"))
        self.ec = EmbeddingCollection(
            tables=[EmbeddingConfig(name=t, feature_names=[f], **shape) for t, f in pairs]
        )

    def prepared(self, batch: Batch, step: int) -> Any:
        return jagged(batch, lengths=batch["lengths"]), batch["label"]

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.ec(batch[0])
        return torch.cat([rows["f"].values().sum(0), rows["g"].values().sum(0)]).unsqueeze(0)


def embedding() -> nn.Embedding:
    """Return a table."""
    return nn.Embedding(ROWS, DIM)


def bag(**options: Any) -> nn.EmbeddingBag:
    """Return a table of bags."""
    return nn.EmbeddingBag(ROWS, DIM, **{"mode": "sum"} | options)


class RowsOf(Recommender):
    """Looks rows up as a function of the module, the batch and the number of the step does."""

    def __init__(
        self,
        look_up: Callable[[Any, Batch, int], Tensor],
        tables: dict[str, Callable[[], nn.Module]],
        optimizer: str,
        prepare: Callable[[Batch, int], Batch] = lambda batch, step: batch,
    ) -> None:
        self.look_up, self.makers, self.prepare = look_up, tables, prepare
        super().__init__(optimizer)

    def build(self) -> None:
        for name, make in self.makers.items():
            setattr(self, name, make())

    def prepared(self, batch: Batch, step: int) -> Any:
        return self.prepare(batch, step)

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return self.look_up(self, batch, batch_idx)


ONE: dict[str, Any] = {"table": embedding}
TWO: dict[str, Any] = ONE | {"other": embedding}


def rows_of(look_up: Any, tables: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return what makes a module of these tables, of one nn.Embedding where none are named."""
    return partial(RowsOf, look_up, ONE if tables is None else tables, **options)


def bags_of(features: Callable[[Batch], Any], is_weighted: bool = False, **options: Any) -> Any:
    """Return what makes a module of bags, which looks up what a function makes of the batch."""
    tables = {"ebc": partial(collection, is_weighted)}
    return rows_of(lambda m, batch, step: m.ebc(features(batch)).values(), tables, **options)


def _three_calls(m: Any, batch: Batch, step: int) -> Tensor:
    user = m.table(batch["user"])
    return (user * m.table(batch["positive"]) - user * m.table(batch["negative"])).mean(1)


def _two_tables(m: Any, batch: Batch, step: int) -> Tensor:
    return (m.table(batch["user"]) * m.other(batch["positive"])).mean(1)


def _columns(m: Any, batch: Batch, step: int) -> Tensor:
    return torch.cat([getattr(m, f"t{i}")(batch["sparse"][:, i]) for i in range(COLUMNS)], 1)


def _bags_by_offsets(m: Any, batch: Batch, step: int) -> Tensor:
    return m.table(batch["values"], batch["offsets"], per_sample_weights=batch["weights"])


class Hooks:
    """Makes ids in the hooks around the batch's way to the device; counts their calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls = {"before": 0, "transfer": 0, "after": 0}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls["before"] += 1
        return batch | {"values": (batch["values"] * 7 + 1) % ROWS}

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.calls["transfer"] += 1
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        return batch | {"values": (batch["values"] * 3 + 2) % ROWS}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls["after"] += 1
        return batch | {"values": (batch["values"] * 11 + 3) % ROWS}


class Hooked(Hooks, Bags):
    """They are the module's."""


class HookedData(Hooks, pl.LightningDataModule):
    """They are a datamodule's."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


class Declares(Bags):
    """Makes what it looks up in sparse_inputs; keeps what that returned."""

    def __init__(self, optimizer: str = "SGD") -> None:
        self.made: list[Any] = []
        self.in_step: list[Any] = []
        super().__init__(optimizer)
        self.made.clear()
        self.in_step.clear()

    def sparse_inputs(self, batch: Any) -> Any:
        """Return the features: two columns one after the other, hashed."""
        ids = torch.cat([batch["sparse"][:, 1], batch["sparse"][:, 4]]) * 13 % ROWS
        features = KeyedJaggedTensor(
            ["f", "g"], ids, lengths=torch.ones(len(ids), dtype=torch.long)
        )
        self.made.append(features)
        return {"features": features, "batch": batch}

    def features(self, batch: Any) -> KeyedJaggedTensor:
        features = self.sparse_inputs(batch)["features"]
        assert self.sparse_inputs(batch)["features"].keys() == ["f", "g"]
        self.in_step.append(features)
        return features


# -- rows that change after the step began


def _target_first(m: Any, batch: Batch, step: int) -> Tensor:
    with torch.no_grad():
        target = m.table(batch["positive"])
    assert not target.requires_grad
    learning = m.table(batch["user"])
    assert learning.requires_grad or not torch.is_grad_enabled()
    return (learning * (1 + target)).mean(1)


def _target_last(m: Any, batch: Batch, step: int) -> Tensor:
    learning = m.table(batch["user"])
    with torch.no_grad():
        targets = [m.table(batch["user"]), m.table(batch["positive"])]
    assert not any(target.requires_grad for target in targets)
    return (learning * (1 + targets[0] + targets[1])).mean(1)


def _changes_rate(m: Any, batch: Batch, step: int) -> Tensor:
    if m._trainer is not None:
        m.trainer.optimizers[0].param_groups[0]["lr"] = 0.5 / (1 + step)
    return m.table(batch["user"]).mean(1)


def _freezes(m: Any, batch: Batch, step: int) -> Tensor:
    for weight in m.table.parameters():
        weight.requires_grad_(step not in (1, 2))
    return _two_tables(m, batch, step)


def _every_other(m: Any, batch: Batch, step: int, parity: int = 0) -> Tensor:
    rows = m.table(batch["user"])
    return (rows * m.other(batch["positive"]) if step % 2 == parity else rows).mean(1)


class ByHand(Recommender):
    """Looks users up, by manual optimization."""

    automatic_optimization = False

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        return self.table(batch["user"]).mean(1)


class Alternates(ByHand):
    """The second lookup sees what the first backward has updated."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        tables, dense = self.optimizers()
        for ids, optimizers in (
            (batch["user"], [tables]),
            (batch["user"], [tables, dense]),
            (batch["negative"], [dense]),
        ):
            loss = self.loss(self.table(ids).mean(1))
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.optimizer_name]
        return kind(self.table.parameters(), **options), kind(self.score.parameters(), **options)


class StepsFirst(ByHand):
    """The gradients of the step before are used at the beginning of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        if batch_idx:
            optimizer.step()
            optimizer.zero_grad()
        self.manual_backward(self.loss(self.rows(batch, batch_idx)))


# -- computed, or ambiguous


def _hashed(batch: Batch) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f", "g"], batch["values"] * 3 % ROWS, lengths=batch["lengths"])


def _written(batch: Batch) -> KeyedJaggedTensor:
    batch["values"].mul_(3).remainder_(ROWS)
    return jagged(batch, lengths=batch["lengths"])


def _one_of_two(m: Any, batch: Batch, step: int) -> Tensor:
    return (m.table(batch["user"]) * m.other(batch["positive"] * 3 % ROWS)).mean(1)


def _positions(m: Any, batch: Batch, step: int) -> Tensor:
    return (m.table(batch["user"]) * m.other(torch.arange(5))).mean(1)


def _shifted(m: Any, batch: Batch, step: int) -> Tensor:
    return (m.table(batch["user"][:, :-1]) * m.table(batch["user"][:, 1:])).mean(1)


def _as_long_as_the_longest(batch: Batch, step: int) -> Batch:
    return batch | {"user": batch["user"][:, : (3, 5, 2, 3, 4)[step]].clone()}


def _one_each_at_first(batch: Batch, step: int) -> Batch:
    if step > 0:
        return batch
    number = len(batch["lengths"])
    ids = batch["sparse"].flatten()[:number].clone()
    return batch | {"values": ids, "offsets": torch.arange(number + 1)}


def _with_read_lengths(batch: Batch) -> KeyedJaggedTensor:
    features = jagged(batch, offsets=batch["offsets"])
    features.lengths()
    return features


# -- features in changing orders, or without one of them

ORDERS = ("fgh", "fgh", "fgh", "hfg", "hfg", "fgh", "gfh", "fgh")
MISSING = ("fgh",) * 5 + ("fg", "fgh")
Ids = dict[str, Tensor]
Form = tuple[Callable[[Ids], Any], Callable[[Any], KeyedJaggedTensor] | None]


def one_each(keys: Iterable[str], ids: Iterable[Tensor]) -> KeyedJaggedTensor:
    """Return features with one id in each bag."""
    values = torch.cat(list(ids))
    return KeyedJaggedTensor(list(keys), values, lengths=torch.ones_like(values))


def _by_names(ids: Ids) -> Any:
    features = one_each(ids, ids.values())
    return {"names": list(ids), "values": features.values(), "lengths": features.lengths()}


FORMS: dict[str, Form] = {
    "a KeyedJaggedTensor": (
        lambda ids: {"features": one_each(ids, ids.values())},
        lambda batch: batch["features"],
    ),
    "names, ids and lengths": (
        _by_names,
        lambda b: KeyedJaggedTensor(b["names"], b["values"], lengths=b["lengths"]),
    ),
    "a table of each name": (lambda ids: list(ids.items()), None),
}
"""How a batch is made of ids; and what a collection is called with, None for no collection."""


class Reordered(Recommender):
    """Looks up features that come in changing orders."""

    def __init__(self, form: str, orders: tuple[str, ...], optimizer: str) -> None:
        self.form, self.orders = FORMS[form], orders
        super().__init__(optimizer)

    def build(self) -> None:
        if self.form[1] is None:
            self.tables = nn.ModuleDict({key: embedding() for key in "fgh"})
            return
        shape = {"num_embeddings": ROWS, "embedding_dim": DIM}
        self.ebc = EmbeddingBagCollection([
            EmbeddingBagConfig(name=f"t_{key}", feature_names=[key], **shape) for key in "fgh"
        ])

    def prepared(self, batch: Batch, step: int) -> Any:
        ids = dict(zip("fgh", batch["sparse"].clone().unbind(1)[:3], strict=True))
        return self.form[0]({key: ids[key].clone() for key in self.orders[step]})

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        if self.form[1] is None:
            rows = {name: self.tables[name](ids) for name, ids in batch}
        else:
            rows = self.ebc(self.form[1](batch)).to_dict()
        return torch.cat([rows[key] for key in "fgh"], 1)


class LooksOnRankZero(Bags):
    """Rank 0 looks at its rows before all ranks add a number up."""

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.ebc(jagged(batch, lengths=batch["lengths"]))
        if self._trainer is not None:
            if self.global_rank == 0 and batch_idx > 0:
                rows.values().norm()
            self.trainer.strategy.reduce(torch.ones(1), reduce_op="sum")
        return rows.values()


@dataclass(frozen=True)
class Case:
    """A fit with look-ahead, which is compared with one without."""

    model: Callable[[str], Recommender]
    optimizer: str = "SGD"
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    data: Callable[[list[Any]], Any] | None = None
    depth: int = 3
    steps: int = STEPS


ROW_WISE, COLUMN_WISE, TABLE_WISE = (
    {"sharding_types": [f"{way}_wise"]} for way in ("row", "column", "table")
)
OFF = {"computed_ids": False}
DENSE_SHARDED = {"dense": "fsdp", "fsdp": {"min_num_parameters": 8}}

SYNCED = bags_of(
    lambda b: KeyedJaggedTensor.from_offsets_sync(["f", "g"], b["values"], b["offsets"])
)
WEIGHTED = bags_of(
    lambda b: jagged(b, offsets=b["offsets"], weights=b["weights"]), is_weighted=True
)
SIX_COLUMNS = rows_of(_columns, {f"t{i}": embedding for i in range(COLUMNS)})
BY_OFFSETS = rows_of(_bags_by_offsets, {"table": partial(bag, include_last_offset=True)})

AHEAD: dict[str, Case] = {
    "features of the batch": Case(bags_of(lambda b: b["features"]), "SGD", TABLE_WISE),
    "of lengths": Case(Bags, "Adagrad", ROW_WISE),
    "of offsets, synchronized": Case(SYNCED, "Adam", COLUMN_WISE),
    "with weights": Case(WEIGHTED, "SGD", COLUMN_WISE),
    "sequences": Case(Sequences, "Adam", ROW_WISE),
    "columns": Case(SIX_COLUMNS, "Adam", ROW_WISE),
    "bags by offsets": Case(BY_OFFSETS, "Adagrad", TABLE_WISE),
    "three calls, sparse updates": Case(
        rows_of(_three_calls), "Adagrad", TABLE_WISE | {"embedding_update": "sparse"}, depth=2
    ),
    "three calls, accumulated in 16 bits": Case(
        rows_of(_three_calls),
        "Adam",
        COLUMN_WISE,
        {"accumulate_grad_batches": 2, "precision": "bf16-mixed", "gradient_clip_val": 0.05},
    ),
    "three calls, dense layers sharded": Case(
        rows_of(_three_calls), "SGD", ROW_WISE | DENSE_SHARDED
    ),
}
CHANGING: dict[str, Case] = {
    "target first": Case(rows_of(_target_first), "SGD", ROW_WISE, depth=2),
    "target last": Case(rows_of(_target_last), "Adagrad", COLUMN_WISE),
    "rate": Case(rows_of(_changes_rate), "SGD", ROW_WISE),
    "frozen": Case(rows_of(_freezes, TWO), "Adam", TABLE_WISE),
    "alternates": Case(Alternates, "Adam", TABLE_WISE),
}
MADE: dict[str, Case] = {
    "hooks of the module": Case(Hooked, "SGD", ROW_WISE),
    "hooks of the datamodule": Case(Bags, "Adam", TABLE_WISE, data=HookedData),
    "declared": Case(Declares, "Adagrad", ROW_WISE),
}
LATER = partial(_every_other, parity=1)
SOME: dict[str, tuple[Case, tuple[int, int]]] = {
    "every other, later": (Case(rows_of(LATER, TWO), "Adam", ROW_WISE), (7, 4)),
    "hashed": (Case(bags_of(_hashed), "SGD", ROW_WISE | {"prefetch": OFF}), (STEPS, 0)),
    "one of two": (
        Case(rows_of(_one_of_two, TWO), "Adagrad", ROW_WISE | {"prefetch": OFF}),
        (2 * STEPS, STEPS - 1),
    ),
    "written": (Case(bags_of(_written), "Adam", TABLE_WISE | {"prefetch": OFF}), (STEPS, 0)),
    "positions, in the trial": (
        Case(rows_of(_positions, TWO), "SGD", ROW_WISE),
        (2 * STEPS, STEPS - 1),
    ),
}
"""Cases, and of how many lookups how many were sent ahead."""
UNCOUNTED: dict[str, Case] = {
    "sequences of the longest of their batch": Case(
        rows_of(_shifted, prepare=_as_long_as_the_longest), "SGD", ROW_WISE
    ),
    "one id each at first": Case(
        bags_of(_with_read_lengths, prepare=_one_each_at_first), "SGD", ROW_WISE
    ),
    "gradients used at the beginning of the next step": Case(StepsFirst, "Adam", ROW_WISE),
    "rank 0 looks at its rows earlier": Case(LooksOnRankZero, "SGD", TABLE_WISE),
}
REORDERED = {name: Case(partial(Reordered, name, ORDERS), steps=8) for name in FORMS}
LACKING = {
    f"{name}, one is missing": Case(partial(Reordered, name, MISSING), steps=7)
    for name in ("a KeyedJaggedTensor", "names, ids and lengths")
}
CASES = (
    REORDERED
    | LACKING
    | AHEAD
    | CHANGING
    | MADE
    | {name: case for name, (case, _) in SOME.items()}
    | UNCOUNTED
)


class GoesWrong(Recommender):
    """Does something else in its third step, on some ranks."""

    fault, ranks = "", ()

    def build(self) -> None:
        self.table, self.other = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

    def wrong(self, fault: str, batch_idx: int) -> bool:
        """Whether to do this now."""
        return (
            self._trainer is not None
            and batch_idx == 2
            and self.fault == fault
            and self.global_rank in self.ranks
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.wrong("written", batch_idx):
            batch["user"].add_(1).remainder_(ROWS)

    def rows(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = batch_idx
        if self.wrong("fails before", batch_idx):
            raise KeyError("out of cheese")
        rows = self.table(batch["user"])
        if self.wrong("fails between", batch_idx):
            raise KeyError("out of cheese")
        other = self.other(batch["user" if self.wrong("second entry", batch_idx) else "positive"])
        return (rows * other).mean(1)


def go_wrong(fault: str, ranks: tuple[int, ...]) -> tuple[str, str, float, int]:
    """Train a model that goes wrong; returns what was raised, after how many seconds, in which
    step."""
    model = GoesWrong()
    model.fault, model.ranks = fault, ranks
    batches = [draw(step, rank_and_num_ranks()[0], size=6) for step in range(STEPS)]
    options = {"convert_embeddings": "all", "sharding_types": ["row_wise"]}
    begin = time.perf_counter()
    try:
        make_trainer(options).fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - begin, model.last
    return "", "nothing was raised", time.perf_counter() - begin, model.last


# -- one fit


def fit(
    kind: Callable[[str], Recommender],
    depth: int,
    optimizer: str = "SGD",
    strategy: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    data: Callable[[list[Any]], Any] | None = None,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train on this rank; returns losses, state, counts, the reasons that were said, calls of
    hooks. data: makes a datamodule of batches."""
    model = kind(optimizer)
    batches = [model.prepared(draw(step, rank_and_num_ranks()[0]), step) for step in range(steps)]
    model.losses.clear()
    started = {name: value.clone() for name, value in model.state_dict().items()}
    source: Any = DataLoader(batches, batch_size=None, collate_fn=_as_it_is)  # type: ignore[arg-type]
    source = {"train_dataloaders": source} if data is None else {"datamodule": data(batches)}
    prefetch = {"depth": depth} | (strategy or {}).get("prefetch", {})
    options = {"convert_embeddings": "all"} | (strategy or {}) | {"prefetch": prefetch}
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        running = make_trainer(options, **(trainer or {}))
        try:
            running.fit(model, **source)
        except DistRecError as raised:
            error = f"{type(raised).__name__}: {raised}"
    said = [str(warning.message) for warning in caught]
    state = model.final_state
    moved = {
        name: float((state[name] - value).abs().max())
        for name, value in started.items()
        if name in state  # on ranks without the whole state, nothing
    }
    return {
        "losses": model.losses,
        "logged": {name: float(value) for name, value in running.callback_metrics.items()},
        "state": state,
        "error": error,
        "counts": model.counts,
        "said": [text for text in said if "looked up as it is called" in text],
        "calls": getattr(source.get("datamodule", model), "calls", None),
        "declared": _declared(model),
        "moved": moved,
    }


def _as_it_is(batch: Any) -> Any:
    return batch


def _declared(model: Recommender) -> tuple[int, bool] | None:
    if not isinstance(model, Declares):
        return None
    pairs = zip(model.made, model.in_step, strict=False)
    return len(model.made), all(made is other for made, other in pairs)


def compare(name: str) -> dict[str, Any]:
    """Return what a case's fit with look-ahead found, and in "different" what is not as without it,
    bit for bit."""
    case = CASES[name]
    arguments = case.optimizer, case.strategy, case.trainer, case.data, case.steps
    plain, ahead = fit(case.model, 1, *arguments), fit(case.model, case.depth, *arguments)
    expected, state = plain["state"], ahead.pop("state")
    different = [key for key in ("losses", "logged", "error") if plain[key] != ahead[key]]
    assert state.keys() == expected.keys()
    different += [key for key, value in state.items() if not torch.equal(value, expected[key])]
    return ahead | {"different": different, "plain calls": plain["calls"]}
