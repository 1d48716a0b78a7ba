"""LightningModules of public packages as they are published: trained sharded on all ranks, and by
one process."""

import io
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support import installing
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import DEFAULTS, make_trainer

PACKAGES = {
    "replay": ("replay-rec==0.22.0",),
    "rectools": ("rectools==0.19.0", "pandas==2.3.3", "pytz", "tzdata", "python-dateutil", "six"),
    "forecasting": ("pytorch-forecasting==1.8.0",),
}
"""Folder -> what is in it: a package, and versions that it needs and others do not."""
NEEDED = (
    *(
        "scipy==1.17.1",
        "scikit-learn==1.9.1",
        "joblib==1.6.0",
        "threadpoolctl==3.8.0",
        "narwhals",
        "polars==1.35.2",
    ),
    *(
        "polars-runtime-32==1.35.2",
        "psutil==7.2.2",
        "implicit==0.7.3",
        "fastrlock==0.8.3",
        "pydantic==2.11.10",
    ),
    *(
        "pydantic-core==2.33.2",
        "typeguard==4.6.0",
        "annotated-types==0.7.0",
        "typing-inspection==0.4.2",
    ),
    *("pyarrow==23.0.0", "scikit-base==1.0.2"),
)
"""What the packages import when they are imported, without what that depends on."""
STEPS, SIZE, LENGTH, ITEMS = 6, 8, 8, 60


class Published(NamedTuple):
    """A module, its batches (those of rank r of n are r, r + n, ...), and what it is used for after
    the training."""

    module: pl.LightningModule
    batches: list[Any]
    recommend: Callable[[pl.LightningModule, Any], Any]
    strategy: dict[str, Any]
    predicts: bool = False
    """Whether a training batch is one for validation and prediction too."""


def install(folder: Path) -> str:
    """Install the packages into folders; returns why that failed, or ""."""
    packages = {name: list(packages) for name, packages in PACKAGES.items()} | {
        "needed": list(NEEDED)
    }
    failures = (
        installing.install(folder / name, packages, "--no-deps")
        for name, packages in packages.items()
    )
    return next(filter(None, failures), "")


def folders(folder: Path) -> list[Path]:
    """Return where the packages are, and last what they need."""
    return [folder / name for name in (*PACKAGES, "needed")]


def _sequences() -> tuple[Tensor, Tensor]:
    """Return items 1 to 59, left-padded with 0, and where they are; one sequence more than all
    batches take."""
    lengths = torch.randint(3, LENGTH + 1, (SIZE,))
    seen = torch.arange(LENGTH) >= LENGTH - lengths[:, None]
    return torch.randint(1, ITEMS, (SIZE, LENGTH)) * seen, seen


def _replay_schema() -> Any:
    from replay.data import FeatureHint, FeatureType
    from replay.data.nn import TensorFeatureInfo, TensorSchema

    hints = {
        "feature_hint": FeatureHint.ITEM_ID,
        "cardinality": ITEMS,
        "padding_value": ITEMS,
        "embedding_dim": 16,
    }
    return TensorSchema(TensorFeatureInfo("item_id", FeatureType.CATEGORICAL, is_seq=True, **hints))


def replay_sasrec() -> Published:
    from replay.models.nn.sequential.sasrec import SasRec

    def batch() -> dict[str, Any]:
        items, seen = _sequences()
        features, labels = items.where(seen, ITEMS), items.roll(-1, 1)
        return {
            "feature_tensor": {"item_id": features},
            "padding_mask": seen,
            "positive_labels": labels,
            "target_padding_mask": seen & seen.roll(-1, 1),
        }

    module = SasRec(_replay_schema(), hidden_size=16, max_seq_len=LENGTH, dropout_rate=0.0)
    gathered = {"tables": {"*item_emb": {"gathered_weight": True}}}
    return Published(
        module,
        [batch() for _ in range(2 * STEPS)],
        lambda it, batch: it.predict(dict(batch)),
        gathered,
        True,
    )


