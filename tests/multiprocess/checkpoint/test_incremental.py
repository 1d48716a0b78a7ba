"""Checkpoints by difference hold what a full one of the same step holds, bit by bit, whoever has
written the rows."""

import itertools
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.checkpoint.contents import read_full, verify
from lightning_distrec.checkpoint.difference import Mark
from lightning_distrec.cli.main import main
from lightning_distrec.errors import CheckpointError
from lightning_distrec.serving.describe import describe
from lightning_distrec.serving.export_checkpoint import merge
from lightning_distrec.strategies.checkpoints import resuming
from lightning_distrec.strategies.checkpoints.incremental_saves import no_longer_needed
from lightning_distrec.strategies.run import strategy as run_strategy
from tests.support import incremental_runs as runs
from tests.support.incremental_runs import assert_same_as_full, fit, resume, series_in
from tests.support.plain_checkpoints import load
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks

SGD = (torch.optim.SGD, {"lr": 0.5})
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.05})
ROWWISE = (RowWiseAdagrad, {"lr": 0.05})
ADAM = (torch.optim.Adam, {"lr": 0.01})
SPARSE_ADAM = {
    "table_optimizer": {"class_path": "torch.optim.SparseAdam", "init_args": {"lr": 0.01}}
}
TABLES = ("wide", "narrow", "shared")
ALL = {f"ebc.{name}" for name in TABLES}
SPARSE = {"embedding_update": "sparse"}
DENSE_TABLE = {
    "tables": {
        "narrow": {"optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}}
    }
}


def _cut(sharding_type: str, **extra: Any) -> dict[str, Any]:
    return {
        "tables": {
            name: {"sharding_types": [sharding_type], "min_partition": 4} for name in TABLES
        },
        **extra,
    }


QUICK = {
    "by columns": (SGD, _cut("column_wise")),
    "by rows": (ROWWISE, _cut("row_wise")),
    "sparse": (ADAGRAD, SPARSE, runs.KeepsGradients),
    "twice": (ADAGRAD, {}, runs.Twice),
    "written": (ADAGRAD, {}, runs.WritesInStep),
}


def _series(
    folder: Path, cases: dict[str, tuple[Any, ...]], steps: int = 6
) -> dict[str, list[set[str]]]:
    """Train the cases and compare all that they save; return the tables that each difference has by
    rows."""
    run_each_on_ranks(
        {name: (fit, str(folder / name), steps, *case) for name, case in cases.items()}, 2
    )
    actual = {name: assert_same_as_full(folder / name) for name in cases}
    return {
        name: [set(m.changed) for m in series.values() if m.is_difference]
        for name, series in actual.items()
    }


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[set[str]]]]:
    """Folders of the quick cases, and the tables that each of their differences has by rows."""
    folder = tmp_path_factory.mktemp("incremental")
    row_tables = _series(folder, QUICK, steps=4)
    return folder, row_tables


def test_a_difference_over_its_base_is_the_full_checkpoint_bit_by_bit(
    quick: tuple[Path, dict[str, list[set[str]]]],
) -> None:
    _, row_tables = quick
    assert all(row_tables[name] == [ALL] for name in ("by columns", "by rows", "sparse", "twice"))
    assert row_tables["written"] == [ALL - {"ebc.narrow"}]


def test_a_difference_says_what_it_needs_and_is_no_checkpoint_without_it(
    quick: tuple[Path, dict[str, list[set[str]]]], tmp_path: Path
) -> None:
    shutil.copytree(quick[0] / "sparse" / "series", tmp_path / "series")
    base, difference = (
        tmp_path / "series" / "step=2-full.ckpt",
        tmp_path / "series" / "step=4-difference.ckpt",
    )
    described = describe(difference)
    assert described.base == base.name
    assert described.changed_rows.keys() == ALL
    assert max(described.changed_rows.values()) <= 60
    assert verify(difference) == []
    _change_byte(difference)
    with pytest.raises(
        CheckpointError,
        match=r"step=4-difference.ckpt is damaged: rank_.\.safetensors does not match its",
    ):
        read_full(difference, with_optimizers=False)
    _change_byte(difference)  # back
    _change_byte(base)
    assert [name.partition(" of ")[2] for name in verify(difference)] == [
        "its base step=2-full.ckpt"
    ]
    with pytest.raises(
        CheckpointError,
        match=r"safetensors of its base step=2-full.ckpt does not match its checksum",
    ):
        read_full(difference, with_optimizers=False)
    shutil.copytree(quick[0] / "by rows" / "series" / base.name, base, dirs_exist_ok=True)
    with pytest.raises(
        CheckpointError,
        match=r"step=4-difference.ckpt is a difference, and .*step=2-full.ckpt is not",
    ):
        load(difference, 0, 2)
    shutil.rmtree(base)
    with pytest.raises(
        CheckpointError, match=r"is a difference, and its base .*step=2-full.ckpt cannot be read"
    ):
        load(difference, 0, 2)


