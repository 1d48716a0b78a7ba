"""What the section about checkpoints measures, each part in processes of its own, and the rows of
its tables."""

import importlib.util
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed.checkpoint as dcp

from lightning_distrec.checkpoint.lazy_tensors import read_blocks
from tests.benchmarks.checkpointing_model import (
    SavedDLRM,
    endless_loader,
    fill,
    must_hold,
    sharded_tensors,
    tables_in,
    tensor_bytes,
)
from tests.benchmarks.checkpointing_turns import (
    AsyncSaves,
    Job,
    Peak,
    Saves,
    all_gather,
    async_saves,
    file_system,
    median,
    ratios,
    saves,
    slowest,
)
from tests.benchmarks.page import table
from tests.benchmarks.performance_rounds import silence
from tests.benchmarks.performance_rows import Row
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

CUTS = {1: "table_wise", 3: "row_wise"}
"""Number of ranks -> how the tables are cut there."""
NOT_SAVED = -1
"""A seed."""


@dataclass
class Loads:
    """Seconds of each round, the slowest rank's."""

    package: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    peak: int = 0
    """By how much the largest rank grew while it loaded, beside the tables that were there
    already."""


def loads(job: Job, seed: int) -> Loads:
    """Collective. Resume on this rank, one of those that `run_on_ranks` runs, and load again round
    after round.

    seed: of what both folders hold.
    """
    silence()
    rank, num_ranks = rank_and_num_ranks()
    turns = _LoadsInTurns(job, seed)
    strategy = {"sharding_types": [CUTS[num_ranks]]}
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = endless_loader(job.num_rows, rank)
        make_trainer(strategy, callbacks=[turns]).fit(
            SavedDLRM(job.num_rows), loader, ckpt_path=job.ours
        )
    return turns.loads


class _LoadsInTurns(pl.Callback):
    """Sees that the fit was resumed, then calls what Lightning called for it, and torch's own, in
    turns."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.seed = job, seed
        self.loads = Loads()

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        tensors = sharded_tensors(trainer)
        must_hold(tensors, self.seed, "the resumed fit")
        for number in range(1 + self.job.rounds):
            for name in ("package", "bare") if number % 2 else ("bare", "package"):
                fill(tensors, NOT_SAVED)
                peak = Peak()
                seconds = slowest(lambda name=name: self._load(name, trainer, tensors))  # type: ignore[misc]
                grown = max(all_gather(peak.bytes()))
                must_hold(tensors, self.seed, f"what was loaded, {name},")
                if name == "package":
                    self.loads.peak = max(self.loads.peak, grown)
                if number:
                    getattr(self.loads, name).append(seconds)
        trainer.should_stop = True

    def _load(self, name: str, trainer: pl.Trainer, tensors: dict[str, Any]) -> None:
        if name == "package":
            load_as_lightning_does(trainer, self.job.ours)
        else:
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(self.job.bare))


def load_as_lightning_does(trainer: pl.Trainer, path: Path) -> None:
    """Collective. Call the strategy's three methods that `trainer.fit(ckpt_path=path)` loads by."""
    checkpoint = trainer.strategy.load_checkpoint(path)
    trainer.strategy.load_model_state_dict(checkpoint, strict=True)
    trainer.strategy.load_optimizer_state_dict(checkpoint)


def export_peaks(job: Job) -> dict[str, int]:
    """Export our checkpoint in this process, the one of those that `run_on_ranks` runs; returns
    bytes by suffix."""
    from lightning_distrec.serving.export_checkpoint import export

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
    name, whole = next(
        (n, w) for n, w in tables_in(job.ours).items() if n.startswith("state_dict/")
    )
    rows = exported[name.removeprefix("state_dict/")]
    row = 0
    for piece in read_blocks(whole):
        assert torch.equal(piece, rows[row : row + len(piece)]), (
            f"{path}: '{name}' is not what was saved"
        )
        row += len(piece)


NUM_RANKS = 2
EXPORT = "lightning_distrec.serving.export_checkpoint"


@dataclass
class Measured:
    """What the parts found."""

    num_rows: int
    file_system: str = ""
    saves: Saves | None = None
    async_saves: AsyncSaves | None = None
    loads: dict[int, Loads] = field(default_factory=dict)
    """Number of ranks -> what was measured there."""
    exports: dict[str, int] = field(default_factory=dict)
    """Suffix -> bytes by which the process grew."""
    missing: dict[str, str] = field(default_factory=dict)
    """Part -> why it could not be measured here."""
    problems: list[str] = field(default_factory=list)
    """What should not have happened."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Go on where a part of the measurement fails."""
        try:
            yield
        except (AssertionError, RuntimeError) as error:
            self.problems.append(f"{name}: {error}")


