"""Takes a large table through its life, and measures the most memory that each rank held in each
stage of it.

    python -m tests.benchmarks.life_memory [--gib 10] [--only fit save resume] [--folder FOLDER]
    [--quick] [--write]

The table's rows and Adagrad's state of them have so many GiB together. The peak is that of memory
without files, which may be mapped but can be dropped, looked at every 5 ms; some 300 MiB of it are
the process itself. Checkpoints go to --folder. Exits with 1 where a rank held more than it needs
and 512 MiB.
"""

import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec.checkpoint.contents import read_contents
from lightning_distrec.serving.answer import Server
from lightning_distrec.serving.artifact import export_for_serving
from lightning_distrec.serving.export_checkpoint import export
from lightning_distrec.sharding.meta_tables import tables_on_meta
from tests.benchmarks.checkpointing_saves import AfterFirstStep
from tests.benchmarks.report import start, table
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

MIB, GIB = 2**20, 2**30
BATCH, IDS, STEPS, DIM = 256, 10, 4, 32
BYTES_PER_ROW = 2 * 4 * DIM
"""Its weights, and Adagrad's state."""
WHOLE = ("full_state_dict", "unshard", "load_from_checkpoint")
"""Stages that hold all rows of the table, on rank 0 or on each rank, beside the shares."""
COPIES = "fit with async save"
"""The stage that copies each share, so that training goes on while the copy is written."""
ALLOWANCE_BYTES = 512 * MIB
"""What a rank may hold beside its share, the process itself among it."""
SHARED = {"sharding_types": ["row_wise"]}
"""A plan for the shortest steps leaves the table on one rank, which has the memory for it."""
HEADER = ["stage", "ranks", "needed, MiB", "peak of a rank, MiB", "above it, MiB", "seconds"]


@dataclass(frozen=True, kw_only=True)
class Life:
    """The table, its ranks and its stages."""

    gib: float = 10.0
    ranks: int = 2
    resume_ranks: int = 3
    only: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return int(self.gib * GIB) // BYTES_PER_ROW

    @property
    def row_bytes(self) -> int:
        """Bytes of its rows."""
        return self.num_rows * 4 * DIM

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows with optimizer state."""
        return self.num_rows * BYTES_PER_ROW


@dataclass(frozen=True)
class Stage:
    """What ranks held in one stage."""

    name: str
    num_ranks: int
    needed: int
    """Bytes that a rank must hold: its share, in most stages."""
    peaks: list[int]
    """Bytes by rank."""
    seconds: float

    @property
    def exceeds(self) -> bool:
        """Whether a rank held more than the stage needs and the allowance."""
        return max(self.peaks) > self.needed + ALLOWANCE_BYTES

    def cells(self) -> list[str]:
        """Return a line of the table."""
        peak, needed = max(self.peaks) / MIB, self.needed / MIB
        above = f"{peak - needed:,.0f}"
        if self.exceeds:
            above = f"**{above}**"
        numbers = [f"{needed:,.0f}", f"{peak:,.0f}", above, f"{self.seconds:.0f}"]
        return [self.name, str(self.num_ranks), *numbers]


class Users(pl.LightningModule):
    """One table, made in configure_model, and a layer."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.top = nn.Linear(DIM, 1)
        self.users: nn.Module | None = None

    def configure_model(self) -> None:
        """Make the table."""
        if self.users is None:
            config = EmbeddingBagConfig(
                name="users",
                embedding_dim=DIM,
                num_embeddings=self.hparams.num_rows,
                feature_names=["ids"],
            )
            self.users = EmbeddingBagCollection([config])

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (examples, IDS). Returns a score per example."""
        assert self.users is not None
        lengths = torch.full((ids.shape[0],), ids.shape[1])
        features = KeyedJaggedTensor(keys=["ids"], values=ids.flatten(), lengths=lengths)
        return self.top(self.users(features).values()).squeeze(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        labels = torch.ones(batch.shape[0])
        return nn.functional.binary_cross_entropy_with_logits(self(batch), labels)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


class Stages:
    """Runs the stages that were asked for; `peaks` has bytes and seconds by stage."""

    def __init__(self, life: Life) -> None:
        self.only = life.only
        self.peaks: dict[str, tuple[int, float]] = {}

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
    model, stages, data, trainer = _module(life), Stages(life), _data(life), make_trainer(SHARED)
    stages("fit", lambda: trainer.fit(model, data))
    stages("save", lambda: trainer.save_checkpoint(folder / "full.ckpt"))
    stages("validate", lambda: trainer.validate(model, data, verbose=False))
    stages("full_state_dict", lambda: trainer.strategy.full_state_dict())
    stages("unshard", lambda: trainer.strategy.unshard())
    return stages.peaks


def fit_again(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Fit the same module twice; returns the peak of the second."""
    model, stages, data = _module(life), Stages(life), _data(life)
    make_trainer(SHARED).fit(model, data)
    stages("second fit", lambda: make_trainer(SHARED).fit(model, data))
    return stages.peaks


