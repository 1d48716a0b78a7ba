"""Takes a large table through its life, and prints the most memory that each rank held in each stage of it.

    python -m tests.benchmarks.life_memory [--gib 10] [--kind bags|rows|embedding] [--only fit save resume]

The table's rows and Adagrad's state of them have so many GiB together; with `--optimizer sgd` the rows alone. The peak
is VmHWM, which is set back before each stage; the process itself is in it, some 400 MiB. --limit-gib ends a rank that
allocates more (RLIMIT_DATA). Checkpoints go to --folder, and need the table's size about five times.
"""

import argparse
import contextlib
import json
import resource
import tempfile
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
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_distrec.errors import DistRecError
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

MIB, GIB = 2**20, 2**30
BATCH, IDS, STEPS = 256, 10, 4
WHOLE = ("full_state_dict", "unshard", "load_from_checkpoint")
"""Stages that hold the whole table, on rank 0 or on each rank."""
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
    def num_bytes(self) -> int:
        """Bytes of its rows with optimizer state."""
        return self.num_rows * 4 * self.dim * (2 if self.optimizer == "adagrad" else 1)


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
            options: Any = {"name": "users", "embedding_dim": chosen.dim, "num_embeddings": chosen.num_rows}
            if chosen.kind == "embedding":
                self.users = nn.Embedding(chosen.num_rows, chosen.dim)
            elif chosen.kind == "bags":
                self.users = EmbeddingBagCollection([EmbeddingBagConfig(**options, feature_names=["ids"])])
            else:
                self.users = EmbeddingCollection([EmbeddingConfig(**options, feature_names=["ids"])])

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
        return nn.functional.binary_cross_entropy_with_logits(self(batch), torch.ones(batch.shape[0]))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        kind = torch.optim.Adagrad if self.hparams.optimizer == "adagrad" else torch.optim.SGD
        return kind(self.parameters(), lr=0.05)


class _Saves(pl.Callback):
    """Saves in the middle of a fit."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS // 2:
            trainer.save_checkpoint(self.path)


class Stages:
    """Runs the stages that were asked for; `peaks` has bytes and seconds by stage."""

    def __init__(self, life: Life) -> None:
        self.only, self.peaks = life.only, {}
        if life.limit_gib:
            resource.setrlimit(resource.RLIMIT_DATA, (int(life.limit_gib * GIB),) * 2)

    def __call__(self, name: str, action: Any) -> None:
        """Run one, unless it was not asked for."""
        if self.only and name not in self.only:
            return
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        start = time.monotonic()
        action()
        status = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
        self.peaks[name] = (peak, time.monotonic() - start)


def train(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Live on these ranks; returns the peaks of this one."""
    model, stages, rank = _module(life), Stages(life), rank_and_num_ranks()[0]
    data = _data(life, rank)
    trainer = make_trainer({})
    stages("fit", lambda: trainer.fit(model, data))
    stages("save", lambda: trainer.save_checkpoint(folder / "full.ckpt"))
    stages("validate", lambda: make_trainer().validate(model, data, verbose=False))
    stages("second fit", lambda: make_trainer().fit(model, data))
    asynchronous = make_trainer({"checkpoint": {"async_save": True}}, callbacks=[_Saves(folder / "async.ckpt")])
    stages("fit with async save", lambda: asynchronous.fit(model, data))
    series = {"every": 2, "full_every": 100, "dirpath": str(folder / "series")}
    last = make_trainer({"checkpoint": {"incremental": series}})
    stages("fit with incremental saves", lambda: last.fit(model, data))
    stages("full_state_dict, refused", lambda: _refused(last.strategy.full_state_dict))
    stages("full_state_dict", last.strategy.full_state_dict)
    stages("unshard, refused", lambda: _refused(last.strategy.unshard))
    stages("unshard", last.strategy.unshard)
    return stages.peaks


def resume(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Resume on these ranks; returns the peaks of this one."""
    model, stages, rank = _module(life), Stages(life), rank_and_num_ranks()[0]
    trainer = make_trainer(max_epochs=2)
    stages("resume", lambda: trainer.fit(model, _data(life, rank), ckpt_path=str(folder / "full.ckpt")))
    return stages.peaks


def use(life: Life, folder: Path) -> dict[str, Any]:
    """Do in one process what needs no ranks; returns its peaks."""
    from lightning_distrec.checkpoint.contents import read_contents
    from lightning_distrec.checkpoint.tools.export_checkpoint import export
    from lightning_distrec.serving.answer import Server
    from lightning_distrec.serving.artifact import export_for_serving
    from lightning_distrec.sharding.tables import tables_on_meta

    stages, batch, full = Stages(life), next(iter(_data(life, 0))), folder / "full.ckpt"

    def write_served() -> None:
        with tables_on_meta():
            (model := _module(life)).configure_model()
        export_for_serving(model, batch, folder / "served", state=read_contents(full, False).checkpoint["state_dict"])

    stages("export", lambda: export(full, folder / "exported.ckpt"))
    stages("export for serving", write_served)
    stages("serve", lambda: Server(folder / "served").answer({"input": batch}))
    stages("load_from_checkpoint", lambda: Users.load_from_checkpoint(full))
    return stages.peaks


def measure(life: Life, folder: Path) -> list[dict[str, Any]]:
    """Return the peaks of all stages: the stage, its ranks, bytes of the share, and peak bytes by rank."""
    rows = []
    for function, num_ranks in ((train, life.ranks), (resume, life.resume_ranks), (use, 1)):
        if function is use and life.only and not set(life.only) & {"export", "export for serving", "serve", WHOLE[2]}:
            continue
        per_rank = run_on_ranks(function, num_ranks, life, folder, timeout_seconds=3600)
        share = 0 if function is use else life.num_bytes // num_ranks
        for stage in per_rank[0]:
            peaks = [peaks[stage][0] for peaks in per_rank]
            rows.append({
                "stage": stage,
                "ranks": num_ranks,
                "share": share,
                "peaks": peaks,
                "seconds": per_rank[0][stage][1],
            })
    return rows


def exceeds(row: dict[str, Any]) -> bool:
    """Whether a rank held more than its share and the allowance in a stage that needs no whole table."""
    return row["stage"] not in WHOLE and max(row["peaks"]) > row["share"] + ALLOWANCE_BYTES


def _module(life: Life) -> Users:
    return Users(life.kind, life.num_rows, life.dim, life.optimizer)


def _data(life: Life, rank: int) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(rank)
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
    """Measure and print; the exit status is the number of stages that exceed share + 512 MiB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    print(f"{life.num_rows:,} rows x {life.dim}, {life.optimizer}, {life.kind}; {life.num_bytes / MIB:,.0f} MiB")
    print("| stage | ranks | share, MiB | peak of a rank, MiB | above the share, MiB | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        peak, share = max(row["peaks"]), row["share"]
        mark = " (too much)" if exceeds(row) else ""
        numbers = f"{share / MIB:,.0f} | {peak / MIB:,.0f} | {(peak - share) / MIB:,.0f}{mark} | {row['seconds']:.0f}"
        print(f"| {row['stage']} | {row['ranks']} | {numbers} |")
    print(json.dumps(rows))
    return sum(map(exceeds, rows))


if __name__ == "__main__":
    raise SystemExit(main())