def test_a_difference_and_its_base_merge_into_a_full_checkpoint(
    quick: tuple[Path, dict[str, list[set[str]]]], tmp_path: Path
) -> None:
    for name in quick[1]:
        difference = quick[0] / name / "series" / "step=4-difference.ckpt"
        merged = tmp_path / name / "merged.ckpt"
        assert main(["checkpoint", "merge", str(difference), str(merged)]) == 0
        actual, expected = (
            runs.tensors_in(merged),
            runs.tensors_in(quick[0] / name / "full" / "step=4.ckpt"),
        )
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[place], expected[place]) for place in expected)
        assert verify(merged) == []
        first, other = load(merged, 0, 2), load(difference, 0, 2)
        assert describe(merged).base is None
        assert first.rank_state is not None
        assert first.checkpoint.keys() == other.checkpoint.keys()
        assert first.checkpoint["global_step"] == other.checkpoint["global_step"]
    with pytest.raises(CheckpointError, match="is no difference"):
        merge(merged, tmp_path / "again.ckpt")


def _change_byte(checkpoint: Path) -> None:
    """Change a byte of some tensor's values."""
    files = sorted(checkpoint.glob("*.safetensors"))
    file = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-50] ^= 1
    file.write_bytes(content)


def test_a_base_stays_as_long_as_a_difference_needs_it() -> None:
    def of(step: int, base: int = 0) -> tuple[int, Path, Mark]:
        name = f"step={base}-full.ckpt" if base else ""
        kind = "difference" if base else "full"
        mark = Mark(id=str(step), series="a", base_name=name, base_id=str(base), changed={})
        return step, Path(f"step={step}-{kind}.ckpt"), mark

    actual = [of(1), of(2, base=1), of(3, base=1), of(4)]
    for keep, base, removed in (
        (3, "", []),
        (2, "step=4-full.ckpt", ["step=2-difference.ckpt"]),
        (
            1,
            "step=4-full.ckpt",
            ["step=3-difference.ckpt", "step=2-difference.ckpt", "step=1-full.ckpt"],
        ),
        (
            0,
            "step=4-full.ckpt",
            ["step=3-difference.ckpt", "step=2-difference.ckpt", "step=1-full.ckpt"],
        ),
    ):
        assert [path.name for path in no_longer_needed(actual, keep, base)] == removed


WRITERS = {
    f"{model.__name__}, {update}": (ADAGRAD, {"embedding_update": update}, model)
    for model in (runs.WritesInPlace, runs.Draws, runs.Loads, runs.ResetsState, runs.Unfreezes)
    for update in ("auto", "sparse")
} | {
    "normalize": (ADAGRAD, {}, runs.LargeTables, (runs.normalize,)),
    "normalize, sparse": (ADAGRAD, SPARSE, runs.LargeTables, (runs.normalize,)),
    "average": (ADAGRAD, {}, runs.LargeTables, (runs.average,)),
    "average, sparse": (ADAGRAD, SPARSE, runs.LargeTables, (runs.average,)),
    "dense table": (ADAGRAD, DENSE_TABLE),
    "all dense": (ADAM,),
    "Adam unfreezes": (ADAM, {}, runs.Unfreezes),
    "own optimizer": (SGD, SPARSE_ADAM),
    "in background": (ADAGRAD, {}, runs.LargeTables, (), None, {"async_save": True}),
}


