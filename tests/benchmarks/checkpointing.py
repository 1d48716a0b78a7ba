"""Times saving, saving behind training, loading and exporting against bare torch and dd.

    python -m tests.benchmarks.checkpointing [--rows N] [--rounds N] [--folder FOLDER] [--quick]
    [--write]

All of it takes about five minutes on two cores and a disk that do nothing else, and 10 GB of that
disk. 2 ranks save, 1 and 3 load. What is saved and loaded is compared bitwise in every round. A
save counts until it is complete on disk; `dd` runs with `conv=fsync`. Growth is VmHWM.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import torch

from lightning_distrec.checkpoint.lazy_tensors import read_blocks
from lightning_distrec.serving.export_checkpoint import export
from tests.benchmarks.checkpointing_model import QUICK_ROWS, ROWS, tables_in, tensor_bytes
from tests.benchmarks.checkpointing_saves import (
    BARE,
    CLONE,
    CUTS,
    OURS,
    PLAIN,
    QUIET,
    STALL,
    WHOLE,
    WRITING,
    Job,
    Measured,
    Peak,
    async_saves,
    loads,
    saves,
)
from tests.benchmarks.report import Row, format_spread, ratio_row, start, table
from tests.benchmarks.turns import join_ranks
from tests.support.ranks import run_on_ranks

NUM_RANKS = 2
MIB = 2**20
MAX_GROWTH = 256 * MIB
RATIOS = (
    (OURS, BARE, 1.1),
    (STALL, CLONE, 1.2),
    (WRITING, QUIET, None),
    (WHOLE, STALL, None),
    ("load on 1", "bare `dcp.load` on 1", 1.5),
    ("load on 3", "bare `dcp.load` on 3", 1.5),
)
"""What is compared, and the aim: at most."""
SUFFIXES = (".ckpt", ".safetensors")


def export_peaks(job: Job) -> Measured:
    """Export our checkpoint in this process, and compare one table with it."""
    join_ranks()
    measured = Measured()
    for suffix in SUFFIXES:
        peak = Peak()
        export(job.ours, job.folder / f"exported{suffix}")
        measured.note_peak(f"export to {suffix}", peak)
    exported = torch.load(job.folder / "exported.ckpt", mmap=True, weights_only=True)
    tensors = tables_in(job.ours)
    name = next(name for name in tensors if name.startswith("state_dict/"))
    rows, first = exported["state_dict"][name.removeprefix("state_dict/")], 0
    for block in read_blocks(tensors[name]):
        is_same = torch.equal(block, rows[first : first + len(block)])
        assert is_same, f"'{name}' is not what was saved"
        first += len(block)
    return measured


def growth_rows(num_bytes: dict[str, int]) -> list[Row]:
    """Return by how much processes grew, and the size of a folder."""
    rows = []
    for name in (OURS, *(f"export to {suffix}" for suffix in SUFFIXES)):
        if name in num_bytes:
            rows.append(Row(f"{name}: MiB of growth", num_bytes[name] / MIB, MAX_GROWTH / MIB))
    for num_ranks in CUTS:
        name = f"load on {num_ranks}"
        if name in num_bytes:
            rows.append(Row(f"{name}: MiB of growth beside the tables", num_bytes[name] / MIB))
    if STALL in num_bytes:
        growth = num_bytes[STALL] / num_bytes["shards"]
        rows.append(Row("async save: growth of a rank / its shards", growth, 1.1))
    if "folder" in num_bytes:
        size = num_bytes["folder"] / num_bytes["tensors"]
        rows.append(Row("bytes of the folder / bytes of its tensors", size))
    return rows


def summary(measured: Measured) -> list[Row]:
    """Return ratios and growth."""
    rows, seconds = [], measured.seconds
    for above, below, aim in RATIOS:
        rows.append(ratio_row(f"{above} / {below}", seconds[above], seconds[below], aim))
    rate = ratio_row(f"{OURS}: bytes a second / dd's", seconds[PLAIN], seconds[OURS])
    rows.append(Row(rate.name, rate.value, 0.8, at_least=True, rounds=rate.rounds))
    return rows + growth_rows(measured.num_bytes)


def seconds_table(measured: Measured, num_bytes: int) -> str:
    """Return medians in seconds, and the bytes a second of all ranks together."""
    rows = []
    for name, seconds in measured.seconds.items():
        if seconds:
            median = statistics.median(seconds)
            rate = f"{num_bytes / median / 1e6:.0f}"
            cells = [f"{median:.2f}", format_spread(seconds)]
            rows.append([name, *cells, "" if name in (QUIET, WRITING) else rate])
    return table(["", "seconds", "in single rounds", "MB/s"], rows)


def main() -> int:
    """Measure, print, and write the results; returns the exit status."""
    report = start(
        "checkpointing",
        __doc__,
        rows={"type": int, "default": ROWS, "help": "of each table"},
        rounds={"type": int, "default": 4, "help": "turns of each contender"},
        folder={"help": "where temporary folders go; its file system is measured"},
    )
    options = report.options
    num_rows, rounds = options.rows, options.rounds
    if options.quick:
        num_rows, rounds = QUICK_ROWS, 1
    limit = 300.0 + rounds * 120.0  # of a machine that does other things, too
    parts = [("save", saves, NUM_RANKS), ("async save", async_saves, NUM_RANKS)]
    parts += [(f"load on {num_ranks}", loads, num_ranks) for num_ranks in CUTS]
    parts.append(("export", export_peaks, 1))
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="checkpointing-", dir=options.folder) as folder:
        for name, function, num_ranks in parts:
            # The asynchronous save has a folder of its own, for the others read what `save` wrote.
            path = Path(folder, "async" if function is async_saves else "")
            path.mkdir(exist_ok=True)
            call = (run_on_ranks, function, num_ranks, Job(path, num_rows, rounds))
            per_rank = report.attempt(name, *call, timeout_seconds=limit)
            if per_rank is not None:
                measured.seconds |= per_rank[0].seconds
                measured.num_bytes |= per_rank[0].num_bytes
    report.rows += summary(measured)
    report.sections.append(seconds_table(measured, tensor_bytes(num_rows)))
    return report.finish()


if __name__ == "__main__":
    # By its full name, so that what ranks return is not a class of `__main__`.
    from tests.benchmarks import checkpointing

    sys.exit(checkpointing.main())
