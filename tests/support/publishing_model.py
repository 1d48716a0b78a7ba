"""Models that publish while they train: one with a table of each way of sharding, and TorchRec's
managed collections."""

import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import PublishRows
from lightning_distrec.checkpoint.contents import read_contents
from lightning_distrec.serving.answer import Server
from lightning_distrec.serving.artifact import export_for_serving
from lightning_distrec.serving.publishing.published_fit import published_of
from tests.support.mapped_models import ManagedModel, MchModel, make_batch
from tests.support.trainers import make_trainer

DIM = 8
EVERY = 3
"""Steps between publications, and checkpoints."""
NUM_ROWS = {"by_row": 120, "by_column": 90, "small": 12, "mapped": 48}
TABLES = {
    "by_row": {"sharding_types": ["row_wise"]},
    "by_column": {"sharding_types": ["column_wise"], "min_partition": 4},
    "small": {"sharding_types": ["data_parallel"]},
    "mapped": {"ids": "dynamic", "rows": 48, "buckets": 6},
}
"""Options of the strategy by table."""


class PublishingModel(pl.LightningModule):
    """Bags of four tables and layers over them."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=num_rows, feature_names=[name]
            )
            for name, num_rows in NUM_ROWS.items()
        ]
        self.bags = EmbeddingBagCollection(tables=configs)
        self.over = nn.Sequential(nn.Linear(DIM * len(configs), 6), nn.BatchNorm1d(6))
        self.last = nn.Linear(6, 1)
        self.optimizer = "Adagrad"

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor([*NUM_ROWS], batch["ids"], lengths=batch["lengths"])
        return self.last(self.over(self.bags(features).values())).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)


def click_batch(seed: int) -> dict[str, Tensor]:
    """Return a batch whose ids of "mapped" have no fixed range, and become others over batches."""
    size = 6
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 3, (len(NUM_ROWS) * size,), generator=generator)
    ids = []
    for name, feature_lengths in zip(NUM_ROWS, lengths.split(size), strict=True):
        first = 10**12 * (seed // 5) if name == "mapped" else 0
        num_ids = int(feature_lengths.sum())
        ids.append(first + torch.randint(0, NUM_ROWS[name], (num_ids,), generator=generator))
    label = torch.randint(0, 2, (size,), generator=generator).float()
    return {"ids": torch.cat(ids), "lengths": lengths, "label": label}


def changing_batch(seed: int) -> dict[str, Tensor]:
    """Return a batch for managed collections, whose ids become others."""
    batch = make_batch(seed)
    return {**batch, "ids": batch["ids"] + 10**11 * (seed // 5)}


def empty_batch(seed: int) -> dict[str, Tensor]:
    """Return a batch without ids."""
    batch = click_batch(seed)
    return {**batch, "ids": batch["ids"][:0], "lengths": torch.zeros_like(batch["lengths"])}


JOBS: dict[str, Any] = {
    "empty": (PublishingModel, empty_batch),
    "tables": (PublishingModel, click_batch),
    "hash_zch": (ManagedModel, changing_batch),
    "mch": (MchModel, changing_batch),
}
"""Kind -> a module, and a batch by number."""


def train_and_publish(
    folder: str,
    num_steps: int,
    options: dict[str, Any] | None = None,
    kind: str = "tables",
    optimizer: str = "Adagrad",
    resume_from: str | None = None,
    callbacks: tuple[Callback, ...] = (),
    tables: dict[str, Any] | None = None,
) -> None:
    """Train on the ranks that call it, with `step=N.ckpt` beside the publications of every third
    step, and `end.ckpt`. options: of PublishRows. tables: other options of some tables."""
    make_module, batch = JOBS[kind]
    torch.manual_seed(7)
    module = make_module()
    module.optimizer = optimizer
    checkpoints = ModelCheckpoint(
        f"{folder}/checkpoints", "{step}", every_n_train_steps=EVERY, save_top_k=-1
    )
    publish = PublishRows(f"{folder}/published", **({"every_n_steps": EVERY} | (options or {})))
    trainer = make_trainer(
        {"tables": TABLES | (tables or {}) if make_module is PublishingModel else {}},
        max_steps=num_steps,
        callbacks=[publish, *callbacks, checkpoints],
        enable_checkpointing=True,
    )
    loader = DataLoader([batch(step) for step in range(40)], batch_size=None)
    trainer.fit(module, loader, ckpt_path=resume_from)
    trainer.save_checkpoint(f"{folder}/checkpoints/end.ckpt")


class DiesInPublication(Callback):
    """Ends rank 1 before it writes rows of publication `sequence`."""

    def __init__(self, sequence: int) -> None:
        self._name = f"rows-{sequence:08d}"

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:

        from lightning_distrec.serving.publishing.publications import PublicationWriter

        write = PublicationWriter.write_tables

        def write_or_die(writer: Any, name: str, tables: Any) -> Any:
            if name.startswith(self._name) and trainer.global_rank == 1:
                os._exit(9)
            return write(writer, name, tables)

        PublicationWriter.write_tables = write_or_die  # type: ignore[method-assign]


class WritesRows(Callback):
    """Halves rows after some steps, when training ends, and when it begins again."""

    is_set_up = False

    def setup(self, *_: Any, **__: Any) -> None:
        self.is_set_up = True

    def _halve(self, module: pl.LightningModule) -> None:
        with torch.no_grad():
            module.bags.embedding_bags["by_row"].weight.mul_(0.5)
            module.last.bias.add_(1)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert self.is_set_up
        if trainer.global_step:
            self._halve(module)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step in (3, 5):
            self._halve(module)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._halve(module)


class LosesRows(Callback):
    """Removes the rows of the oldest publication after a step, as a clean-up by hand might."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 8 and trainer.is_global_zero:
            (publish,) = [c for c in trainer.callbacks if isinstance(c, PublishRows)]
            writer = publish._writer
            shutil.rmtree(writer.path(writer.manifest(writer.sequences()[0])["folder"]))


