"""Runs that MLflow and W&B, as they are published, record on disk; and what they have recorded."""

import ast
import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from tests.support.click_model import EvaluatedModel, rank_loader, seeded
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

PACKAGES = ("mlflow-skinny==3.17.2", "wandb==0.31.0")
SGD: tuple[Any, ...] = (torch.optim.SGD, {"lr": 1.0})


class Upload(NamedTuple):
    """One checkpoint that has been uploaded."""

    aliases: list[str]
    metadata: dict[str, Any]
    files: dict[str, str]
    """Path in the artifact -> where the copy is."""


def fit(
    packages: str,
    folder: str,
    log_model: Any,
    checkpoint: dict[str, Any],
    resume: str | None = None,
) -> Any:
    """Train three epochs with both loggers; returns the weights, and the steps that were
    trained."""
    use(packages, folder)
    model, keep = (
        seeded(EvaluatedModel, *SGD),
        ModelCheckpoint(f"{folder}/saved", "{epoch}", "val_loss", save_last=True),
    )
    loggers = [
        MLFlowLogger("clicks", tracking_uri=f"file:{folder}/mlflow", log_model=log_model),
        WandbLogger("clicks", save_dir=folder, log_model=log_model),
    ]
    options = {
        "callbacks": [keep],
        "enable_checkpointing": True,
        "max_epochs": 3,
        "logger": loggers,
    }
    trainer = make_trainer({"checkpoint": checkpoint}, **options)
    rank = rank_and_num_ranks()[0]
    trainer.fit(model, rank_loader(5, rank), rank_loader(3, rank), ckpt_path=resume)
    if rank == 0:
        loggers[1].experiment.finish()  # type: ignore[attr-defined]
    return model.final_state, len(model.losses)


def use(packages: str, folder: str) -> None:
    """Let this process import the packages, and let them write below a folder only."""
    sys.path.append(packages)  # what is installed with torch comes first
    wandb_values = {
        name: f"{folder}/{name.lower()}"
        for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
    }
    os.environ |= wandb_values | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}


def download(upload: Upload, folder: Path) -> Path:
    """Copy an upload into a folder, as a client of MLflow or W&B does; returns the checkpoint's
    path."""
    for path, copy in upload.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(copy, folder / path)
    (checkpoint,) = folder.glob("*.ckpt")
    return checkpoint


def in_mlflow(folder: Path) -> list[Upload]:
    """Return what MLflow's folder holds, the oldest first."""
    uploads = []
    for aliases in sorted(
        folder.glob("mlflow/*/*/artifacts/*/aliases.txt"), key=lambda path: path.stat().st_mtime_ns
    ):
        one_values = aliases.parent
        metadata = yaml.safe_load((one_values / "metadata.yaml").read_text())
        metadata["ModelCheckpoint"] = metadata.pop("Checkpoint")  # as W&B names it
        files = {
            str(path.relative_to(one_values)): str(path)
            for path in one_values.rglob("*")
            if path.is_file()
        }
        own_part = {
            path: copy
            for path, copy in files.items()
            if path not in ("aliases.txt", "metadata.yaml")
        }
        uploads.append(Upload(ast.literal_eval(aliases.read_text()), metadata, own_part))
    return uploads


def in_wandb(folder: Path) -> list[Upload]:
    """Return the artifacts of the offline run, the oldest first."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [
        Upload(
            sorted(record.artifact.aliases, reverse=True),
            json.loads(record.artifact.metadata),
            {entry.path: entry.local_path for entry in record.artifact.manifest.contents},
        )
        for record in _records(path.read_bytes())
        if record.WhichOneof("record_type") == "artifact"
    ]


def _records(log: bytes) -> Iterator[Any]:
    """Yield the records of W&B's file: LevelDB's log format after seven bytes, in blocks of 32
    KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, whole = 7, b""
    while position + 7 <= len(log):
        if (room := 32768 - position % 32768) < 7:
            position += room
            continue
        size, kind = struct.unpack("<HB", log[position + 4 : position + 7])
        if not kind:  # the rest of a block
            position += room
            continue
        whole += log[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # the only part, the last part
            yield Record.FromString(whole)
            whole = b""
