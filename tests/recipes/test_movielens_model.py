"""The MovieLens model on one device: its forward by hand, a short fit, the baseline and the
report."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lightning_distrec.errors import ConfigError
from recipes.movielens_dlrm.baseline import SMOOTHING_EVENTS
from recipes.movielens_dlrm.data import MovieLensDataModule
from recipes.movielens_dlrm.features import TABLES, VECTORS
from recipes.movielens_dlrm.model import ClickModel
from tests.support.movielens_folder import write_movielens_folder


@pytest.fixture
def data(tmp_path: Path) -> MovieLensDataModule:
    data = MovieLensDataModule(
        data_dir=str(write_movielens_folder(tmp_path / "made")), batch_size=64
    )
    data.setup("fit")
    return data


def built_model(**settings: float) -> ClickModel:
    model = ClickModel(**settings)
    model.configure_model()
    return model


def fit(
    model: ClickModel, data: MovieLensDataModule, path: Path, epochs: int = 4, **settings: object
) -> pl.Trainer:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=path,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(model, data)
    return trainer


def forward_by_hand(model: ClickModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same model, written example by example with plain indexing."""
    size = len(batch["label"])
    bags = list(batch["ids"].values().split(batch["ids"].lengths().tolist()))
    table_of = {feature: name for name, table in TABLES.items() for feature in table.features}
    logits = []
    for example in range(size):
        from_dense = model.bottom(batch["dense"][example])
        vectors = [from_dense]
        for position, feature in enumerate(batch["ids"].keys()):
            rows = model.tables.embedding_bags[table_of[feature]].weight[
                bags[position * size + example]
            ]
            vectors.append(rows.mean(0) if len(rows) else torch.zeros_like(from_dense))
        dots = [
            vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i + 1, len(vectors))
        ]
        logits.append(model.top(torch.cat([from_dense, torch.stack(dots)])).squeeze())
    return torch.stack(logits)


def test_forward_equals_the_model_written_by_hand(data):
    model = built_model(dim=8, hidden=16)
    # Large weights: with the small initial ones the dot products would hardly show.
    for weight in model.tables.parameters():
        torch.nn.init.normal_(weight)
    batch = next(iter(data.train_dataloader()))
    assert batch["ids"].keys() == list(VECTORS)
    assert (batch["ids"].lengths() == 0).any(), "the first users have no past: their bags are empty"
    assert_close(model(batch), forward_by_hand(model, batch), rtol=1e-4, atol=1e-5)
    groups = model.configure_optimizers().param_groups
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    with pytest.raises(ConfigError, match="dim=6"):
        ClickModel(dim=6)


def test_a_short_fit_learns_and_its_checkpoint_loads(data, tmp_path):
    model = ClickModel(table_learning_rate=0.05, learning_rate=0.02)
    losses = []
    fit(
        model,
        data,
        tmp_path,
        logger=False,
        callbacks=[
            pl.callbacks.LambdaCallback(
                on_train_epoch_end=lambda trainer, _: losses.append(
                    float(trainer.callback_metrics["train_loss"])
                )
            )
        ],
    )
    assert losses[-1] < losses[0] - 0.05
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.ckpt")
    loaded = ClickModel.load_from_checkpoint(checkpoint)
    batch = next(iter(data.val_dataloader()))
    assert_close(loaded.cpu()(batch), model(batch))


def test_the_baseline_equals_two_averages_computed_by_hand(data):
    def rows(split: str) -> list[tuple[int, int, float]]:
        events = data.events[split]
        ratings = data.ratings
        return [
            (int(ratings.users[e]), int(ratings.items[e]), float(ratings.ratings[e] >= 4))
            for e in events
        ]

    train, val = rows("train"), rows("val")
    overall = sum(label for *_, label in train) / len(train)

    def rate(column: int, key: int) -> float:
        labels = [row[2] for row in train if row[column] == key]
        return (sum(labels) + SMOOTHING_EVENTS * overall) / (len(labels) + SMOOTHING_EVENTS)

    guesses = [
        min(max(rate(0, user) + rate(1, item) - overall, 0.01), 0.99) for user, item, _ in val
    ]
    labels = [label for *_, label in val]
    log_loss = functional.binary_cross_entropy(torch.tensor(guesses), torch.tensor(labels)).item()
    pairs = [
        (above > below) + 0.5 * (above == below)
        for above, liked in zip(guesses, labels, strict=True)
        if liked
        for below, other in zip(guesses, labels, strict=True)
        if not other
    ]
    baseline = data.baseline("val")
    assert baseline.log_loss == pytest.approx(log_loss, abs=1e-5)
    # Two guesses that are equal but for rounding may count as a tie on one side only.
    assert baseline.auroc == pytest.approx(sum(pairs) / len(pairs), abs=1e-3)