class FillsDisk(Callback):
    """Lets no file of rank 1 grow beyond some bytes while a step trains: what a full disk does."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        size = 100 if trainer.global_step == self._step and trainer.global_rank else -1
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self._limits[1]))

    def on_train_end(self, *_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


def export_step(folder: Path, name: str, kind: str = "tables", **options: Any) -> Server:
    """Export a checkpoint of `train_and_publish`, and return what answers by it. options: of
    export_for_serving."""
    make_module, batch = JOBS[kind]
    checkpoint = read_contents(folder / "checkpoints" / f"{name}.ckpt").checkpoint
    published = published_of(checkpoint)
    target = folder / f"served-{name}-{options.get('bits')}"
    state = checkpoint["state_dict"]
    if not target.exists():
        export_for_serving(
            make_module(), batch(30), target, state=state, published=published, **options
        )
    return Server(target)


def served_as(folder: Path, name: str, exported: Path) -> Server:
    """Return the server that the export of a checkpoint gives, by the export of another step or
    job: they differ in rows, weights and what was published, and an export takes seconds."""
    checkpoint = read_contents(folder / "checkpoints" / f"{name}.ckpt").checkpoint
    state = checkpoint["state_dict"]
    server = Server(exported)
    server.tables = {key: state[key].clone() for key in server.tables}
    for key, weight in server.program.state_dict().items():
        if weight.numel():  # tables are none of the program's
            weight.copy_(state[key.removeprefix("predictor.module.")])
    server.published = {**published_of(checkpoint), "is_export": True}
    return server


def one_by_one(published: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a folder in which the publications of another one appear, one after the other, and the
    manifest of the newest."""
    folder = published.with_name(f"{published.name}-one-by-one")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for rows in published.glob("rows-*"):
        (folder / rows.name).symlink_to(rows)
    for manifest in sorted(published.glob("manifest-*.json")):
        shutil.copy(manifest, folder)
        yield folder, json.loads(manifest.read_text())
