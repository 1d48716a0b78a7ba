"""Takes a large table through its life, and prints the most memory that each rank held in each
stage of it.

    python -m tests.benchmarks.life_memory [--gib 10] [--kind bags|rows|embedding] [--only fit save
    resume]

The table's rows and Adagrad's state of them have so many GiB together; with `--optimizer sgd` the
rows alone. The peak is that of memory without files, which may be mapped but can be dropped, looked
at every 5 ms; some 300 MiB of it are the process itself. --limit-gib ends a rank that allocates
more (RLIMIT_DATA), with as much for all ranks together where their number is another. Checkpoints
go to --folder.
"""

import argparse
import contextlib
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from lightning_distrec.errors import DistRecError
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

MIB, GIB = 2**20, 2**30
BATCH, IDS, STEPS = 256, 10, 4
WHOLE = ("full_state_dict", "unshard", "load_from_checkpoint")
"""Stages that hold all rows of the table, on rank 0 or on each rank, beside the shares."""
COPIES = "fit with async save"
"""The stage that copies each share, so that training goes on while the copy is written."""
ALLOWANCE_BYTES = 512 * MIB
"""What a rank may hold beside its share, the process itself among it."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """The table, its ranks and its stages."""

    gib: float = 10.0
    dim: int = 32
    kind: str = "bags"
    optimizer: str = "adagrad"
    ranks: int = 2
    resume_ranks: int = 3
    limit_gib: float = 0.0
    only: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return int(self.gib * GIB) // (4 * self.dim * (2 if self.optimizer == "adagrad" else 1))

    @property
    def row_bytes(self) -> int:
        """Bytes of its rows."""
        return self.num_rows * 4 * self.dim

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows with optimizer state."""
        return self.row_bytes * (2 if self.optimizer == "adagrad" else 1)


