"""Plain embeddings that cannot be sharded exactly stay whole with a word, or are refused where they
were asked for."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec import TorchRecShardedStrategy, errors
from tests.support.cases import Case, case_of, check, check_refused
from tests.support.click_model import seeded
from tests.support.embedding_calls import DIM, ROWS, Arguments, Embedding, bags_maker, rows_maker
from tests.support.ranks import rank_and_num_ranks


class MyEmbedding(nn.Embedding):
    """A subclass that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _watch(weight: nn.Parameter) -> None:
    """Register a hook as wandb's watch does, which Lightning calls on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        weight.register_hook(lambda gradient: None)


def _watched() -> nn.Embedding:
    embedding = nn.Embedding(ROWS, DIM)
    _watch(embedding.weight)
    return embedding


WHOLE: dict[str, tuple[Callable[[], Embedding], str]] = {
    "maximum": (bags_maker("max"), "mode='max'"),
    "narrow": (lambda: nn.Embedding(ROWS, 6), "embedding_dim=6"),
    "mine": (lambda: MyEmbedding(ROWS, DIM), "MyEmbedding is a subclass"),
    "tied": (rows_maker(), "output.weight"),
    "watched": (
        _watched,
        "For wandb's watch, set log='parameters'",
    ),
}


class LeftWhole(pl.LightningModule):
    """Embeddings that cannot be sharded exactly, and one that can; `tied` gives its weight to an
    output layer."""

    def __init__(self, names: Sequence[str] = tuple(WHOLE), sharded: bool = True) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, WHOLE[name][0]())
        if "tied" in names:
            self.output = nn.Linear(DIM, ROWS, bias=False)
            self.output.weight = self.tied.weight
        self.names = names
        if sharded:
            self.item = nn.Embedding(ROWS, DIM)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = []
        for name in (*self.names, *(["item"] if hasattr(self, "item") else [])):
            table = getattr(self, name)
            rows = table(batch.unsqueeze(1)) if isinstance(table, nn.EmbeddingBag) else table(batch)
            losses.append(((self.output(rows) if name == "tied" else rows) - 1).pow(2).mean())
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _whole_batch(step: int, rank: int) -> Tensor:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))
    return order[8 * rank : 8 * rank + 8]


def left_whole(*arguments: Any, told: bool = False, **values: Any) -> Case:
    """Return a case of embeddings of which all but one stay whole. told: which, and why."""
    words = [reason for _, reason in WHOLE.values()] if told else []
    words += [f"'{name}' is not sharded" for name in WHOLE] if told else []
    fields = {"batch": _whole_batch, "steps": 3, "told": tuple(words)}
    return case_of(LeftWhole, *arguments, **fields | values)


ITEM = {"item": "fused"}
CASES = {
    "all": left_whole(told=True, strategy={"convert_embeddings": "all"}, updates=ITEM),
    "auto": left_whole(told=True, strategy={"min_rows": ROWS}, updates=ITEM),
    "small": left_whole(strategy={"min_rows": ROWS + 1}, updates={}),
    "none": left_whole(strategy={"convert_embeddings": "none"}, updates={}),
    "nothing to shard": left_whole(
        tuple(WHOLE), False, told=True, strategy={"convert_embeddings": "all"}, updates={}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_stays_whole_is_reported_once_by_rank_zero_and_trains_exactly(name: str) -> None:
    first, second = check(CASES[name])
    lines = [line for line in first.warnings if "every rank has all of it" in line]
    assert len(lines) == (len(WHOLE) if CASES[name].told else 0), lines
    assert not [line for line in second.warnings if "every rank has all of it" in line]


class ReadsWeight(LeftWhole):
    """Needs the scores of every item, of which each rank has those of its rows."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.item(batch) @ self.item.weight.T).square().mean()


class WatchedBags(LeftWhole):
    """A collection whose table has a hook on rank 0."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        table = EmbeddingBagConfig(
            name="bags", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"]
        )
        self.collection = EmbeddingBagCollection(tables=[table])
        _watch(self.collection.embedding_bags["bags"].weight)


class BadIds(LeftWhole):
    """Looks up an id that no row has, on one rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.item(batch + (ROWS if rank_and_num_ranks()[0] == 1 else 0)).sum()


def refused(convert: Any, *names: str, kind: type = LeftWhole) -> Case:
    strategy = {"convert_embeddings": convert}
    return case_of(kind, names, batch=_some_ids, steps=1, strategy=strategy)


def _some_ids(step: int, rank: int) -> Tensor:
    return torch.arange(1, 9) + rank


REFUSED = {
    **{name: (refused(["item", name], *WHOLE), f"'{name}' cannot be sharded: ") for name in WHOLE},
    "unknown path": (refused(["itm"]), "'itm'; did you mean 'item'"),
    "unknown path among known": (refused(["item", "towers.0"]), "'towers.0'"),
    "no embedding": (refused(["output"], "tied"), "'output'"),
    "watched bags": (
        refused("all", kind=WatchedBags),
        "table 'collection.bags' has gradient hooks",
    ),
    "weight": (refused(["item"], kind=ReadsWeight), "gathered_weight"),
    "bad ids": (refused("all", kind=BadIds), f"'item' has the id {ROWS + 2}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_an_error_of_ours_on_every_rank(name: str) -> None:
    for error in check_refused(*REFUSED[name]):
        assert hasattr(errors, error.split(":")[0])


class Called(pl.LightningModule):
    """One table, called with what the batch holds."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.table = kind(ROWS, DIM)

    def training_step(self, batch: Arguments, batch_idx: int) -> Tensor:
        return self.table(**batch).pow(2).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


IDS, TABLE_OF_IDS = torch.arange(8), torch.arange(8).view(4, 2)
WRONG_BAGS: dict[str, Arguments] = {
    "offsets from 2": {"input": IDS, "offsets": torch.tensor([2, 4])},
    "offsets beyond the ids": {"input": IDS, "offsets": torch.tensor([0, 4, 20])},
    "offsets that go down": {"input": IDS, "offsets": torch.tensor([0, 6, 3])},
    "ids without offsets": {"input": IDS},
    "offsets and two dimensions": {"input": TABLE_OF_IDS, "offsets": torch.tensor([0, 4])},
    "weights of a mean": {"input": TABLE_OF_IDS, "per_sample_weights": torch.ones(4, 2)},
    "float ids in bags": {"input": TABLE_OF_IDS + 0.5},
}
WRONG_ROWS: dict[str, Arguments] = {
    "float ids": {"input": IDS + 0.5},
    "bool ids": {"input": IDS > 3},
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Gives torch two threads: with one it takes offsets that go down, without a word."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def _same(arguments: Arguments, step: int, rank: int) -> Arguments:
    return arguments


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", WRONG_BAGS | WRONG_ROWS)
def test_a_call_that_torch_refuses_is_an_error_of_ours(name: str) -> None:
    kind, arguments = nn.EmbeddingBag, WRONG_BAGS.get(name)
    if arguments is None:
        kind, arguments = nn.Embedding, WRONG_ROWS[name]  # type: ignore[assignment]
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        seeded(Called, kind).training_step(arguments, 0)
    batch = partial(_same, arguments)
    case = case_of(Called, kind, batch=batch, steps=1, strategy={"convert_embeddings": "all"})
    for error in check_refused(case, "Error: "):
        assert hasattr(errors, error.split(":")[0]), error


def test_the_strategy_refuses_unknown_conversions() -> None:
    with pytest.raises(ValueError, match="convert_embeddings='every'"):
        TorchRecShardedStrategy(convert_embeddings="every")  # type: ignore[arg-type]