def replay_bert4rec() -> Published:
    from replay.models.nn.sequential.bert4rec import Bert4Rec

    def batch() -> dict[str, Any]:
        items, seen = _sequences()
        return {
            "inputs": {"item_id": items},
            "pad_mask": seen,
            "token_mask": (torch.rand(items.shape) > 0.3) | ~seen,
            "positive_labels": items,
        }

    module = Bert4Rec(_replay_schema(), hidden_size=16, max_seq_len=LENGTH, dropout_rate=0.0)
    gathered = {"tables": {"*item_id": {"gathered_weight": True}}}
    return Published(
        module,
        [batch() for _ in range(2 * STEPS)],
        lambda it, batch: it.predict(dict(batch)),
        gathered,
        True,
    )


def _rectools(kind: str) -> Published:
    # rectools imports pytorch_lightning, another package of the same classes.
    import_module("lightning.pytorch.loggers")
    sys.modules |= {
        name.replace("lightning.pytorch", "pytorch_lightning"): module
        for name, module in sys.modules.items()
        if name.startswith("lightning.pytorch")
    }
    import pandas as pd
    import rectools.models
    from rectools import Columns
    from rectools.dataset import Dataset

    draw = np.random.default_rng(3)
    count = 2 * STEPS * SIZE
    table = pd.DataFrame({
        Columns.User: np.repeat(np.arange(count), LENGTH),
        Columns.Item: np.concatenate([draw.permutation(ITEMS)[:LENGTH] for _ in range(count)]),
        Columns.Weight: 1.0,
        Columns.Datetime: pd.Timestamp("2024-01-01")
        + pd.to_timedelta(np.arange(count * LENGTH), "s"),
    })
    dataset = Dataset.construct(table)
    model = getattr(rectools.models, kind)(
        n_factors=16,
        n_blocks=1,
        n_heads=2,
        session_max_len=LENGTH,
        batch_size=SIZE,
        dropout_rate=0.0,
        lr=0.01,
    )
    model._build_model_from_dataset(dataset)
    batches = list(model.data_preparator.get_dataloader_train())[: 2 * STEPS]

    def recommend(module: pl.LightningModule, _: Any) -> Any:
        model.lightning_model, model.is_fitted = module, True
        recommended = model.recommend(np.arange(20), dataset, k=5, filter_viewed=True)
        return torch.tensor(recommended[Columns.Score].to_numpy()), recommended[
            Columns.Item
        ].tolist()

    return Published(model.lightning_model, batches, recommend, {})


def rectools_sasrec() -> Published:
    return _rectools("SASRecModel")


def rectools_bert4rec() -> Published:
    return _rectools("BERT4RecModel")


def tft() -> Published:
    import pandas as pd
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

    draw, shops, days = np.random.default_rng(5), 24, 20
    table = pd.DataFrame({
        "shop": np.repeat([f"shop {i}" for i in range(shops)], days),
        "day": np.tile(np.arange(days), shops),
        "sold": draw.random(shops * days),
    })
    data = TimeSeriesDataSet(
        table,
        **{
            "time_idx": "day",
            "target": "sold",
            "group_ids": ["shop"],
            "static_categoricals": ["shop"],
        },
        **{
            "max_encoder_length": 6,
            "max_prediction_length": 2,
            "time_varying_unknown_reals": ["sold"],
        },
    )
    sizes = {
        "hidden_size": 8,
        "attention_head_size": 2,
        "hidden_continuous_size": 4,
        "dropout": 0.0,
    }
    module = TemporalFusionTransformer.from_dataset(
        data,
        learning_rate=0.01,
        optimizer="adam",
        loss=QuantileLoss(),
        log_interval=-1,
        embedding_sizes={"shop": (shops, 8)},
        **sizes,
    )
    batches = list(data.to_dataloader(train=False, batch_size=SIZE, num_workers=0))[: 2 * STEPS]
    return Published(
        module,
        batches,
        lambda it, batch: it(batch[0])["prediction"],
        {"checkpoint": {"pickles": True}, "find_unused_parameters": True},
    )


