"""Plain embeddings that cannot be sharded exactly stay whole with a word, or are refused where they
were asked for."""

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.errors import DistRecError
from tests.support.click_model import seeded
from tests.support.embedding_calls import DIM, ROWS, Arguments, Embedding, bags_maker, rows_maker
from tests.support.embedding_models import KeepsState, loader, too_far, train_unsharded
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer


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
        r"its weight has gradient hooks, .* For wandb's watch, set log='parameters'",
    ),
}


class LeftWhole(KeepsState):
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
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
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


def _fit_left_whole(
    strategy: dict[str, Any], *arguments: Any
) -> tuple[list[str], dict[str, Tensor], list[str]]:
    """Return the warnings of this rank, the trained state and the tables that were sharded."""
    rank, _ = rank_and_num_ranks()
    model = seeded(LeftWhole, *arguments)
    trainer = make_trainer(strategy)
    tables: list[str] = []

    def look() -> None:
        setup = trainer.strategy.run_tables
        tables.extend([] if setup is None else sorted(setup.updates))

    model.on_train_start = look  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader([_whole_batch(step, rank) for step in range(3)]))
    return [str(warning.message) for warning in caught], model.final_state, tables


LEFT_WHOLE: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "all": ({"convert_embeddings": "all"}, ()),
    "auto": ({"min_rows": ROWS}, ()),
    "small": ({"min_rows": ROWS + 1}, ()),
    "none": ({"convert_embeddings": "none"}, ()),
    "nothing to shard": ({"convert_embeddings": "all"}, (tuple(WHOLE), False)),
}


@pytest.fixture(scope="module")
def left_whole() -> list[dict[str, Any]]:
    """What each rank said and trained, by case."""
    calls = {
        case: (_fit_left_whole, strategy, *arguments)
        for case, (strategy, arguments) in LEFT_WHOLE.items()
    }
    return run_each_on_ranks(calls, 2)


@pytest.mark.parametrize("case", LEFT_WHOLE)
def test_what_stays_whole_is_reported_once_by_rank_zero_and_trains_exactly(
    left_whole: list[dict[str, Any]], case: str
) -> None:
    _, arguments = LEFT_WHOLE[case]
    message, state, tables = left_whole[0][case]
    requested = case not in ("none", "small")
    for name, (_, reason) in WHOLE.items():
        about = [text for text in message if f"'{name}'" in text and re.search(reason, text)]
        assert len(about) == (1 if requested else 0), (name, message)
    assert not [text for text in left_whole[1][case][0] if "whole" in text]
    assert tables == (["item"] if case in ("all", "auto") else [])
    batches = [[_whole_batch(step, rank) for rank in range(2)] for step in range(3)]
    far = too_far(state, train_unsharded(seeded(LeftWhole, *arguments), batches).state_dict(), 1e-6)
    if requested:
        assert any(
            "'watched'" in text and "on rank 0, its weight has gradient hooks" in text
            for text in message
        )
    assert not far


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


REFUSED: dict[str, tuple[type, tuple[str, ...], Any, str]] = {
    **{
        name: (
            LeftWhole,
            tuple(WHOLE),
            ["item", name],
            f"ShardingError: .*'{name}' cannot be sharded: .*{reason}",
        )
        for name, (_, reason) in WHOLE.items()
    },
    "unknown path": (LeftWhole, (), ["itm"], "ConfigError: .*'itm'; did you mean 'item'"),
    "unknown path among known": (
        LeftWhole,
        (),
        ["item", "towers.0"],
        r"ConfigError: .*'towers\.0'",
    ),
    "no embedding": (LeftWhole, ("tied",), ["output"], "ConfigError: .*'output'.* item, tied"),
    "watched bags": (
        WatchedBags,
        (),
        "all",
        "ShardingError: .*table 'collection.bags' has gradient hooks.* For wandb's watch, set "
        "log='parameters'",
    ),
    "weight": (ReadsWeight, (), ["item"], "ShardedWeightError: .*gathered_weight"),
    "bad ids": (BadIds, (), "all", rf"IdsError: .*'item' has the id {ROWS + 2}"),
}