class Users(pl.LightningModule):
    """One table, made in configure_model, and a layer."""

    def __init__(self, kind: str, num_rows: int, dim: int, optimizer: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.top = nn.Linear(dim, 1)
        self.users: nn.Module | None = None

    def configure_model(self) -> None:
        """Make the table."""
        if self.users is None:
            chosen = self.hparams
            options: Any = {
                "name": "users",
                "embedding_dim": chosen.dim,
                "num_embeddings": chosen.num_rows,
            }
            if chosen.kind == "embedding":
                self.users = nn.Embedding(chosen.num_rows, chosen.dim)
            elif chosen.kind == "bags":
                self.users = EmbeddingBagCollection([
                    EmbeddingBagConfig(**options, feature_names=["ids"])
                ])
            else:
                self.users = EmbeddingCollection([
                    EmbeddingConfig(**options, feature_names=["ids"])
                ])

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (examples, IDS). Returns a score per example."""
        assert self.users is not None
        if self.hparams.kind == "embedding":
            return self.top(self.users(ids).mean(1)).squeeze(1)
        lengths = torch.full((ids.shape[0],), ids.shape[1])
        output = self.users(KeyedJaggedTensor(keys=["ids"], values=ids.flatten(), lengths=lengths))
        if self.hparams.kind == "bags":
            return self.top(output.values()).squeeze(1)
        return self.top(output["ids"].values().view(*ids.shape, -1).mean(1)).squeeze(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(
            self(batch), torch.ones(batch.shape[0])
        )

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        kind = torch.optim.Adagrad if self.hparams.optimizer == "adagrad" else torch.optim.SGD
        return kind(self.parameters(), lr=0.05)


class _Saves(pl.Callback):
    """Saves in the middle of a fit."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == STEPS // 2:
            trainer.save_checkpoint(self.path)


class Stages:
    """Runs the stages that were asked for; `peaks` has bytes and seconds by stage."""

    def __init__(self, life: Life) -> None:
        self.only, self.peaks = life.only, {}
        if life.limit_gib:
            limit = int(life.limit_gib * GIB * life.ranks / rank_and_num_ranks()[1])
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def __call__(self, name: str, action: Any) -> None:
        """Run one, unless it was not asked for."""
        if self.only and name not in self.only:
            return
        start, peaks, done = time.monotonic(), [_held_bytes()], threading.Event()

        def look() -> None:
            while not done.wait(0.005):
                peaks.append(max(peaks.pop(), _held_bytes()))

        watch = threading.Thread(target=look, daemon=True)
        watch.start()
        action()
        done.set()
        watch.join()
        self.peaks[name] = (max(peaks[0], _held_bytes()), time.monotonic() - start)


def _held_bytes() -> int:
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def train(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Live on these ranks; returns the peaks of this one."""
    model, stages, data, trainer = _module(life), Stages(life), _data(life), make_trainer()
    stages("fit", lambda: trainer.fit(model, data))
    stages("save", lambda: trainer.save_checkpoint(folder / "full.ckpt"))
    stages("validate", lambda: trainer.validate(model, data, verbose=False))
    stages("full_state_dict, refused", lambda: _refused(trainer.strategy.full_state_dict))
    stages("full_state_dict", lambda: trainer.strategy.full_state_dict())
    stages("unshard, refused", lambda: _refused(trainer.strategy.unshard))
    stages("unshard", lambda: trainer.strategy.unshard())
    return stages.peaks


def fit_again(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Fit the same module twice; returns the peak of the second."""
    model, stages, data = _module(life), Stages(life), _data(life)
    make_trainer().fit(model, data)
    stages("second fit", lambda: make_trainer().fit(model, data))
    return stages.peaks


def save_asynchronously(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Fit and save meanwhile; returns the peak."""
    stages, saves = Stages(life), _Saves(folder / "async.ckpt")
    trainer = make_trainer({"checkpoint": {"async_save": True}}, callbacks=[saves])
    stages(COPIES, lambda: trainer.fit(_module(life), _data(life)))
    return stages.peaks


def save_differences(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Fit and save by difference; returns the peak."""
    stages, series = (
        Stages(life),
        {"every": 2, "full_every": 100, "dirpath": str(folder / "series")},
    )
    trainer = make_trainer({"checkpoint": {"incremental": series}})
    stages("fit with incremental saves", lambda: trainer.fit(_module(life), _data(life)))
    return stages.peaks


def resume(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Resume on these ranks; returns the peaks of this one."""
    model, stages, trainer = _module(life), Stages(life), make_trainer(max_epochs=2)
    stages("resume", lambda: trainer.fit(model, _data(life), ckpt_path=str(folder / "full.ckpt")))
    return stages.peaks


def use(life: Life, folder: Path) -> dict[str, Any]:
    """Do in one process what needs no ranks; returns its peaks."""
    from lightning_distrec.checkpoint.contents import read_contents
    from lightning_distrec.serving.answer import Server
    from lightning_distrec.serving.artifact import export_for_serving
    from lightning_distrec.serving.export_checkpoint import export
    from lightning_distrec.sharding.meta_tables import tables_on_meta

    stages, batch, full = Stages(life), next(iter(_data(life))), folder / "full.ckpt"

    def write_served() -> None:
        with tables_on_meta():
            (model := _module(life)).configure_model()
        export_for_serving(
            model,
            batch,
            folder / "served",
            state=read_contents(full, False).checkpoint["state_dict"],
        )

    stages("export", lambda: export(full, folder / "exported.ckpt"))
    stages("export for serving", write_served)
    stages("serve", lambda: Server(folder / "served").answer({"input": batch}))
    stages("load_from_checkpoint", lambda: Users.load_from_checkpoint(full))
    return stages.peaks


PHASES: dict[Any, tuple[str, ...]] = {
    train: (
        "fit",
        "save",
        "validate",
        "full_state_dict, refused",
        WHOLE[0],
        "unshard, refused",
        WHOLE[1],
    ),
    fit_again: ("second fit",),
    save_asynchronously: (COPIES,),
    save_differences: ("fit with incremental saves",),
    resume: ("resume",),
    use: ("export", "export for serving", "serve", WHOLE[2]),
}
"""What ranks that start anew do, and the stages of it."""


def measure(life: Life, folder: Path) -> list[dict[str, Any]]:
    """Return for all stages: ranks, bytes that one must hold (its share, in most), peak bytes by
    rank, and seconds."""
    rows = []
    for function, stages in PHASES.items():
        if life.only and not set(life.only) & set(stages):
            continue
        num_ranks = {resume: life.resume_ranks, use: 1}.get(function, life.ranks)
        per_rank = run_on_ranks(function, num_ranks, life, folder, timeout_seconds=3600)
        for stage in per_rank[0]:
            share = 0 if function is use else life.num_bytes // num_ranks
            needed = share + (life.row_bytes if stage in WHOLE else share if stage == COPIES else 0)
            peaks, seconds = [peaks[stage][0] for peaks in per_rank], per_rank[0][stage][1]
            rows.append({
                "stage": stage,
                "ranks": num_ranks,
                "needed": needed,
                "peaks": peaks,
                "seconds": seconds,
            })
    return rows


def exceeds(row: dict[str, Any]) -> bool:
    """Whether a rank held more than the stage needs and the allowance."""
    return bool(max(row["peaks"]) > row["needed"] + ALLOWANCE_BYTES)


def _module(life: Life) -> Users:
    return Users(life.kind, life.num_rows, life.dim, life.optimizer)


def _data(life: Life) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(rank_and_num_ranks()[0])
    ids = [torch.randint(life.num_rows, (BATCH, IDS), generator=draw) for _ in range(STEPS)]
    return DataLoader(ids, batch_size=None)  # type: ignore[arg-type]


def _refused(action: Any) -> None:
    with _little_memory():
        try:
            action()
        except DistRecError as error:
            if rank_and_num_ranks()[0] == 0:
                print(error, flush=True)
            return
    raise AssertionError("a host with 100 MiB was taken for large enough")


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    with patch("lightning_distrec.host_memory._meminfo", return_value=100 * MIB):
        yield


def main() -> int:
    """Measure and print; the exit status is the number of stages with more than 512 MiB above what
    they need."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in fields(Life):
        many = (
            {"nargs": "*", "default": ()}
            if field.name == "only"
            else {"type": type(field.default), "default": field.default}
        )
        parser.add_argument(f"--{field.name.replace('_', '-')}", **many)  # type: ignore[arg-type]
    parser.add_argument("--folder", help="for checkpoints; a temporary one")
    options = vars(parser.parse_args())
    folder = options.pop("folder")
    life = Life(**{**options, "only": tuple(options["only"])})
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        rows = measure(life, Path(directory))
    print(
        f"{life.num_rows:,} rows x {life.dim}, {life.optimizer}, {life.kind}; "
        f"{life.num_bytes / MIB:,.0f} MiB"
    )
    print("| stage | ranks | needed, MiB | peak of a rank, MiB | above it, MiB | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        peak, needed = max(row["peaks"]) / MIB, row["needed"] / MIB
        mark = " (too much)" if exceeds(row) else ""
        numbers = f"{needed:,.0f} | {peak:,.0f} | {peak - needed:,.0f}{mark} | {row['seconds']:.0f}"
        print(f"| {row['stage']} | {row['ranks']} | {numbers} |")
    return sum(map(exceeds, rows))


if __name__ == "__main__":
    raise SystemExit(main())