@pytest.mark.slow
def test_whatever_writes_rows_is_in_the_difference(tmp_path: Path) -> None:
    row_tables = _series(tmp_path, WRITERS)
    assert row_tables["dense table"] == [ALL - {"ebc.narrow"}] * 2
    assert row_tables["all dense"] == []  # each is a full one


SHARDING_TYPES = {
    "table_wise": ADAGRAD,
    "row_wise": ROWWISE,
    "column_wise": SGD,
    "table_row_wise": ROWWISE,
    "table_column_wise": ADAGRAD,
    "data_parallel": ADAGRAD,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARDING_TYPES)
def test_a_difference_resumes_on_other_ranks_as_the_full_checkpoint_does(
    tmp_path: Path, kind: str
) -> None:
    optimizer, strategy = SHARDING_TYPES[kind], _cut(kind)
    del strategy["tables"]["shared"]
    run_on_warm_ranks(fit, 2, str(tmp_path), 6, optimizer, strategy)
    assert_same_as_full(tmp_path)
    for num_ranks, later in ((3, {}), (1, {}), (2, strategy)):
        calls = {
            path: (resume, str(tmp_path / path), optimizer, later)
            for path in ("series/step=6-difference.ckpt", "full/step=6.ckpt")
        }
        actual, expected = run_each_on_ranks(calls, num_ranks)[0].values()
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_only_what_is_needed_stays(tmp_path: Path) -> None:
    series = {"every": 1, "full_every": 4, "keep": 2}
    case = (8, ADAGRAD, {}, runs.LargeTables, (), series, {"async_save": True})
    run_on_warm_ranks(fit, 2, str(tmp_path), *case)
    names = ["step=4-full.ckpt", "step=7-difference.ckpt", "step=8-full.ckpt"]
    assert list(series_in(tmp_path)) == names
    assert [verify(tmp_path / "series" / name) for name in names] == [[], [], []]


def _start(folder: str, model: type, dies: bool) -> list[str]:
    """Start a job, for the first time or again, and return what it says of where it begins."""
    run_strategy.FIT_NUMBERS = itertools.count(1)
    messages: list[str] = []
    resuming.rank_zero_info = resuming.rank_zero_warn = messages.append  # type: ignore[assignment]
    strategy = {"stopping": {"run_name": "clicks"}}
    callbacks = (runs.Dies,) if dies else ()
    with suppress(ZeroDivisionError):
        state = fit(folder, 9, ADAGRAD, strategy, model, callbacks, {"dirpath": None, "keep": 3})
        torch.save(state, f"{folder}/final-{rank_and_num_ranks()[0]}.pt")
    return messages


@pytest.mark.slow
def test_a_restarted_job_goes_on_from_its_difference_or_the_one_before(tmp_path: Path) -> None:
    model = runs.Twice
    whole = run_on_warm_ranks(fit, 2, str(tmp_path / "whole"), 9, ADAGRAD, {}, model)[0]
    folder = tmp_path / "job"
    run_on_warm_ranks(_start, 2, str(folder), model, True)
    for path in [*folder.glob("full/*"), *folder.glob("full")]:
        path.unlink() if path.is_file() else path.rmdir()
    (series,) = folder.glob("incremental_checkpoints/*")
    assert sorted(path.name for path in series.iterdir()) == [
        "step=2-full.ckpt",
        "step=4-difference.ckpt",
        "step=6-difference.ckpt",
    ]
    _change_byte(series / "step=6-difference.ckpt")
    message = run_on_warm_ranks(_start, 2, str(folder), model, False)[0]
    assert any("skipped" in line and "step=6-difference.ckpt" in line for line in message)
    assert any(
        "training resumes from" in line and "step=4-difference.ckpt, step 4" in line
        for line in message
    )
    marker = json.loads(next(series.glob("step=8-difference.ckpt/complete.json")).read_text())
    assert marker["incremental"]["series"] == series.name
    actual = torch.load(folder / "final-0.pt")
    assert actual.keys() == whole.keys()
    assert all(torch.equal(value, whole[key]) for key, value in actual.items())
