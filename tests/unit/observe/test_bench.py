"""`lightning-distrec bench`: how runs are started, what comes of their numbers, and what is
refused."""

import time
from pathlib import Path
from typing import Any

import pytest

from lightning_distrec.cli import job_commands as command
from lightning_distrec.cli import main as cli
from lightning_distrec.observe.bench import results
from lightning_distrec.observe.bench.results import (
    BenchOptions,
    Case,
    MeasuredRun,
    Result,
    as_json,
    efficiency,
    run_rounds,
    summarize,
)

OPTIONS = BenchOptions(configs=("a.yaml", "b.yaml"), steps=30, warmup_steps=5, timeout_seconds=60.0)
ONE, TWO, FAILS = Case("ddp_tuned", 1), Case("ddp_tuned", 2), Case("fsdp_tuned", 2)


def of(case: Case, ms: float, samples: float | None = 100.0) -> MeasuredRun:
    return MeasuredRun(
        step_seconds=ms / 1000, samples_per_second=samples, peak_bytes=int(2**20 * ms)
    )


def made() -> list[Result]:
    return [
        Result(ONE, [of(ONE, 10, 1000), of(ONE, 30, 900), of(ONE, 12, 950)]),
        Result(TWO, [of(TWO, 14, 1500), of(TWO, 15, 1425), of(TWO, 13, 1400)]),
        Result(FAILS, [MeasuredRun(failure="'users' has sparse gradients")]),
    ]


def test_cases_take_turns_and_one_that_fails_is_not_run_again() -> None:
    order: list[Case] = []

    numbers: list[int] = []

    def once(case: Case, options: BenchOptions, number: int) -> MeasuredRun:
        order.append(case)
        numbers.append(number)
        return MeasuredRun(failure="no") if case is FAILS else of(case, 1)

    logged: list[str] = []
    results = run_rounds([ONE, FAILS, TWO], OPTIONS, 2, logged.append, once)
    assert order == [ONE, FAILS, TWO, ONE, TWO]
    assert numbers == [0, 1, 2, 3, 5], (
        "ranks of a launcher count alike, whatever has failed on one of them"
    )
    assert [result.failure for result in results] == ["", "no", ""]
    assert "  not measured: no" in logged


def test_numbers_are_medians_over_rounds_and_efficiency_is_per_device() -> None:
    first, two, refused = results = made()
    assert (first.step_seconds, first.samples_per_second, first.peak_bytes) == (
        0.012,
        950,
        30 * 2**20,
    )
    assert efficiency(first, results) == 1.0
    assert efficiency(two, results) == pytest.approx(1425 / 2 / 950)
    assert efficiency(refused, results) is None
    assert efficiency(first, [first, refused]) is None, "there is nothing to compare with"
    pipeline = Result(Case("pipeline_parallel", 2), [of(TWO, 10, 1900)])
    assert efficiency(pipeline, [*results, pipeline]) == 1.0, (
        "which one device cannot be, against the first on one"
    )
    actual = as_json(results)
    assert actual[0]["step_ms_by_round"] == [10, 30, 12]
    assert actual[2] == {
        "strategy": "fsdp_tuned",
        "devices": 2,
        "failure": "'users' has sparse gradients",
    }


def measured(*, seconds: list[float], samples: list[Any], peak_bytes: int = 1) -> dict[str, Any]:
    return {"seconds": seconds, "samples": samples, "peak_bytes": peak_bytes, "problem": ""}


def test_a_step_is_as_long_as_on_its_slowest_rank() -> None:
    ranks = [
        measured(seconds=[0.1, 0.2, 0.3], samples=[8, 8, 8], peak_bytes=5),
        measured(seconds=[0.2, 0.1, 0.4], samples=[8, 8, 4], peak_bytes=7),
    ]
    actual = summarize(ranks, 2, 3)
    assert (actual.step_seconds, actual.peak_bytes) == (0.2, 7)
    assert actual.samples_per_second == pytest.approx(44 / 3 / 0.2)
    assert summarize(ranks, 3, 3).failure == "2 of 3 ranks wrote measurements"
    ended = summarize([measured(seconds=[], samples=[])], 1, 3).failure
    assert ended == "the data ended before 3 steps were measured"
    unknown = summarize([measured(seconds=[1.0], samples=[None])], 1, 3)
    assert unknown.samples_per_second is None


def test_a_run_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "hangs"
    script.write_text("#!/bin/sh\nsleep 1000\n")
    script.chmod(0o700)
    monkeypatch.setattr(results.sys, "executable", str(script))
    began = time.monotonic()
    hurried = BenchOptions(configs=(), steps=1, warmup_steps=0, timeout_seconds=0.5)
    assert results.run(ONE, hurried).failure == "the run did not end within 0.5 s"
    assert time.monotonic() - began < 100


REFUSED = {
    "bench: --config is missing. Give it the YAML file that fit would get.": "",
    "--config none.yaml: there is no such file.": "--config none.yaml",
    "--timeout 0: must be above 0 seconds.": "--config a.yaml --timeout 0",
    "--devices '1,x': give numbers above 0, separated by": "--config a.yaml --devices 1,x",
    "unknown strategy 'ddp_tuend'; did you": "--config a.yaml --strategies ddp_tuend",
    "--strategies b.yaml: there is no file b.yaml.": "--config a.yaml --strategies b.yaml",
    "--strategies ',': name at least one strategy.": "--config a.yaml --strategies ,",
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_reported_before_anything_runs(
    message: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("")
    monkeypatch.setattr(command, "run_rounds", None)
    assert cli.main(["bench", *REFUSED[message].split()]) == 2
    assert message in capsys.readouterr().err
