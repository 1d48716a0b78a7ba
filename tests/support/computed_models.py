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
STEPS, EPOCHS = 11, 2
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
class Shape:
    """What is looked up, and how."""

    look_up: Callable[[Any, Any], Rows]
    """Of the tables, and the batch."""
    make: Callable[[int], Batch]
    """Returns a batch of a size."""
    calls: int = 1
    """That are sent ahead of a step."""
    refused: str | None = None
    """Why the computed calls are not prefetched; None: they are."""
    found: int = 0
    """How many of these are also ahead of a batch of another size: found in it, not computed."""


def ids(*shape: int, below: int = 100) -> Tensor:
    """Return random ids."""
    return torch.randint(0, below, shape)


def plain(size: int) -> Batch:
    """Return a batch of columns of ids."""
    return {
        "x": ids(size, 4),
        "a": ids(size),
        "b": ids(size),
        "mask": ids(size, 4) > 30,
        "y": torch.rand(size),
    }


def ragged(size: int, width: int | None = None) -> Batch:
    """Return a batch of sequences, padded to the longest, or to a width."""
    longest = int(torch.randint(5, 30, ()))
    lengths = torch.randint(1, longest + 1, (size,))
    return {"seq": ids(size, width or longest), "len": lengths, "a": ids(size)}


def padded(size: int) -> Batch:
    """Return a batch of sequences, padded to 40."""
    return ragged(size, 40)


def jagged(size: int) -> Batch:
    """Return a batch of bags of two features."""
    lengths = torch.randint(0, 4, (2 * size,))
    return {"l": lengths, "v": ids(int(lengths.sum()))}


def _from_floats(m: Any, b: Any) -> Rows:
    columns = torch.cat([b["x"].float(), b["y"].unsqueeze(1)], 1)
    return [m.t(columns[:, 0].long()), m.u(columns[:, 1:3].long())]


def _write_to_clone(m: Any, b: Any) -> Rows:
    x = b["x"].clone()
    x[b["mask"]] = 0
    first = m.t(x)
    x[:, 1] += 7
    return [first, m.t(x)]


def _write_to_batch(m: Any, b: Any) -> Rows:
    b["x"][b["mask"]] = 0
    return [m.t(b["x"] + 1)]


def _positions(m: Any, b: Any) -> Rows:
    columns = torch.arange(b["x"].size(1)).unsqueeze(0).expand_as(b["x"])
    return [m.t(columns), m.u(torch.arange(b["x"].size(0)))]


def _truncated(m: Any, b: Any) -> Rows:
    longest = int(b["len"].max())
    return [m.t(b["seq"][:, :longest])]


def _kjt_permuted(m: Any, b: Any) -> Rows:
    values, lengths = torch.cat([b["v"], b["v"]]), torch.cat([b["l"], b["l"]])
    twice = KeyedJaggedTensor(["g", "x", "f", "y"], values, lengths=lengths)
    return m.bags(twice.permute([2, 0]))


def _from_rows(m: Any, b: Any) -> Rows:
    rows = m.t(b["a"])
    return [rows, m.u((rows.sum(1) > 0).long())]


def _two_bags(m: Any, first: Tensor, other: Tensor) -> Rows:
    values = torch.cat([first, other])
    return m.bags(KeyedJaggedTensor(["f", "g"], values, lengths=torch.ones_like(values)))


def _branch_on_rows(m: Any, b: Any) -> Rows:
    rows = m.t(b["a"] + 1)
    return [rows, m.u(b["b"] + 1 if rows.sum() > 0 else b["b"] + 2)]


def _assert_range(m: Any, b: Any) -> Rows:
    assert b["x"].max() < 100
    return [m.t(b["x"] + 1)]


def _counter(m: Any, b: Any) -> Rows:
    m.count += 1
    return [m.t(b["x"] + m.count)]


def _changing_buffer(m: Any, b: Any) -> Rows:
    rows = m.t(m.item_to_category[b["a"]])
    m.item_to_category.add_(1).remainder_(50)
    return [rows]


