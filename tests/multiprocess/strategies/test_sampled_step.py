"""What a step keeps for its backward, measured before tables are planned: it is true, and training does not notice."""

import contextlib
import io
import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_distrec.sharding.tables import find_tables
from lightning_distrec.strategies.estimates.step_profile import profile_step
from lightning_distrec.strategies.tables import cluster_facts
from lightning_distrec.strategies.tables.sampled_step import _with_small_tables
from lightning_distrec.units import format_bytes
from tests.support.click_model import FEATURES, bag_configs
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

SIZE = 4


class AllKinds(pl.LightningModule):
    """Every kind of table, among them embeddings with a padding row, before layers with dropout and batch norm."""

    manual = False

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=bag_configs(), is_weighted=True)
        self.rows = EmbeddingCollection(
            tables=[EmbeddingConfig(name="seq", embedding_dim=8, num_embeddings=30, feature_names=["a"])]
        )
        self.item = nn.Embedding(40, 8, padding_idx=39)
        self.tags = nn.EmbeddingBag(50, 8, mode="sum", padding_idx=3)
        self.mlp = nn.Sequential(
            nn.Linear(56 + 24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1)
        )
        self.losses: list[float] = []

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        return batch | {"weights": batch["ids"].flatten().float()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["ids"]
        features = KeyedJaggedTensor(
            keys=FEATURES, values=ids.flatten(), lengths=torch.full((4 * len(ids),), 2), weights=batch["weights"]
        )
        bags, rows = self.bags(features).values(), self.rows(features)["a"].values().view(len(ids), 2, 8).sum(1)
        plain = self.item(input=ids[:, 0]), self.tags(ids[:, 1:4], per_sample_weights=ids[:, 1:4].float())
        loss = self.mlp(torch.cat([bags, rows, *plain], 1)).square().mean()
        self.log("loss", loss, batch_size=len(ids))
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class AsksItsTrainer(AllKinds):
    """Cannot take a step alone."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.trainer.world_size
        return super().training_step(batch, batch_idx)


class OnMeta(AllKinds):
    """Tables have no memory before they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = None

    def configure_model(self) -> None:
        if self.bags is None:
            self.bags = EmbeddingBagCollection(tables=bag_configs(), is_weighted=True)


def samples(rank: int) -> list[dict[str, Tensor]]:
    """Return examples of eight ids each; rank 1 has larger batches."""
    draw = torch.Generator().manual_seed(rank)
    return [{"ids": torch.randint(0, 11, (8,), generator=draw)} for _ in range(6 * SIZE * (1 + rank))]


def loader(rank: int) -> DataLoader[Any]:
    return DataLoader(samples(rank), SIZE * (1 + rank), shuffle=True)  # type: ignore[arg-type]


class Batches:
    """Batches without a DataLoader."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def _fit(kind: str, reserve: str, data: str = "loader") -> tuple[list[float], str, int | None]:
    """Return the losses, what was said, and the bytes that were measured."""
    pl.seed_everything(5, verbose=False)
    rank = rank_and_num_ranks()[0]
    model, out, found = globals()[kind](), io.StringIO(), []
    real = cluster_facts.sample_step

    def noted(*args: Any) -> Any:
        found.append(real(*args))
        return found[-1]

    batches: Any = loader(rank)
    if data == "batches" or (data == "rank 0 only" and rank):
        batches = Batches(list(batches))
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler := logging.StreamHandler(out))
    cluster_facts.sample_step = noted
    try:
        options = {"planning": {"reserve": reserve}, "convert_embeddings": "all", "memory_bytes_per_rank": 10**9}
        with contextlib.redirect_stdout(out):
            make_trainer(options).fit(model, batches)
    finally:
        logger.removeHandler(handler)
        cluster_facts.sample_step = real
    return model.losses, " ".join(out.getvalue().split()), found[0][0] if found else None


CALLS: dict[str, tuple[Any, ...]] = {
    "without": (_fit, "AllKinds", "10%"),
    "with": (_fit, "AllKinds", "measure"),
    "meta": (_fit, "OnMeta", "measure"),
    "asks": (_fit, "AsksItsTrainer", "measure"),
    "batches": (_fit, "AllKinds", "measure", "batches"),
    "rank 0 only": (_fit, "AllKinds", "measure", "rank 0 only"),
}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """Rank -> case -> what came of it."""
    return run_each_on_ranks(CALLS, 2)


def _by_the_module_itself(rank: int) -> int:
    """Return what a step of the unsharded module keeps, whose tables are all there."""
    model, ids = AllKinds(), torch.stack([sample["ids"] for sample in samples(rank)[: SIZE * (1 + rank)]])
    batch = model.on_after_batch_transfer({"ids": ids}, 0)
    kept = profile_step(model, batch, None, "32-true").activation_bytes
    assert kept
    return kept


def test_the_most_that_any_rank_keeps_is_what_the_module_itself_keeps(runs: list[dict[str, Any]]) -> None:
    expected = _by_the_module_itself(1)
    assert expected > _by_the_module_itself(0)
    for of_rank in runs:
        for name in ("with", "meta"):
            # The copy looks up other ids, which lie beside the batch's own.
            assert 0 <= of_rank[name][2] - expected <= 2 * SIZE * 8 * 8


def test_it_is_kept_beside_the_layers_and_reported(runs: list[dict[str, Any]]) -> None:
    _, said, kept = runs[0]["with"]
    numbers = sum(p.numel() for p in AllKinds().mlp.parameters())
    buffers = sum(b.nbytes for b in AllKinds().buffers())
    assert f"{format_bytes(8 * numbers + buffers + kept)} and 10% reserved (measured with a batch)" in said


def test_training_gives_the_same_losses_bit_for_bit(runs: list[dict[str, Any]]) -> None:
    for of_rank in runs:
        assert len(of_rank["without"][0]) == 6
        for name in ("with", "asks"):
            assert of_rank[name][0] == of_rank["without"][0], name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("asks", "rank 0: activations are left out: training_step failed on a batch without a Trainer (RuntimeError: "),
        ("batches", "rank 0: a Batches is no DataLoader, and may not start twice with the same batches."),
        ("rank 0 only", "rank 1: a Batches is no DataLoader, and may not start twice with the same batches."),
    ],
)
def test_what_cannot_be_measured_is_named_and_the_layers_count(runs: list[dict[str, Any]], name: str, why: str) -> None:
    for of_rank in runs:
        losses, _, kept = of_rank[name]
        assert len(losses) == 6
        assert kept is None
    said = runs[0][name][1]
    assert f"torchrec_sharded: reserve='measure': nothing is reserved for activations: {why}" in said
    assert "reserved (measured without a batch)" in said


def test_the_copy_has_one_row_a_table_and_the_module_keeps_its_own() -> None:
    model = AllKinds()
    tables = find_tables(model).tables
    there = _with_small_tables(model, tables)
    assert {there.get_parameter(table.key).shape[0] for table in tables} == {1}
    assert model.get_parameter(tables[0].key).shape[0] == tables[0].config.num_embeddings
    assert there.mlp[0].weight is not model.mlp[0].weight