class NCF(pl.LightningModule):
    """Neural collaborative filtering, as the tutorials on MovieLens have it."""

    def __init__(self, num_users: int, num_items: int) -> None:
        super().__init__()
        self.user_embedding = nn.Embedding(num_embeddings=num_users, embedding_dim=8)
        self.item_embedding = nn.Embedding(num_embeddings=num_items, embedding_dim=8)
        self.fc1 = nn.Linear(in_features=16, out_features=64)
        self.fc2 = nn.Linear(in_features=64, out_features=32)
        self.output = nn.Linear(in_features=32, out_features=1)

    def forward(self, user_input: Tensor, item_input: Tensor) -> Tensor:
        user_embedded = self.user_embedding(user_input)
        item_embedded = self.item_embedding(item_input)
        vector = torch.cat([user_embedded, item_embedded], dim=-1)
        vector = nn.ReLU()(self.fc1(vector))
        vector = nn.ReLU()(self.fc2(vector))
        return nn.Sigmoid()(self.output(vector))  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        user_input, item_input, labels = batch
        predicted_labels = self(user_input, item_input)
        return nn.BCELoss()(predicted_labels, labels.view(-1, 1).float())  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def ncf() -> Published:
    batches = [
        (
            torch.randint(0, 30, (SIZE,)),
            torch.randint(0, ITEMS, (SIZE,)),
            torch.randint(0, 2, (SIZE,)),
        )
        for _ in range(2 * STEPS)
    ]

    def hit_items(module: pl.LightningModule, _: Any) -> Any:
        """Return the ten best of 50 items for a user, as the tutorial evaluates."""
        scores = torch.squeeze(module(torch.full((50,), 7), torch.arange(50))).detach()
        return scores, torch.topk(scores, 10).indices.tolist()

    return Published(NCF(30, ITEMS), batches, hit_items, {})


MODULES = {
    "replay SasRec": replay_sasrec,
    "replay Bert4Rec": replay_bert4rec,
    "rectools SASRec": rectools_sasrec,
    "rectools BERT4Rec": rectools_bert4rec,
    "pytorch-forecasting TFT": tft,
    "NCF tutorial": ncf,
}


class SameDraws(pl.Callback):
    """Seeds before the module's own hook, which may draw weights, and notes which tables are
    sharded."""

    tables: tuple[str, ...] = ()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.manual_seed(11)
        run_tables = getattr(trainer.strategy, "run_tables", None)
        self.tables = tuple(run_tables.updates) if run_tables is not None else ()


def train(name: str, folder: str, saved_as: str = "") -> dict[str, Any]:
    """Train; return the state, and what the ordinary module recommends.

    saved_as: the path of a checkpoint that all ranks save, of tables that they shard; "": in one
    process, unsharded.
    """
    *packages, needed = map(str, folders(Path(folder)))
    sys.path[:0] = packages
    sys.path.append(needed)
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    np.random.seed(7)
    module, batches, recommend, strategy, predicts = MODULES[name]()
    rank, num_ranks = rank_and_num_ranks()
    noted = SameDraws()
    loader = DataLoader(batches[rank::num_ranks], batch_size=None)  # type: ignore[arg-type]
    if saved_as:
        trainer = make_trainer({"convert_embeddings": "all"} | strategy, callbacks=[noted])
    else:  # the mean of two batches' gradients is that of two ranks
        trainer = pl.Trainer(**DEFAULTS, callbacks=[noted], devices=1, accumulate_grad_batches=2)
    trainer.fit(module, loader)
    predicted = None
    if predicts:
        trainer.validate(module, loader, verbose=False)
        predicted = trainer.predict(module, loader)
    if saved_as:
        trainer.save_checkpoint(saved_as)
        trainer.strategy.unshard()  # type: ignore[attr-defined]
    module.eval()
    torch.save(module.state_dict(), file := io.BytesIO())  # an ordinary module
    file.seek(0)
    with torch.no_grad():
        recommended = recommend(module, batches[0])
    return {
        "state": torch.load(file),
        "recommended": recommended,
        "predicted": predicted,
        "tables": noted.tables,
    }