# -- what changes after the trial


def _schedule_after(m: Any, b: Any) -> Rows:
    m.count += 1
    return [m.t(b["x"] + (1 if m.count < 8 else 2))]


def _in_turns(m: Any, b: Any) -> Rows:
    m.count += 1
    return [m.t(b["a" if m.count % 2 else "b"])]


def _rewritten_buffer(m: Any, b: Any) -> Rows:
    m.count += 1
    if m.count == 7:
        m.item_to_category.copy_(m.item_to_category.flip(0))
    return [m.t(m.item_to_category[b["x"] % 100])]


def _differs(m: Any) -> bool:
    """Whether this is rank 1, after the trial."""
    m.count += 1
    return m.count >= 8 and rank_and_num_ranks()[0] == 1


def _schedule_on_rank_1(m: Any, b: Any) -> Rows:
    return [m.t(b["x"] + (2 if _differs(m) else 1))]


def _fewer_on_rank_1(m: Any, b: Any) -> Rows:
    rows = m.t((b["x"] + 1)[:, : 2 if _differs(m) else 4])
    return [rows, m.u((rows.sum((1, 2)) > 0).long())]


def _zeros_fail_on_rank_1(m: Any, b: Any) -> Rows:
    rows = _schedule_on_rank_1(m, b)
    assert rows[0].any()
    return rows


def _other_bags_on_rank_1(m: Any, b: Any) -> Rows:
    size = len(b["a"]) - (3 if _differs(m) else 0)
    return _two_bags(m, b["a"][:size], b["b"][:size])


DRAWS, ROWS_READ = "draws random numbers", "it depends on rows of"
PYTHON_DRAWS = "Python or numpy has drawn random numbers"
IN_PLACE = "a tensor that the step computes is changed in place"
AFTER_A_READ = "Python has read a value before the call: it depends on rows of"
SHAPES: dict[str, Shape] = {
    "attribute_offsets": Shape(lambda m, b: [m.t(b["x"] + m.offsets)], plain),
    "cat_two": Shape(lambda m, b: [m.t(torch.cat([b["a"], b["b"]]))], plain),
    "hashing": Shape(lambda m, b: [m.t((b["x"] * 2654435761 + 12345) % ROWS)], plain),
    "from_floats": Shape(_from_floats, plain, calls=2),
    "batch_size_is_num_buckets": Shape(lambda m, b: [m.t(b["x"] % 16)], plain),
    "write_to_clone": Shape(_write_to_clone, plain, 0, IN_PLACE),
    "write_to_batch": Shape(_write_to_batch, plain, 0, "['x'] is changed in place"),
    "item_to_category": Shape(lambda m, b: [m.t(m.item_to_category[b["a"]])], plain),
    "positions": Shape(_positions, plain, calls=2),
    "truncate_shorter": Shape(_truncated, padded, 0, READS_BATCH),
    "shifted": Shape(lambda m, b: [m.t(b["seq"][:, :-1]), m.u(b["seq"][:, 1:])], ragged, calls=2),
    "mask_select": Shape(lambda m, b: [m.t(b["seq"][b["seq"] > 10])], ragged),
    "last_of_each": Shape(
        lambda m, b: [m.t(b["seq"].gather(1, (b["len"] - 1).unsqueeze(1)))], ragged
    ),
    "kjt_permuted": Shape(_kjt_permuted, jagged),
    "roll_negatives": Shape(
        lambda m, b: [m.t(b["a"]), m.u(b["a"].roll(1))], plain, calls=2, found=1
    ),
    "random_negatives": Shape(
        lambda m, b: [m.t(b["a"] % 50), m.u(ids(len(b["a"]), below=ROWS))], plain, 1, DRAWS
    ),
    "random_negatives_of_one_table": Shape(
        lambda m, b: [m.t(b["a"]), m.t(ids(len(b["a"]), below=ROWS)), m.t(b["b"] % 50)],
        plain,
        2,
        DRAWS,
    ),
    "python_random": Shape(
        lambda m, b: [m.t(b["x"] + random.randint(0, 3))], plain, 0, PYTHON_DRAWS
    ),
    "from_rows": Shape(_from_rows, plain, 1, ROWS_READ, found=1),
    "from_weight": Shape(
        lambda m, b: [m.u(m.weight[b["a"]].argmax(1))], plain, 0, "it depends on the weight"
    ),
    "branch_both": Shape(
        lambda m, b: [m.t(b["x"] + (1 if b["x"].sum() % 2 == 0 else 2))], plain, 0, READS_BATCH
    ),
    "branch_between_inputs": Shape(
        lambda m, b: [m.t(b["a"] if b["x"].sum() % 2 == 0 else b["b"])], plain, 0, READS_BATCH
    ),
    "branch_on_rows": Shape(_branch_on_rows, plain, 1, AFTER_A_READ),
    "assert_range": Shape(_assert_range, plain, 0, READS_BATCH),
    "counter": Shape(_counter, plain, 0, ""),
    "changing_buffer": Shape(_changing_buffer, plain, 0, "item_to_category changes"),
    "bucketize": Shape(
        lambda m, b: [m.t(torch.bucketize(b["y"], torch.linspace(0, 1, 20)))], plain
    ),
    "schedule_after": Shape(_schedule_after, plain),
    "in_turns": Shape(_in_turns, plain, found=1),
    "rewritten_buffer": Shape(_rewritten_buffer, plain),
    "schedule_on_rank_1": Shape(_schedule_on_rank_1, plain),
    "fewer_on_rank_1": Shape(_fewer_on_rank_1, plain),
    "zeros_fail_on_rank_1": Shape(_zeros_fail_on_rank_1, plain),
    "zeros_fail_between_on_rank_1": Shape(
        lambda m, b: [*_zeros_fail_on_rank_1(m, b), m.u(b["a"])], plain, calls=2, found=1
    ),
    "other_bags_on_rank_1": Shape(_other_bags_on_rank_1, plain),
}


