"""A loss that reaches no parameter on one rank adds nothing to gradients there, as in one process,
or is an error."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import (
    PipelineParallelStrategy,
    TorchRecShardedStrategy,
    TunedDDPStrategy,
    TunedFSDPStrategy,
)
from lightning_distrec.errors import DistRecError, UnsupportedError
from tests.support.ranks import (
    RankFailed,
    rank_and_num_ranks,
    run_each_on_ranks,
    run_on_ranks,
    words_of_ranks,
)
from tests.support.trainers import DEFAULTS

STEPS, DIM, WIDTH = 6, 8, 520
SKIPPED = {(1, 2), (1, 3), (0, 4)}
"""Rank and step: where the loss reaches nothing."""
STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp_tuned": TunedDDPStrategy,
    "fsdp_tuned": TunedFSDPStrategy,
    "torchrec_sharded": TorchRecShardedStrategy,
    "pipeline_parallel": PipelineParallelStrategy,
}


def _bags(name: str) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=30, feature_names=["f"])
    return EmbeddingBagCollection(tables=[table])


class Skips(pl.LightningModule):
    """Tables far apart in the order of backward, more than a bucket of DDP between them, and steps
    without a loss.

    early: whether such a step returns before it computes anything.
    """

    def __init__(self, has_tables: bool, early: bool) -> None:
        super().__init__()
        self.early = early
        self.first, self.second = (_bags("low"), _bags("high")) if has_tables else (None, None)
        self.net = nn.Sequential(
            nn.Linear(DIM, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.middle, self.last = nn.Linear(WIDTH, DIM), nn.Linear(DIM, 1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        hidden, ids = batch["x"], KeyedJaggedTensor(["f"], batch["ids"], lengths=batch["lengths"])
        if self.first is not None:
            hidden = hidden + self.first(ids).values()
        hidden = self.middle(self.net(hidden))
        if self.second is not None:
            hidden = hidden * self.second(ids).values()
        return self.last(hidden).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        skips = (rank_and_num_ranks()[0], batch_idx) in SKIPPED
        if not (skips and self.early):
            loss = self.loss(batch)
        return torch.tensor(0.0, requires_grad=True) * 1 if skips else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Chain(Skips):
    """The same in a chain of layers, with batches that all ranks have."""

    def __init__(self, has_tables: bool, early: bool) -> None:
        super().__init__(False, early)
        self.net = nn.Sequential(*self.net, self.middle, self.last)
        del self.middle, self.last

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["x"]).square().mean()


def _batch(rank: int, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(30, (4,), generator=draw)
    return {"x": torch.randn(4, DIM, generator=draw), "ids": ids, "lengths": torch.ones_like(ids)}


def _make(kind: type[Skips], has_tables: bool, early: bool) -> Skips:
    pl.seed_everything(5)
    return kind(has_tables, early)


def _one_process(
    kind: type[Skips], has_tables: bool, accumulates: int, num_ranks: int
) -> dict[str, Tensor]:
    model = _make(kind, has_tables, False)
    optimizer = model.configure_optimizers()
    for step in range(STEPS):
        for rank in range(num_ranks):
            if (rank if num_ranks > 1 else 1, step) not in SKIPPED:
                (model.loss(_batch(rank, step)) / num_ranks / accumulates).backward()
        if (step + 1) % accumulates == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def _fit(
    name: str, early: bool, options: dict[str, Any], accumulates: int = 1
) -> dict[str, Tensor]:
    rank, num_ranks = rank_and_num_ranks()
    is_pipeline = name == "pipeline_parallel"
    model = _make(Chain if is_pipeline else Skips, name == "torchrec_sharded", early)
    data = DataLoader(
        [_batch(0 if is_pipeline else rank, step) for step in range(STEPS)], batch_size=None
    )
    strategy = STRATEGIES[name](**options)
    settings = DEFAULTS | {"accumulate_grad_batches": accumulates}
    pl.Trainer(strategy=strategy, devices=num_ranks, **settings).fit(model, data)
    return {key: value.clone() for key, value in strategy.full_state_dict().items()}


CASES: dict[str, tuple[Any, ...]] = {
    "layers, early": ("ddp_tuned", True, {"find_unused_parameters": True}),
    "layers, accumulated": ("ddp_tuned", True, {}, 2),
    "tables, early": ("torchrec_sharded", True, {"bucket_cap_mb": 1}),
    "tables, accumulated": ("torchrec_sharded", True, {"embedding_update": "dense"}, 2),
    "tables, unused layers": (
        "torchrec_sharded",
        False,
        {"find_unused_parameters": True, "prefetch": {"depth": 1}},
    ),
    "stages": ("pipeline_parallel", False, {"microbatches": 2}),
}


def test_the_rank_takes_part_with_zeros() -> None:
    ranks = run_each_on_ranks({case: (_fit, *arguments) for case, arguments in CASES.items()}, 2)
    for case, (name, _, _, *accumulates) in CASES.items():
        is_pipeline = name == "pipeline_parallel"
        expected = _one_process(
            Chain if is_pipeline else Skips,
            name == "torchrec_sharded",
            accumulates[0] if accumulates else 1,
            1 if is_pipeline else 2,
        )
        actual = ranks[0][case]
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, rtol=0, atol=1e-5, msg=f"{case}: {key}")


def _first_step() -> None:
    SKIPPED.add((1, 0))
    _fit("torchrec_sharded", False, {})


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (
            _fit,
            ("fsdp_tuned", False, {}),
            "the loss on rank 1 reaches no parameter, and layers that are sharded are",
        ),
        (
            _fit,
            ("torchrec_sharded", True, {"prefetch": {"depth": 1}}),
            "the loss on rank 1 reaches no parameter, and this step has 0 lookups of sharded "
            "tables, where 2 are known",
        ),
        (
            _first_step,
            (),
            "the loss on rank 1 reaches no parameter, and this step has 2 lookups "
            "of sharded tables, wh",
        ),
    ],
)
def test_where_it_cannot_all_ranks_end_by_its_error(
    function: Any, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(function, 2, *arguments)
    words = words_of_ranks(failed.value)
    assert f"{UnsupportedError.__name__}: {message}" in words[1]
    assert "Return a loss of what the step computes, times 0" in words[1]
    assert issubclass(UnsupportedError, DistRecError)
    assert f"rank 1 failed: UnsupportedError: {message}" in words[0]
