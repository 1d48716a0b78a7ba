"""Models of public packages as they are published, from the package index, trained at two
depths."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support import installing
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

PACKAGES = ("torchfm==0.7.0", "deepctr-torch==0.2.9", "pytorch-widedeep==1.7.0", "recbole==1.2.1")
FIELDS, STEPS, SIZE = [100, 50, 200, 30], 12, 32
Published = tuple[str, nn.Module, Callable[[Any], Tensor], Callable[[int], Any]]
"""Name, module, its loss for a batch, and how a batch of a size is made."""


def install(folder: Path) -> str:
    """Install the packages, without what they depend on, into a folder; returns why that failed, or
    ""."""
    failures = (
        installing.install(folder / name.partition("==")[0], [name], "--no-deps")
        for name in PACKAGES
    )
    return next(filter(None, failures), "")


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules for what these packages import besides torch and numpy; no test calls
    them."""

    NAMES = frozenset([
        "tensorflow",
        "sklearn",
        "pandas",
        "scipy",
        "colorlog",
        "colorama",
        "tabulate",
        "thop",
        "ray",
        "torchvision",
        "texttable",
        "wandb",
        "spacy",
        "gensim",
        "imutils",
        "cv2",
        "fastai",
        "fastparquet",
        "pyarrow",
        "transformers",
        "statsmodels",
        "hyperopt",
        "psutil",
        "requests",
        "tensorboard",
        "fastprogress",
        "einops",
    ])

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in self.NAMES or name == "torch.utils.tensorboard":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return type("Empty", (MagicMock,), {"__path__": [], "__all__": []})(name=spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing."""


def columns(size: int) -> Tensor:
    return torch.stack([torch.randint(0, rows, (size,)) for rows in FIELDS], 1)


def torchfm() -> Iterator[Published]:
    from torchfm.model.dfm import DeepFactorizationMachineModel
    from torchfm.model.ffm import FieldAwareFactorizationMachineModel
    from torchfm.model.fm import FactorizationMachineModel

    for model in (
        FactorizationMachineModel(FIELDS, 8),
        DeepFactorizationMachineModel(FIELDS, 8, (16,), 0.2),
        FieldAwareFactorizationMachineModel(FIELDS, 8),
    ):
        yield (
            type(model).__name__,
            model,
            (lambda batch, model=model: model(batch["x"])),
            _only_columns,
        )


def _only_columns(size: int) -> Any:
    return {"x": columns(size)}


def deepctr() -> Iterator[Published]:
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
    from deepctr_torch.models.deepfm import DeepFM

    features = [SparseFeat(f"c{i}", rows, 8) for i, rows in enumerate(FIELDS)]
    features += [DenseFeat("d", 1), VarLenSparseFeat(SparseFeat("h", 60, 8), 5, "mean")]

    def batch(size: int) -> Any:
        return {
            "x": torch.cat(
                [
                    columns(size).float(),
                    torch.rand(size, 1),
                    torch.randint(0, 60, (size, 5)).float(),
                ],
                1,
            )
        }

    model = DeepFM(features, features, device="cpu")
    yield "DeepFM", model, (lambda batch: model(batch["x"])), batch


def widedeep() -> Iterator[Published]:
    from pytorch_widedeep.models.tabular.linear.wide import Wide
    from pytorch_widedeep.models.tabular.mlp.tab_mlp import TabMlp

    names = [f"c{i}" for i in range(4)]
    positions = {name: i for i, name in enumerate([*names, "d"])}

    def batch(size: int) -> Any:
        return {
            "wide": columns(size).float(),
            "tab": torch.cat([columns(size).float(), torch.rand(size, 1)], 1),
        }

    wide = Wide(sum(FIELDS))
    yield "Wide", wide, (lambda batch: wide(batch["wide"])), batch
    embedded = [(name, rows, 8) for name, rows in zip(names, FIELDS, strict=True)]
    tab = TabMlp(column_idx=positions, cat_embed_input=embedded, continuous_cols=["d"])
    yield "TabMlp", tab, (lambda batch: tab(batch["tab"])), batch


def recbole() -> Iterator[Published]:
    from recbole.model.general_recommender.bpr import BPR
    from recbole.model.sequential_recommender.gru4rec import GRU4Rec
    from recbole.model.sequential_recommender.sasrec import SASRec

    class Config(dict):
        def __getitem__(self, key: str) -> Any:
            return self.get(key)

    config = Config(
        **{
            "USER_ID_FIELD": "user",
            "ITEM_ID_FIELD": "item",
            "LIST_SUFFIX": "_list",
            "NEG_PREFIX": "neg_",
        },
        **{
            "ITEM_LIST_LENGTH_FIELD": "item_length",
            "MAX_ITEM_LIST_LENGTH": 10,
            "device": "cpu",
            "n_layers": 1,
        },
        **{
            "n_heads": 2,
            "hidden_size": 8,
            "inner_size": 16,
            "hidden_dropout_prob": 0.2,
            "attn_dropout_prob": 0.2,
        },
        **{
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "initializer_range": 0.02,
            "loss_type": "BPR",
        },
        **{"embedding_size": 8, "num_layers": 1, "dropout_prob": 0.2},
    )

    class Data:
        def num(self, field: str) -> int:
            return 100

    def batch(size: int) -> Any:
        lengths = torch.randint(1, 11, (size,))
        items = torch.randint(1, 100, (size, 10)) * (torch.arange(10) < lengths[:, None])
        single = {name: torch.randint(1, 100, (size,)) for name in ("user", "item", "neg_item")}
        return {**single, "item_list": items, "item_length": lengths}

    for kind in (SASRec, GRU4Rec, BPR):
        model = kind(config, Data())
        yield kind.__name__, model, model.calculate_loss, batch


FAMILIES = {"torchfm": torchfm, "deepctr": deepctr, "widedeep": widedeep, "recbole": recbole}


class Trained(pl.LightningModule):
    """A published module in a LightningModule of a few lines; keeps losses and lookups after each
    epoch."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss
        self.losses: list[float] = []
        self.ahead: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_epoch_end(self) -> None:
        if count := self.trainer.strategy.lookups_ahead.get("training 0"):
            self.ahead.append((count.lookups, count.ahead))


def fit(
    family: str, folder: str, depth: int
) -> dict[str, tuple[list[float], list[tuple[int, int]]]]:
    """Train a family's models on this rank; returns losses, and lookups and how many were sent
    ahead."""
    sys.path.insert(
        0, str(Path(folder) / PACKAGES[list(FAMILIES).index(family)].partition("==")[0])
    )
    if not any(isinstance(finder, Missing) for finder in sys.meta_path):
        sys.meta_path.insert(0, Missing())
    results = {}
    torch.manual_seed(0)
    np.random.seed(0)
    for name, model, loss, make in FAMILIES[family]():
        torch.manual_seed(5 + rank_and_num_ranks()[0])
        batches = [make(size) for size in [SIZE] * (STEPS - 1) + [SIZE - 10]]
        trained = Trained(model, loss)
        trainer = make_trainer(
            {
                "convert_embeddings": "all",
                "prefetch": {"depth": depth},
                "find_unused_parameters": True,
            },
            max_epochs=3,
        )
        torch.manual_seed(7)
        trainer.fit(trained, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        results[name] = trained.losses, trained.ahead
    return results


def fit_at_both_depths(family: str, folder: str) -> Any:
    """Return what fits without and with look-ahead give."""
    return fit(family, folder, 1), fit(family, folder, 3)
