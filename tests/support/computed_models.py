"""The shapes of public click models, in a few lines each: what they look up is computed in the
step."""

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec.prefetch import control_message
from lightning_distrec.prefetch.recorder import READS_BATCH
from tests.support.embedding_models import whole_state
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

ROWS, SIZE = 5000, 16
Batch = dict[str, Tensor]
Rows = list[Tensor]


class Tables(nn.Module):
    """The tables of one shape, and what else it uses."""

    def __init__(self, has_bags: bool) -> None:
        super().__init__()
        self.t, self.u = nn.Embedding(ROWS, 8), nn.Embedding(ROWS, 8)
        self.register_buffer("item_to_category", torch.randint(0, 50, (100,)))
        self.offsets = torch.tensor([0, 100, 200, 300])
        self.weight = nn.Parameter(torch.randn(100, 4))
        self.count = 0
        self.previous: Tensor | None = None
        if has_bags:
            tables = [
                EmbeddingBagConfig(
                    name=f"t{key}", num_embeddings=ROWS, embedding_dim=8, feature_names=[key]
                )
                for key in "fg"
            ]
            self.ebc = EmbeddingBagCollection(tables)

    def bags(self, features: KeyedJaggedTensor) -> Rows:
        """Return the bags of both tables."""
        return [self.ebc(features).values()]


