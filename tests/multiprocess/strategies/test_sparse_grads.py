"""Sparse gradients are the same to the optimizer, whichever way they travel.

The truth is one process with the batches of all ranks: Lightning's "ddp" adds sparse gradients up
by gloo itself, which ends processes once in some thousand steps.
"""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distrec import TunedDDPStrategy
from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.data_parallel.gradient_exchange import sparse_hook
from tests.support.dense_models import KINDS, WithEmbedding, whole_batches
from tests.support.dense_runs import Outcome, check_same, fit
from tests.support.parameters import slow_except
from tests.support.ranks import run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS


class TwoTables(WithEmbedding):
    """A table of many rows and one of few, stepped by SparseAdam; remembers which rows had a
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.far = nn.Embedding(500, 6, sparse=True)
        self.rows: list[list[int]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        ids = (inputs[:, :3].abs() * 100).long()
        return super().forward(inputs) + self.out(self.far(ids).mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.manual_backward(loss)
        gradient: Any = self.far.weight.grad
        self.rows.append(gradient.coalesce().indices()[0].tolist())
        for optimizer in optimizers:
            optimizer.step()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        tables = [self.table.weight, self.far.weight]
        return [
            torch.optim.SparseAdam(tables, lr=0.01),
            torch.optim.SGD(self.out.parameters(), lr=0.001),
        ]


KINDS["TwoTables"] = TwoTables


def _each_way(kind: str, settings: dict[str, Any]) -> dict[str, Outcome]:
    ways: Any = ("sparse", "dense")
    return {way: fit(kind, TunedDDPStrategy(sparse_grads=way), **settings) for way in ways}


def _alone(kind: str, settings: dict[str, Any], num_ranks: int) -> Outcome:
    pl.seed_everything(5)
    model = KINDS[kind]()
    pl.Trainer(**DEFAULTS | settings).fit(model, whole_batches(num_ranks))
    return model.losses, dict(model.state_dict())


LONGER = {"max_epochs": 8}
CASES: dict[str, tuple[Any, ...]] = {
    "SGD": (_each_way, "WithEmbedding", LONGER),
    "SparseAdam": (_each_way, "TwoTables", LONGER),
    "accumulated": (_each_way, "WithEmbedding", LONGER | {"accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize("num_ranks", slow_except([2], [2, 3]))
def test_losses_and_weights_are_those_of_one_process(num_ranks: int) -> None:
    results = run_each_on_ranks(CASES, num_ranks)
    for name, (_, kind, settings) in CASES.items():
        losses, weights = _alone(kind, settings, num_ranks)
        for way in ("sparse", "dense"):
            per_rank = [result[name][way] for result in results]
            mean = [
                sum(reference) / num_ranks
                for reference in zip(*(actual[0] for actual in per_rank), strict=True)
            ]
            for _, actual in per_rank:
                check_same((mean, actual), (losses, weights), most=1e-5)


class LooksUpOneTable(WithEmbedding):
    """Has a table that no step looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Embedding(5, 6, sparse=True)


KINDS["LooksUpOneTable"] = LooksUpOneTable


def _unused(_: Any) -> str:
    try:
        fit("LooksUpOneTable", TunedDDPStrategy(find_unused_parameters=True))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_table_that_no_step_looks_up_is_reported_with_the_way_out() -> None:
    for message in run_on_warm_ranks(_unused, 2, None):
        assert message.startswith("a step looked up no row of an nn.Embedding(sparse=True)")
        assert "sparse=False, or use strategy='torchrec_sharded'" in message


def _rows(way: Any) -> list[list[int]]:
    rows: list[list[int]] = []

    class Kept(TwoTables):
        def on_train_end(self) -> None:
            rows.extend(self.rows)

    KINDS["Kept"] = Kept
    fit("Kept", TunedDDPStrategy(sparse_grads=way))
    return rows


def test_gradients_have_the_rows_that_any_rank_looked_up() -> None:
    for results in run_each_on_ranks({way: (_rows, way) for way in ("sparse", "dense")}, 2):
        assert results["dense"] == results["sparse"]
        assert 0 < max(map(len, results["dense"])) <= 2 * 4 * 3


def _averaged(num_rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Exchange gradients of a table of 9 rows; each rank has as many rows of it as its number
    says."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    rows = torch.randint(9, (1, num_rows[rank]))
    actual = []
    for sparse_grads in ("sparse", "dense"):
        gradient = torch.sparse_coo_tensor(
            rows, torch.ones(rows.shape[1], 2) * (rank + 1), (9, 2), check_invariants=True
        )
        bucket: Any = SimpleNamespace(buffer=lambda gradient=gradient: gradient)
        actual.append((gradient.to_dense(), sparse_hook(sparse_grads)(None, bucket).wait()))
    return actual


@pytest.mark.parametrize("num_rows", [(0, 0, 0), (0, 5, 2), (7, 0, 30)])
def test_ranks_that_looked_up_nothing_are_averaged_too(num_rows: tuple[int, ...]) -> None:
    results = run_on_warm_ranks(_averaged, 3, list(num_rows))
    for way_results in zip(*results, strict=True):
        mean = sum(local for local, _ in way_results) / 3
        looked_up = sum(local for local, _ in way_results)[:, 0].nonzero()[:, 0].tolist()
        for _, averaged in way_results:
            torch.testing.assert_close(averaged.to_dense(), mean)
            assert averaged.is_coalesced()
            assert averaged.indices()[0].tolist() == looked_up


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="sparse_grads='rows' is not known. Use one of 'sparse', 'dense'"
    ):
        TunedDDPStrategy(sparse_grads="rows")  # type: ignore[arg-type]
