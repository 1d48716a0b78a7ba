"""nn.Embeddings that configure_model builds take a rank's share, and start and train alike under
any plan."""

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_distrec import meta_tables
from lightning_distrec.host_memory import _meminfo
from tests.support.embedding_models import (
    TwoTower,
    loader,
    pairs,
    whole_state,
)
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

MIN_ROWS = 20


class Late(TwoTower):
    """Builds its tables in configure_model, each with another way of drawing its rows."""

    def __init__(self, in_constructor: bool = False) -> None:
        super().__init__()
        self.user_embedding = self.item_embedding = None
        if in_constructor:
            self.init_tables()

    def init_tables(self) -> None:
        self.user_embedding = nn.Embedding(50, 16, padding_idx=3)
        self.item_embedding = nn.Embedding(70, 16)
        nn.init.trunc_normal_(self.item_embedding.weight, std=0.3)
        with torch.no_grad():
            self.item_embedding.weight[0].zero_()
        self.tags = nn.EmbeddingBag(30, 8, mode="sum")
        nn.init.constant_(self.tags.weight, 0.5)
        # These stay on every rank: one is tied, one is read, one is small, one says so.
        self.tied, self.output = nn.Embedding(40, 8), nn.Linear(8, 40, bias=False)
        self.output.weight = self.tied.weight
        self.read, self.small, self.kept = (
            nn.Embedding(40, 8),
            nn.Embedding(10, 8),
            nn.Embedding(40, 8),
        )
        nn.init.constant_(self.kept.weight, 0.25)
        nn.init.uniform_(self.read.weight, 1, 2)

    def configure_model(self) -> None:
        if self.user_embedding is None:
            self.init_tables()

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        tags = self.tags(user[:, None] % 30) + self.kept(user % 40) + self.small(user % 10)
        tags = tags + nn.functional.linear(self.output(self.tied(item % 40)), self.read.weight.T)
        return super().forward(user, item) + tags.sum(-1, keepdim=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_start(self) -> None:
        self.first_state = whole_state(self)
        self.sharded = sorted(self.trainer.strategy.run_tables.shards.weights())


def _train(cut: str, seed: int, in_constructor: bool = False, in_context: bool = False) -> Any:
    rank, num_ranks = rank_and_num_ranks()
    torch.manual_seed(seed)
    strategy = {
        "min_rows": MIN_ROWS,
        "tables": {"kept": {"replicated": True}, "*": {"min_partition": 4}},
    }
    with meta_tables(min_rows=MIN_ROWS) if in_context else nullcontext():
        model = Late(in_constructor)
    trainer = make_trainer(strategy | {"sharding_types": [cut]})
    trainer.fit(model, loader([pairs(step, rank) for step in range(3)]))
    return model.first_state, whole_state(model), model.sharded, num_ranks


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    plans = [(3, "row_wise", False), (2, "column_wise", True)]
    return [
        run_on_warm_ranks(_train, ranks, cut, 5, context, context)[0]
        for ranks, cut, context in plans
    ]


def test_embeddings_of_configure_model_start_alike_on_any_ranks_plan_and_place(
    runs: list[Any],
) -> None:
    first, _, sharded, _ = runs[0]
    assert sharded == ["item_embedding", "tags", "user_embedding"]
    for state, _, names, _ in runs[1:]:
        assert names == sharded
        assert all(
            torch.equal(state[f"{name}.weight"], first[f"{name}.weight"]) for name in sharded
        )
    users, items = first["user_embedding.weight"], first["item_embedding.weight"]
    assert not users[3].any()
    assert 0.9 < float(users.std()) < 1.1
    assert not items[0].any()
    assert 0.25 < float(items[1:].std()) < 0.35
    assert bool((first["tags.weight"] == 0.5).all())
    assert bool((first["kept.weight"] == 0.25).all())
    assert torch.equal(first["tied.weight"], first["output.weight"])
    assert 0.8 < float(first["tied.weight"].std()) < 1.2
    assert 1 <= float(first["read.weight"].min()) <= float(first["read.weight"].max()) <= 2


class SeededByRank(Late):
    """Each rank scales its rows by another number."""

    def init_tables(self) -> None:
        super().init_tables()
        self.item_embedding.weight.data.mul_(1 + rank_and_num_ranks()[0])


def _train_seeded_by_rank() -> None:
    make_trainer({"min_rows": MIN_ROWS}).fit(SeededByRank(), loader([pairs(0, 0)]))


def test_ranks_that_write_other_values_are_told_before_the_first_step() -> None:
    with pytest.raises(
        RankFailed,
        match=r"table 'item_embedding' was built without rows, and ranks \d and \d wrote",
    ):
        run_on_warm_ranks(_train_seeded_by_rank, 2)


class Large(pl.LightningModule):
    """The example of docs/how_to/weights.md, with fewer rows."""

    planned_bytes = 0

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def configure_model(self) -> None:
        self.users = nn.Embedding(self.rows, 32)
        nn.init.xavier_uniform_(self.users.weight)

    def on_train_start(self) -> None:
        plan = self.trainer.strategy.run_tables.plan
        Large.planned_bytes = int(plan.table_bytes()[rank_and_num_ranks()[0]])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.users(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _peak_mib(rows: int) -> tuple[float, int]:
    """Return by how many MiB a rank's memory grew at most, and the bytes for tables that its plan
    estimates."""
    for num_rows in (1000, rows):
        before = _meminfo("VmHWM:", "/proc/self/status")
        trainer = make_trainer({"min_rows": 100, "sharding_types": ["row_wise"]})
        trainer.fit(Large(num_rows), loader([torch.arange(16)]))
    growth = (_meminfo("VmHWM:", "/proc/self/status") - before) / 2**20
    return growth, Large.planned_bytes


def test_an_embedding_of_configure_model_takes_a_ranks_share() -> None:
    rows = 2_000_000
    share = rows * 32 * 4 / 2**20 / 2
    for growth, planned in run_on_ranks(_peak_mib, 2, rows):
        assert planned == share * 2**20
        assert 0.9 * share < growth < share + 90, f"{growth:.0f} MiB for {share:.0f}"