class Shapes(pl.LightningModule):
    """Looks up as these shapes do, one after the other; keeps its losses and what was sent ahead
    after each epoch."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tables = nn.ModuleDict({
            name: Tables("kjt" in name or "bags" in name) for name in names
        })
        self.losses: list[float] = []
        self.ahead: list[tuple[int, int]] = []

    def training_step(self, batch: dict[str, Batch], batch_idx: int) -> Tensor:
        loss = torch.zeros(())
        for name, tables in self.tables.items():
            for rows in SHAPES[name].look_up(tables, batch[name]):
                loss = loss + rows.square().mean() + rows.mean()
            loss = loss + tables.weight.square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)

    def on_train_epoch_end(self) -> None:
        if count := self.trainer.strategy.lookups_ahead.get("training 0"):
            self.ahead.append((count.lookups, count.ahead))


@dataclass(frozen=True)
class ShapeOfStep:
    """What is looked up, and how."""

    look_up: Callable[[Any, Any], Rows]
    make: Callable[[int], Batch]
    """Returns a batch of a size."""
    reason: str | None
    """Why the computed calls are not prefetched; None: they are."""
    calls: int
    """That are sent ahead of a step."""
    found: int
    """How many of these are also ahead of a batch of another size: found in it, not computed."""


SHAPES: dict[str, ShapeOfStep] = {}


def plain(size: int) -> Batch:
    """Return a batch of columns of ids."""
    return {
        "x": ids(size, 4),
        "a": ids(size),
        "b": ids(size),
        "mask": ids(size, 4) > 30,
        "flag": ids(size) > 1000,
        "y": torch.rand(size),
    }


def ragged(size: int) -> Batch:
    """Return a batch of sequences, padded to the longest."""
    longest = int(torch.randint(5, 30, ()))
    return {
        "seq": ids(size, longest),
        "len": torch.randint(1, longest + 1, (size,)),
        "a": ids(size),
    }


def padded(size: int) -> Batch:
    """Return a batch of sequences, padded to 40."""
    return {
        "seq": ids(size, 40),
        "len": torch.randint(1, int(torch.randint(5, 39, ())), (size,)),
        "a": ids(size),
    }


def jagged(size: int) -> Batch:
    """Return a batch of bags of two features."""
    lengths = torch.randint(0, 4, (2 * size,))
    total = int(lengths.sum())
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return {
        "l": lengths,
        "v": ids(total),
        "o": ends,
        "v2": ids(size),
        "l2": torch.ones(size, dtype=torch.long),
    }


def ids(*shape: int, below: int = 100) -> Tensor:
    """Return random ids."""
    return torch.randint(0, below, shape)


def shape(
    make: Callable[[int], Batch] = plain,
    calls: int = 1,
    refused: str | None = None,
    found: int = 0,
) -> Callable[[Callable[[Any, Any], Rows]], Callable[[Any, Any], Rows]]:
    """Add a shape to SHAPES; see ShapeOfStep. refused: why other calls are not sent ahead."""

    def put(function: Callable[[Any, Any], Rows]) -> Callable[[Any, Any], Rows]:
        SHAPES[function.__name__] = ShapeOfStep(function, make, refused, calls, found)
        return function

    return put


@shape()
def attribute_offsets(m: Any, b: Any) -> Rows:
    return [m.t(b["x"] + m.offsets)]


@shape()
def numpy_offsets(m: Any, b: Any) -> Rows:
    return [m.t(b["x"] + b["x"].new_tensor(np.array([0, 100, 200, 300])).unsqueeze(0))]


@shape()
def cat_two(m: Any, b: Any) -> Rows:
    return [m.t(torch.cat([b["a"], b["b"]]))]


@shape()
def hashing(m: Any, b: Any) -> Rows:
    return [m.t((b["x"] * 2654435761 + 12345) % ROWS)]


@shape(calls=2)
def from_floats(m: Any, b: Any) -> Rows:
    columns = torch.cat([b["x"].float(), b["y"].unsqueeze(1)], 1)
    return [m.t(columns[:, 0].long()), m.u(columns[:, 1:3].long())]


@shape()
def batch_size_is_num_buckets(m: Any, b: Any) -> Rows:
    return [m.t(b["x"] % 16)]


@shape()
def stack_clamp_where(m: Any, b: Any) -> Rows:
    stacked = torch.stack([b["a"], b["b"]], 1).clamp(max=70)[:, 0]
    return [m.t(torch.where(b["mask"][:, 0], stacked, 0))]


@shape()
def masked_fill(m: Any, b: Any) -> Rows:
    return [m.t(b["x"].masked_fill(b["mask"], 0))]


@shape(calls=0, refused="a tensor that the step computes is changed in place")
def write_to_clone(m: Any, b: Any) -> Rows:
    x = b["x"].clone()
    x[b["mask"]] = 0
    first = m.t(x)
    x[:, 1] += 7
    return [first, m.t(x)]


@shape(calls=0, refused="['x'] is changed in place")
def write_to_batch(m: Any, b: Any) -> Rows:
    b["x"][b["mask"]] = 0
    return [m.t(b["x"] + 1)]


@shape()
def transposed(m: Any, b: Any) -> Rows:
    return [m.t(b["x"].T.reshape(-1))]


@shape()
def item_to_category(m: Any, b: Any) -> Rows:
    return [m.t(m.item_to_category[b["a"]])]


@shape(calls=2)
def positions(m: Any, b: Any) -> Rows:
    return [
        m.t(torch.arange(b["x"].size(1)).unsqueeze(0).expand_as(b["x"])),
        m.u(torch.arange(b["x"].size(0))),
    ]


@shape(calls=4)
def python_loop_offsets(m: Any, b: Any) -> Rows:
    return [m.t(b["x"][:, i] + i * 100) for i in range(4)]


@shape(ragged, calls=0, refused=READS_BATCH)
def truncate_to_longest(m: Any, b: Any) -> Rows:
    longest = int(b["len"].max())
    return [m.t(b["seq"][:, :longest])]


@shape(padded, calls=0, refused=READS_BATCH)
def truncate_shorter(m: Any, b: Any) -> Rows:
    longest = int(b["len"].max())
    return [m.t(b["seq"][:, :longest])]


@shape(padded, calls=0, refused=READS_BATCH)
def truncate_shorter_computed(m: Any, b: Any) -> Rows:
    longest = int(b["len"].max())
    return [m.t(b["seq"][:, :longest] + 1)]


@shape(ragged, calls=2)
def shifted(m: Any, b: Any) -> Rows:
    return [m.t(b["seq"][:, :-1]), m.u(b["seq"][:, 1:])]


@shape(ragged)
def last_four(m: Any, b: Any) -> Rows:
    return [m.t(b["seq"][:, -4:] + 1)]


@shape(ragged, calls=2)
def ragged_positions(m: Any, b: Any) -> Rows:
    return [
        m.t(torch.arange(b["seq"].size(1)).expand(b["seq"].size(0), -1)),
        m.u((b["seq"] + 1) % 77),
    ]


@shape(ragged)
def mask_select(m: Any, b: Any) -> Rows:
    return [m.t(b["seq"][b["seq"] > 10])]


@shape(ragged)
def last_of_each(m: Any, b: Any) -> Rows:
    return [m.t(b["seq"].gather(1, (b["len"] - 1).unsqueeze(1)))]


@shape(ragged)
def unique_ids(m: Any, b: Any) -> Rows:
    unique, back = torch.unique(b["seq"], return_inverse=True)
    return [m.t(unique)[back]]


@shape(ragged, calls=0, refused="changes from step to step")
def pad_sequences(m: Any, b: Any) -> Rows:
    pairs = zip(b["seq"][:3], b["len"].tolist(), strict=False)
    return [m.t(nn.utils.rnn.pad_sequence([ids[:n] for ids, n in pairs], batch_first=True))]


@shape(jagged)
def kjt_of_cat(m: Any, b: Any) -> Rows:
    return m.bags(KeyedJaggedTensor.from_lengths_sync(["f", "g"], torch.cat([b["v"]]) % 90, b["l"]))


@shape(jagged)
def kjt_offsets(m: Any, b: Any) -> Rows:
    return m.bags(KeyedJaggedTensor.from_offsets_sync(["f", "g"], b["v"] + 1, b["o"]))


@shape(jagged)
def kjt_permute(m: Any, b: Any) -> Rows:
    return m.bags(KeyedJaggedTensor(["g", "f"], b["v"], lengths=b["l"]).permute([1, 0]))


@shape(jagged)
def kjt_permute_subset(m: Any, b: Any) -> Rows:
    twice = KeyedJaggedTensor(
        ["g", "x", "f", "y"], torch.cat([b["v"], b["v"]]), lengths=torch.cat([b["l"], b["l"]])
    )
    return m.bags(twice.permute([2, 0]))


@shape(jagged)
def kjt_concat(m: Any, b: Any) -> Rows:
    parts = [KeyedJaggedTensor([key], b["v2"], lengths=b["l2"]) for key in "fg"]
    return m.bags(KeyedJaggedTensor.concat(parts))


@shape(jagged)
def kjt_computed_lengths(m: Any, b: Any) -> Rows:
    return m.bags(KeyedJaggedTensor(["f", "g"], b["v"], lengths=b["l"].clamp(max=9)))


@shape(calls=2)
def two_towers_in_batch(m: Any, b: Any) -> Rows:
    return [m.t(b["a"] % 50) @ m.u(b["b"] + 1).T]


@shape(calls=2, found=1)
def roll_negatives(m: Any, b: Any) -> Rows:
    return [m.t(b["a"]), m.u(b["a"].roll(1))]


@shape(calls=1, refused="draws random numbers")
def random_negatives(m: Any, b: Any) -> Rows:
    return [m.t(b["a"] % 50), m.u(torch.randint(0, ROWS, b["a"].shape))]


@shape(calls=2, refused="draws random numbers")
def random_negatives_of_one_table(m: Any, b: Any) -> Rows:
    return [m.t(b["a"]), m.t(torch.randint(0, ROWS, b["a"].shape)), m.t(b["b"] % 50)]


@shape(calls=0, refused="draws random numbers")
def randperm_negatives(m: Any, b: Any) -> Rows:
    return [m.u(b["a"][torch.randperm(len(b["a"]))])]


@shape(calls=0, refused="draws random numbers")
def bernoulli_mask(m: Any, b: Any) -> Rows:
    return [m.u(torch.where(torch.rand(b["a"].shape) < 0.5, b["a"], 0))]


@shape(calls=0, refused="Python or numpy has drawn random numbers")
def numpy_negatives(m: Any, b: Any) -> Rows:
    return [m.u(torch.from_numpy(np.random.randint(0, ROWS, len(b["a"]))))]


@shape(calls=1, refused="it depends on rows of", found=1)
def from_rows(m: Any, b: Any) -> Rows:
    rows = m.t(b["a"])
    return [rows, m.u((rows.sum(1) > 0).long())]


@shape(calls=1, refused="it depends on rows of")
def from_bags(m: Any, b: Any) -> Rows:
    bags = m.bags(
        KeyedJaggedTensor(
            ["f", "g"], torch.cat([b["a"], b["b"]]), lengths=torch.ones(2 * len(b["a"])).int()
        )
    )
    return [*bags, m.u((bags[0].sum(1) > 0).long())]


@shape(calls=0, refused="it depends on the weight")
def from_weight(m: Any, b: Any) -> Rows:
    return [m.u(m.weight[b["a"]].argmax(1))]


@shape(calls=0, refused=READS_BATCH)
def branch_never(m: Any, b: Any) -> Rows:
    return [m.t(b["x"] + 1 if b["flag"].any() else b["x"] + 2)]


@shape(calls=0, refused=READS_BATCH)
def branch_both(m: Any, b: Any) -> Rows:
    return [m.t(b["x"] + 1 if b["x"].sum() % 2 == 0 else b["x"] + 2)]


@shape(calls=0, refused=READS_BATCH)
def branch_between_inputs(m: Any, b: Any) -> Rows:
    return [m.t(b["a"] if b["x"].sum() % 2 == 0 else b["b"])]


@shape(calls=1, refused="Python has read a value before the call: it depends on rows of")
def branch_on_rows(m: Any, b: Any) -> Rows:
    rows = m.t(b["a"] + 1)
    return [rows, m.u(b["b"] + 1 if rows.sum() > 0 else b["b"] + 2)]


@shape(calls=0, refused=READS_BATCH)
def branch_on_item(m: Any, b: Any) -> Rows:
    return [m.t(b["x"] + 1 if b["x"].max().item() > 97 else b["x"] + 2)]


@shape(calls=0, refused=READS_BATCH)
def assert_range(m: Any, b: Any) -> Rows:
    assert b["x"].max() < 100
    return [m.t(b["x"] + 1)]


@shape(calls=0, refused="")
def through_numpy(m: Any, b: Any) -> Rows:
    return [m.t(torch.from_numpy(b["x"].numpy() + 1))]


@shape(calls=0, refused="")
def through_tolist(m: Any, b: Any) -> Rows:
    return [m.t(torch.tensor([[id_ + 1 for id_ in row] for row in b["x"].tolist()]))]


@shape(calls=0, refused="")
def counter(m: Any, b: Any) -> Rows:
    m.count += 1
    return [m.t(b["x"] + m.count)]


@shape(calls=0, refused="Python or numpy has drawn random numbers")
def python_random(m: Any, b: Any) -> Rows:
    return [m.t(b["x"] + random.randint(0, 3))]


@shape(calls=0, refused="")
def previous_batch(m: Any, b: Any) -> Rows:
    previous = b["a"] if m.previous is None else m.previous
    m.previous = b["a"].clone()
    return [m.t(previous[:10] + 1)]


@shape(calls=0, refused="item_to_category changes")
def changing_buffer(m: Any, b: Any) -> Rows:
    rows = m.t(m.item_to_category[b["a"]])
    m.item_to_category.add_(1).remainder_(50)
    return [rows]


@shape()
def bucketize(m: Any, b: Any) -> Rows:
    return [m.t(torch.bucketize(b["y"], torch.linspace(0, 1, 20)))]


GLOBAL_OFFSETS = torch.tensor([0, 100, 200, 300])


@shape(calls=0, refused="a tensor of unknown origin")
def global_offsets(m: Any, b: Any) -> Rows:
    return [m.t(b["x"] + GLOBAL_OFFSETS)]


@shape(calls=4)
def columns_of_one_table(m: Any, b: Any) -> Rows:
    x = b["x"] + m.offsets
    return [m.t(x[:, 0]), m.u(x[:, 1]), m.t(x[:, 2:]), m.u(b["a"])]


def schedule_after(m: Any, b: Any) -> Rows:
    """Change after the trial."""
    m.count += 1
    return [m.t(b["x"] + (1 if m.count < 8 else 2))]


SHAPES["schedule_after"] = ShapeOfStep(schedule_after, plain, None, 1, 0)


def in_turns(m: Any, b: Any) -> Rows:
    """Look up one part of the batch and another one in turns."""
    m.count += 1
    return [m.t(b["a" if m.count % 2 else "b"])]


SHAPES["in_turns"] = ShapeOfStep(in_turns, plain, None, 1, 1)


def rewritten_buffer(m: Any, b: Any) -> Rows:
    """Look up through a buffer that is rewritten after the trial."""
    m.count += 1
    if m.count == 7:
        m.item_to_category.copy_(m.item_to_category.flip(0))
    return [m.t(m.item_to_category[b["x"] % 100])]


SHAPES["rewritten_buffer"] = ShapeOfStep(rewritten_buffer, plain, None, 1, 0)


def schedule_on_rank_1(m: Any, b: Any) -> Rows:
    """Change after the trial, on one rank."""
    m.count += 1
    return [m.t(b["x"] + (2 if m.count >= 8 and rank_and_num_ranks()[0] == 1 else 1))]


SHAPES["schedule_on_rank_1"] = ShapeOfStep(schedule_on_rank_1, plain, None, 1, 0)


def fewer_on_rank_1(m: Any, b: Any) -> Rows:
    """Look up fewer ids after the trial, on one rank; then what is computed of the rows, and a bag
    of the table."""
    m.count += 1
    rows = m.t((b["x"] + 1)[:, : 2 if m.count >= 8 and rank_and_num_ranks()[0] == 1 else 4])
    return [rows, m.u((rows.sum((1, 2)) > 0).long())]


SHAPES["fewer_on_rank_1"] = ShapeOfStep(fewer_on_rank_1, plain, None, 1, 0)


def zeros_fail_on_rank_1(m: Any, b: Any) -> Rows:
    """Look up something else after the trial, on one rank, and fail where rows are zeros."""
    rows = schedule_on_rank_1(m, b)
    assert rows[0].any()
    return rows


SHAPES["zeros_fail_on_rank_1"] = ShapeOfStep(zeros_fail_on_rank_1, plain, None, 1, 0)


def zeros_fail_between_on_rank_1(m: Any, b: Any) -> Rows:
    """As above, before another lookup."""
    return [*zeros_fail_on_rank_1(m, b), m.u(b["a"])]


SHAPES["zeros_fail_between_on_rank_1"] = ShapeOfStep(
    zeros_fail_between_on_rank_1, plain, None, 2, 1
)


def other_bags_on_rank_1(m: Any, b: Any) -> Rows:
    """Look up fewer bags after the trial, on one rank."""
    m.count += 1
    size = len(b["a"]) - 3 if m.count >= 8 and rank_and_num_ranks()[0] == 1 else len(b["a"])
    ids = torch.cat([b["a"][:size], b["b"][:size]])
    return m.bags(KeyedJaggedTensor(["f", "g"], ids, lengths=torch.ones_like(ids)))


SHAPES["other_bags_on_rank_1"] = ShapeOfStep(other_bags_on_rank_1, plain, None, 1, 0)


@dataclass
class Fitted:
    """What a fit gave on this rank."""

    losses: list[float]
    weights: dict[str, Tensor]
    ahead: list[tuple[int, int]]
    """Lookups, and how many of them were sent ahead, until the end of each epoch."""
    warnings: list[str]
    error: str


def fit(
    names: Sequence[str], depth: int = 3, steps: int = 11, epochs: int = 2, **prefetch: Any
) -> Fitted:
    """Train these shapes on this rank. steps: of an epoch; the last batch of each is smaller."""
    model, rank = Shapes(names), rank_and_num_ranks()[0]
    torch.manual_seed(100 + rank)
    random.seed(3 + rank)
    np.random.seed(3 + rank)
    sizes = [SIZE] * (steps - 1) + [SIZE - 6]
    batches = [
        {name: SHAPES[name].make(size) for name in names} for _ in range(epochs) for size in sizes
    ]
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            {"convert_embeddings": "all", "prefetch": {"depth": depth} | prefetch},
            max_epochs=epochs,
            reload_dataloaders_every_n_epochs=1,
        )

        def epoch() -> DataLoader:
            first = trainer.current_epoch * steps
            return DataLoader(batches[first : first + steps], batch_size=None)  # type: ignore[arg-type]

        model.train_dataloader = epoch  # type: ignore[method-assign]
        torch.manual_seed(7)
        try:
            trainer.fit(model)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    messages = [
        str(warning.message)
        for warning in caught
        if "looked up as it is called" in str(warning.message)
    ]
    return Fitted(model.losses, {} if error else whole_state(model), model.ahead, messages, error)


def fit_at_both_depths(names: Sequence[str], options: dict[str, Any]) -> tuple[Fitted, Fitted]:
    """Return what fits without and with look-ahead give. options: of `fit`."""
    return fit(names, 1, **options), fit(names, 3, **options)


def fit_each(groups: Sequence[Sequence[str]]) -> list[Fitted]:
    """Train each of these lists of shapes on this rank, which waits a second for ranks that do not
    differ."""
    with patch.object(control_message, "COMPARISON_SECONDS", 1.0):
        return [fit(names) for names in groups]