@dataclass
class Fitted:
    """What a fit gave on this rank."""

    losses: list[float]
    weights: dict[str, Tensor]
    ahead: list[tuple[int, int]]
    """Lookups, and how many of them were sent ahead, until the end of each epoch."""
    warnings: list[str]
    error: str


def fit(names: Sequence[str], depth: int = 3) -> Fitted:
    """Train these shapes on this rank; the last batch of each epoch is smaller."""
    model, rank = Shapes(names), rank_and_num_ranks()[0]
    torch.manual_seed(100 + rank)
    random.seed(3 + rank)
    np.random.seed(3 + rank)
    sizes = [SIZE] * (STEPS - 1) + [SIZE - 6]
    batches = [{name: SHAPES[name].make(size) for name in names} for size in sizes * EPOCHS]
    options = {"convert_embeddings": "all", "prefetch": {"depth": depth}}
    trainer = make_trainer(options, max_epochs=EPOCHS, reload_dataloaders_every_n_epochs=1)

    def epoch() -> DataLoader:
        first = trainer.current_epoch * STEPS
        return DataLoader(batches[first : first + STEPS], batch_size=None)  # type: ignore[arg-type]

    model.train_dataloader = epoch  # type: ignore[method-assign]
    torch.manual_seed(7)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(model)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    said = [str(warning.message) for warning in caught]
    messages = [text for text in said if "looked up as it is called" in text]
    return Fitted(model.losses, {} if error else whole_state(model), model.ahead, messages, error)


def fit_at_both_depths(names: Sequence[str]) -> tuple[Fitted, Fitted]:
    """Return what fits without and with look-ahead give."""
    return fit(names, 1), fit(names)


def fit_each(groups: Sequence[Sequence[str]]) -> list[Fitted]:
    """Train each of these lists of shapes on this rank, which waits a second for ranks that do not
    differ."""
    with patch.object(control_message, "COMPARISON_SECONDS", 1.0):
        return [fit(names) for names in groups]