def save_asynchronously(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Fit and save meanwhile; returns the peak."""
    stages, path = Stages(life), str(folder / "async.ckpt")
    saves = AfterFirstStep(lambda trainer: trainer.save_checkpoint(path))
    trainer = make_trainer(SHARED | {"checkpoint": {"async_save": True}}, callbacks=[saves])
    stages(COPIES, lambda: trainer.fit(_module(life), _data(life)))
    return stages.peaks


def save_differences(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Fit and save by difference; returns the peak."""
    stages = Stages(life)
    series = {"every": 2, "full_every": 100, "dirpath": str(folder / "series")}
    trainer = make_trainer(SHARED | {"checkpoint": {"incremental": series}})
    stages("fit with incremental saves", lambda: trainer.fit(_module(life), _data(life)))
    return stages.peaks


def resume(life: Life, folder: Path) -> dict[str, Any]:
    """Collective. Resume on these ranks; returns the peaks of this one."""
    model, stages, trainer = _module(life), Stages(life), make_trainer(SHARED, max_epochs=2)
    stages("resume", lambda: trainer.fit(model, _data(life), ckpt_path=str(folder / "full.ckpt")))
    return stages.peaks


def use(life: Life, folder: Path) -> dict[str, Any]:
    """Do in one process what needs no ranks; returns its peaks."""
    stages, batch, full = Stages(life), next(iter(_data(life))), folder / "full.ckpt"

    def write_served() -> None:
        with tables_on_meta():
            model = _module(life)
            model.configure_model()
        state = read_contents(full, False).checkpoint["state_dict"]
        export_for_serving(model, batch, folder / "served", state=state)

    stages("export", lambda: export(full, folder / "exported.ckpt"))
    stages("export for serving", write_served)
    stages("serve", lambda: Server(folder / "served").answer({"input": batch}))
    stages("load_from_checkpoint", lambda: Users.load_from_checkpoint(full))
    return stages.peaks


PHASES: dict[Any, tuple[str, ...]] = {
    train: ("fit", "save", "validate", "full_state_dict", "unshard"),
    fit_again: ("second fit",),
    save_asynchronously: (COPIES,),
    save_differences: ("fit with incremental saves",),
    resume: ("resume",),
    use: ("export", "export for serving", "serve", "load_from_checkpoint"),
}
"""What ranks that start anew do, and the stages of it."""


def measure(life: Life, folder: Path) -> list[Stage]:
    """Return all stages."""
    stages = []
    for function, names in PHASES.items():
        if life.only and not set(life.only) & set(names):
            continue
        num_ranks = {resume: life.resume_ranks, use: 1}.get(function, life.ranks)
        per_rank = run_on_ranks(function, num_ranks, life, folder, timeout_seconds=3600)
        for name in per_rank[0]:
            share = 0 if function is use else life.num_bytes // num_ranks
            needed = share
            if name in WHOLE:
                needed += life.row_bytes
            if name == COPIES:
                needed += share
            peaks = [measured[name][0] for measured in per_rank]
            stages.append(Stage(name, num_ranks, needed, peaks, per_rank[0][name][1]))
    return stages


def _module(life: Life) -> Users:
    return Users(life.num_rows)


def _data(life: Life) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(rank_and_num_ranks()[0])
    ids = [torch.randint(life.num_rows, (BATCH, IDS), generator=draw) for _ in range(STEPS)]
    return DataLoader(ids, batch_size=None)  # type: ignore[arg-type]


def main() -> int:
    """Measure, print, and write the results; returns the exit status."""
    report = start(
        "life_memory",
        __doc__,
        gib={"type": float, "default": 10.0},
        only={"nargs": "*", "default": (), "help": "stages"},
        folder={"help": "for checkpoints; a temporary one"},
    )
    options = report.options
    life = Life(gib=0.1 if options.quick else options.gib, only=tuple(options.only))
    with tempfile.TemporaryDirectory(dir=options.folder) as directory:
        stages = measure(life, Path(directory))
    for stage in stages:
        if stage.exceeds:
            report.note(f"{stage.name}: more than 512 MiB above what is needed")
    report.sections.append(f"{life.num_rows:,} rows x {DIM}, Adagrad: {life.gib:g} GiB.")
    report.sections.append(table(HEADER, [stage.cells() for stage in stages]))
    return report.finish()


if __name__ == "__main__":
    # By its full name, so that what ranks return is not a class of `__main__`.
    from tests.benchmarks import life_memory

    sys.exit(life_memory.main())
