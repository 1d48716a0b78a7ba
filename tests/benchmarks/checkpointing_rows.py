"""Rows of the section about checkpoints: what was seen, beside what was aimed at."""

from collections.abc import Sequence

from tests.benchmarks.checkpointing_model import tensor_bytes
from tests.benchmarks.checkpointing_runs import NUM_RANKS, Measured
from tests.benchmarks.checkpointing_turns import median, ratios
from tests.benchmarks.page import table
from tests.benchmarks.performance_rows import Row

MEBI = 2**20


def compared(what: str, above: Sequence[float], below: Sequence[float], aim: float | None = None) -> Row:
    """Return the median of the rounds' ratios, at most `aim`."""
    rounds = ratios(above, below)
    return Row(what, median(rounds) if rounds else None, aim, rounds=rounds)


def summary(measured: Measured) -> list[Row]:
    """Return the lines of the summary."""
    return [*_of_saves(measured), *_of_async(measured), *_of_loads(measured), *_of_exports(measured)]


def _of_saves(measured: Measured) -> list[Row]:
    if (found := measured.saves) is None:
        return []
    ours, bare, plain = (found.seconds[name] for name in ("ours", "bare", "dd"))
    rate = compared("save: bytes a second / dd's", plain, ours)
    return [
        compared("save / bare `dcp.save`", ours, bare, 1.1),
        Row(rate.what, rate.value, 0.8, at_least=True, rounds=rate.rounds),
        Row("save: MiB by which a rank grows", found.peak / MEBI, 256.0),
        Row("bytes of the folder / bytes of its tensors", found.folder / found.tensors),
    ]


def _of_async(measured: Measured) -> list[Row]:
    if (found := measured.async_saves) is None:
        return []
    return [
        compared("async save: stall / one copy of the shards in fresh memory", found.stall, found.clone, 1.2),
        compared("async save: stall / one copy in memory that is there already", found.stall, found.copy),
        compared("async save: a step meanwhile / a step otherwise", found.writing_step, found.quiet_step),
        compared("async save: until it is complete / stall", found.whole, found.stall),
        Row("async save: growth of a rank / its shards", found.peak / found.shards, 1.1),
    ]


def _of_loads(measured: Measured) -> list[Row]:
    rows = []
    for num_ranks, found in measured.loads.items():
        on = f"load on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        rows.append(compared(f"{on} / bare `dcp.load`", found.ours, found.bare, 1.5))
        rows.append(Row(f"{on}: MiB by which a rank grows, beside the tables", found.peak / MEBI))
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
    if (found := measured.saves) is not None:
        names = {"ours": "save", "bare": "bare `dcp.save`", "dd": f"{NUM_RANKS} `dd` at once"}
        timed |= {title: (found.seconds[name], count) for name, title in names.items()}
    if (behind := measured.async_saves) is not None:
        timed["async save: stall"] = (behind.stall, count)
        timed["one copy in fresh memory"] = (behind.clone, count)
        timed["one copy in memory that is there"] = (behind.copy, count)
        timed["async save: until it is complete"] = (behind.whole, count)
    for num_ranks, of_ranks in measured.loads.items():
        timed[f"load on {num_ranks}"] = (of_ranks.ours, count)
        timed[f"bare `dcp.load` on {num_ranks}"] = (of_ranks.bare, count)
    rows = [
        [name, f"{median(s):.2f}", f"{min(s):.2f} to {max(s):.2f}", f"{count / median(s) / 1e6:.0f}"]
        for name, (s, count) in timed.items()
        if s
    ]
    return table(["", "seconds", "in single rounds", "MB/s"], rows)
