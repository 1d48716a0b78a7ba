"""Times of loading on other ranks with another cut, against bare torch.distributed.checkpoint; memory of an export."""

import io
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed.checkpoint as dcp

from lightning_distrec.checkpoint.lazy_tensors import read_blocks
from tests.benchmarks.checkpointing_model import SavedDLRM, endless_loader, fill, must_hold, sharded_tensors, tables_in
from tests.benchmarks.checkpointing_saves import Job
from tests.benchmarks.checkpointing_turns import Peak, all_gather, slowest
from tests.benchmarks.performance_rounds import silence
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

CUTS = {1: "table_wise", 3: "row_wise"}
"""Number of ranks -> how the tables are cut there."""
NOT_SAVED = -1
"""A seed."""


@dataclass
class Loads:
    """Seconds of each round, the slowest rank's."""

    package_times: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    peak: int = 0
    """By how much the largest rank grew while it loaded, beside the tables that were there already."""


def loads(job: Job, seed: int) -> Loads:
    """Collective. Resume on this rank, one of those that `run_on_ranks` runs, and load again round after round.

    seed: of what both folders hold.
    """
    silence()
    rank, num_ranks = rank_and_num_ranks()
    turns = _LoadsInTurns(job, seed)
    strategy = {"sharding_types": [CUTS[num_ranks]]}
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = endless_loader(job.num_rows, rank)
        make_trainer(strategy, callbacks=[turns]).fit(SavedDLRM(job.num_rows), loader, ckpt_path=job.ours)
    return turns.loads


class _LoadsInTurns(pl.Callback):
    """Sees that the fit was resumed, then calls what Lightning called for it, and torch's own, in turns."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.seed = job, seed
        self.loads = Loads()

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        tensors = sharded_tensors(trainer)
        must_hold(tensors, self.seed, "the resumed fit")
        for number in range(1 + self.job.rounds):
            for name in ("ours", "bare") if number % 2 else ("bare", "ours"):
                fill(tensors, NOT_SAVED)
                peak = Peak()
                seconds = slowest(lambda name=name: self._load(name, trainer, tensors))  # type: ignore[misc]
                grown = max(all_gather(peak.bytes()))
                must_hold(tensors, self.seed, f"what was loaded, {name},")
                if name == "ours":
                    self.loads.peak = max(self.loads.peak, grown)
                if number:
                    getattr(self.loads, name).append(seconds)
        trainer.should_stop = True

    def _load(self, name: str, trainer: pl.Trainer, tensors: dict[str, Any]) -> None:
        if name == "ours":
            load_as_lightning_does(trainer, self.job.ours)
        else:
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(self.job.bare))


def load_as_lightning_does(trainer: pl.Trainer, path: Path) -> None:
    """Collective. Call the strategy's three methods that `trainer.fit(ckpt_path=path)` loads by."""
    checkpoint = trainer.strategy.load_checkpoint(path)
    trainer.strategy.load_model_state_dict(checkpoint, strict=True)
    trainer.strategy.load_optimizer_state_dict(checkpoint)


def export_peaks(job: Job) -> dict[str, int]:
    """Export our checkpoint in this process, the one of those that `run_on_ranks` runs; returns bytes by suffix."""
    from lightning_distrec.checkpoint.tools.export_checkpoint import export

    actual = {}
    for suffix in (".ckpt", ".safetensors"):
        target = job.folder / f"exported{suffix}"
        peak = Peak()
        export(job.ours, target)
        actual[suffix] = peak.bytes()
        if suffix == ".ckpt":
            _must_be_exported(job, target)
        target.unlink()
    return actual


def _must_be_exported(job: Job, path: Path) -> None:
    """Raise AssertionError where one table of the export is not that of our folder."""
    exported = torch.load(path, weights_only=True, mmap=True)["state_dict"]
    name, whole = next((n, w) for n, w in tables_in(job.ours).items() if n.startswith("state_dict/"))
    rows = exported[name.removeprefix("state_dict/")]
    row = 0
    for piece in read_blocks(whole):
        assert torch.equal(piece, rows[row : row + len(piece)]), f"{path}: '{name}' is not what was saved"
        row += len(piece)