def _refused(case: str) -> tuple[str, int]:
    """Return what was raised and the number of steps taken before."""
    kind, names, convert, _ = REFUSED[case]
    model = seeded(kind, names)
    try:
        make_trainer({"convert_embeddings": convert}).fit(
            model, loader([torch.arange(1, 9) + rank_and_num_ranks()[0]])
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}", model.steps
    return "nothing was raised", model.steps


class Bags(LeftWhole):
    """One bag of embeddings, called with what the batch holds."""

    def __init__(self) -> None:
        super().__init__((), sharded=False)
        self.bag = nn.EmbeddingBag(ROWS, DIM)

    def training_step(self, batch: Arguments, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.bag(**batch).pow(2).sum()


class Rows(LeftWhole):
    """One embedding, called with what the batch holds."""

    def __init__(self) -> None:
        super().__init__((), sharded=False)
        self.item = nn.Embedding(ROWS, DIM)

    def training_step(self, batch: Arguments, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.item(**batch).pow(2).sum()


WRONG_CALLS: dict[str, tuple[Callable[[], LeftWhole], Arguments]] = {
    "offsets from 2": (Bags, {"input": torch.arange(8), "offsets": torch.tensor([2, 4])}),
    "offsets beyond the ids": (
        Bags,
        {"input": torch.arange(8), "offsets": torch.tensor([0, 4, 20])},
    ),
    "offsets that go down": (Bags, {"input": torch.arange(8), "offsets": torch.tensor([0, 6, 3])}),
    "ids without offsets": (Bags, {"input": torch.arange(8)}),
    "offsets and two dimensions": (
        Bags,
        {"input": torch.arange(8).view(4, 2), "offsets": torch.tensor([0, 4])},
    ),
    "weights of a mean": (
        Bags,
        {"input": torch.arange(8).view(4, 2), "per_sample_weights": torch.ones(4, 2)},
    ),
    "float ids": (Rows, {"input": torch.arange(8) + 0.5}),
    "bool ids": (Rows, {"input": torch.arange(8) > 3}),
    "float ids in bags": (Bags, {"input": torch.arange(8).view(4, 2) + 0.5}),
}
WRONG_OFFSETS = tuple(case for case in WRONG_CALLS if case.startswith("offsets "))
OTHER_WRONG_CALLS = tuple(case for case in WRONG_CALLS if case not in WRONG_OFFSETS)


def _call_wrongly(case: str) -> tuple[bool, str]:
    """Return whether an error of ours was raised, and what it said."""
    kind, batch = WRONG_CALLS[case]
    try:
        make_trainer({"convert_embeddings": "all"}).fit(seeded(kind), loader([batch]))
    except Exception as error:
        return isinstance(error, DistRecError), f"{type(error).__name__}: {error}"
    return False, "nothing was raised"


RUNS: dict[str, tuple[Any, ...]] = {
    **{f"refused {case}": (_refused, case) for case in REFUSED},
    **{f"wrong {case}": (_call_wrongly, case) for case in WRONG_CALLS},
}


@pytest.fixture(scope="module")
def rank_results() -> list[dict[str, Any]]:
    """What each rank raised in each run."""
    return run_each_on_ranks(RUNS, 2)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_an_error_of_ours_on_every_rank(
    rank_results: list[dict[str, Any]], case: str
) -> None:
    for actual in rank_results:
        message, steps = actual[f"refused {case}"]
        assert re.match(REFUSED[case][3], message, re.DOTALL), message
        assert steps == 0, "a step was taken before the error"


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Gives torch two threads: with one it takes offsets that go down, without a word."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("cases", [WRONG_OFFSETS, OTHER_WRONG_CALLS], ids=["offsets", "others"])
def test_a_call_that_torch_refuses_is_an_error_of_ours(
    rank_results: list[dict[str, Any]], cases: tuple[str, ...]
) -> None:
    for case in cases:
        kind, batch = WRONG_CALLS[case]
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            seeded(kind).training_step(batch, 0)
        for rank_result in rank_results:
            is_our_error, message = rank_result[f"wrong {case}"]
            assert is_our_error, (case, message)


def test_the_strategy_refuses_unknown_conversions() -> None:
    with pytest.raises(ValueError, match="convert_embeddings='every'"):
        TorchRecShardedStrategy(convert_embeddings="every")  # type: ignore[arg-type]