def measure(num_rows: int, rounds: int, place: str | None, tell: Callable[[str], None]) -> Measured:
    """Return what a run finds.

    where: the folder for temporary folders; None for the system's. tell: called with what was found
    so far.
    """
    measured = Measured(num_rows)
    limit = 300.0 + rounds * 120.0  # of a machine that does other things, too
    with tempfile.TemporaryDirectory(prefix="checkpointing-", dir=place) as folder:
        job = Job(Path(folder), num_rows, rounds)
        measured.file_system = file_system(job.folder)
        with measured.part("async"):
            measured.async_saves = run_on_ranks(async_saves, NUM_RANKS, job, timeout_seconds=limit)[
                0
            ]
            tell(f"async: {measured.async_saves}")
        with measured.part("save"):
            measured.saves = run_on_ranks(saves, NUM_RANKS, job, timeout_seconds=limit)[0]
            tell(f"save: {measured.saves}")
        for num_ranks in CUTS if measured.saves is not None else ():
            with measured.part(f"load on {num_ranks}"):
                actual = run_on_ranks(
                    loads, num_ranks, job, measured.saves.seed, timeout_seconds=limit
                )
                measured.loads[num_ranks] = actual[0]
                tell(f"load on {num_ranks}: {actual[0]}")
        if importlib.util.find_spec(EXPORT) is None:
            measured.missing["export"] = "there is none yet"
        elif measured.saves is not None:
            with measured.part("export"):
                measured.exports = run_on_ranks(export_peaks, 1, job, timeout_seconds=limit)[0]
                tell(f"export: {measured.exports}")
    return measured


MEBI = 2**20


def compared(
    label: str, above: Sequence[float], below: Sequence[float], aim: float | None = None
) -> Row:
    """Return the median of the rounds' ratios, at most `aim`."""
    rounds = ratios(above, below)
    return Row(label, median(rounds) if rounds else None, aim, rounds=rounds)


def summary(measured: Measured) -> list[Row]:
    """Return the lines of the summary."""
    return [
        *_of_saves(measured),
        *_of_async(measured),
        *_of_loads(measured),
        *_of_exports(measured),
    ]


def _of_saves(measured: Measured) -> list[Row]:
    if (actual := measured.saves) is None:
        return []
    package, bare, plain = (actual.seconds[name] for name in ("ours", "bare", "dd"))
    rate = compared("save: bytes a second / dd's", plain, package)
    return [
        compared("save / bare `dcp.save`", package, bare, 1.1),
        Row(rate.name, rate.value, 0.8, at_least=True, rounds=rate.rounds),
        Row("save: MiB by which a rank grows", actual.peak / MEBI, 256.0),
        Row("bytes of the folder / bytes of its tensors", actual.folder / actual.tensors),
    ]


def _of_async(measured: Measured) -> list[Row]:
    if (actual := measured.async_saves) is None:
        return []
    return [
        compared(
            "async save: stall / one copy of the shards in fresh memory",
            actual.stall,
            actual.clone,
            1.2,
        ),
        compared(
            "async save: stall / one copy in memory that is there already",
            actual.stall,
            actual.copy,
        ),
        compared(
            "async save: a step meanwhile / a step otherwise",
            actual.writing_step,
            actual.quiet_step,
        ),
        compared("async save: until it is complete / stall", actual.whole, actual.stall),
        Row("async save: growth of a rank / its shards", actual.peak / actual.shards, 1.1),
    ]


def _of_loads(measured: Measured) -> list[Row]:
    rows = []
    for num_ranks, actual in measured.loads.items():
        label = f"load on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        rows.append(compared(f"{label} / bare `dcp.load`", actual.package, actual.bare, 1.5))
        rows.append(
            Row(f"{label}: MiB by which a rank grows, beside the tables", actual.peak / MEBI)
        )
    return rows


def _of_exports(measured: Measured) -> list[Row]:
    return [
        Row(f"export to {suffix}: MiB by which the process grows", peak / MEBI, 256.0)
        for suffix, peak in measured.exports.items()
    ]


def seconds_table(measured: Measured) -> str:
    """Return the medians in seconds, and the bytes a second of all ranks together."""
    count = tensor_bytes(measured.num_rows)
    timed: dict[str, tuple[Sequence[float], int]] = {}
    if (actual := measured.saves) is not None:
        names = {"ours": "save", "bare": "bare `dcp.save`", "dd": f"{NUM_RANKS} `dd` at once"}
        timed |= {title: (actual.seconds[name], count) for name, title in names.items()}
    if (behind := measured.async_saves) is not None:
        timed["async save: stall"] = (behind.stall, count)
        timed["one copy in fresh memory"] = (behind.clone, count)
        timed["one copy in memory that is there"] = (behind.copy, count)
        timed["async save: until it is complete"] = (behind.whole, count)
    for num_ranks, per_rank_results in measured.loads.items():
        timed[f"load on {num_ranks}"] = (per_rank_results.package, count)
        timed[f"bare `dcp.load` on {num_ranks}"] = (per_rank_results.bare, count)
    rows = [
        [
            name,
            f"{median(s):.2f}",
            f"{min(s):.2f} to {max(s):.2f}",
            f"{count / median(s) / 1e6:.0f}",
        ]
        for name, (s, count) in timed.items()
        if s
    ]
    return table(["", "seconds", "in single rounds", "MB/s"], rows)
