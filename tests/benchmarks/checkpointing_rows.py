"""Rows of the section about checkpoints: what was seen, beside what was aimed at."""

from collections.abc import Sequence

from tests.benchmarks.checkpointing_model import tensor_bytes
from tests.benchmarks.checkpointing_runs import NUM_RANKS, Measured
from tests.benchmarks.checkpointing_turns import median, ratios
from tests.benchmarks.page import table
from tests.benchmarks.performance_rows import Row

MEBI = 2**20


def compared(label: str, above: Sequence[float], below: Sequence[float], aim: float | None = None) -> Row:
    """Return the median of the rounds' ratios, at most `aim`."""
    rounds = ratios(above, below)
    return Row(label, median(rounds) if rounds else None, aim, rounds=rounds)


def summary(measured: Measured) -> list[Row]:
    """Return the lines of the summary."""
    return [*_of_saves(measured), *_of_async(measured), *_of_loads(measured), *_of_exports(measured)]


def _of_saves(measured: Measured) -> list[Row]:
    if (actual := measured.saves) is None:
        return []
    package_times, bare, plain = (actual.seconds[name] for name in ("ours", "bare", "dd"))
    rate = compared("save: bytes a second / dd's", plain, package_times)
    return [
        compared("save / bare `dcp.save`", package_times, bare, 1.1),
        Row(rate.what, rate.value, 0.8, at_least=True, rounds=rate.rounds),
        Row("save: MiB by which a rank grows", actual.peak / MEBI, 256.0),
        Row("bytes of the folder / bytes of its tensors", actual.folder / actual.tensors),
    ]


def _of_async(measured: Measured) -> list[Row]:
    if (actual := measured.async_saves) is None:
        return []
    return [
        compared("async save: stall / one copy of the shards in fresh memory", actual.stall, actual.clone, 1.2),
        compared("async save: stall / one copy in memory that is there already", actual.stall, actual.copy),
        compared("async save: a step meanwhile / a step otherwise", actual.writing_step, actual.quiet_step),
        compared("async save: until it is complete / stall", actual.whole, actual.stall),
        Row("async save: growth of a rank / its shards", actual.peak / actual.shards, 1.1),
    ]


def _of_loads(measured: Measured) -> list[Row]:
    rows = []
    for num_ranks, actual in measured.loads.items():
        label = f"load on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        rows.append(compared(f"{label} / bare `dcp.load`", actual.package_times, actual.bare, 1.5))
        rows.append(Row(f"{label}: MiB by which a rank grows, beside the tables", actual.peak / MEBI))
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
        timed[f"load on {num_ranks}"] = (per_rank_results.package_times, count)
        timed[f"bare `dcp.load` on {num_ranks}"] = (per_rank_results.bare, count)
    rows = [
        [name, f"{median(s):.2f}", f"{min(s):.2f} to {max(s):.2f}", f"{count / median(s) / 1e6:.0f}"]
        for name, (s, count) in timed.items()
        if s
    ]
    return table(["", "seconds", "in single rounds", "MB/s"], rows)
