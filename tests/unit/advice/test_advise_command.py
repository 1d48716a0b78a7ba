"""`lightning-distrec advise`: what it prints, its errors, and that nothing is trained."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.advised_models import Ids
from tests.support.command import Run, run_command, write_config

IDS = "tests.support.advised_models.Ids"


class NoData(Ids):
    """A data module whose files are not there."""

    def setup(self, stage: str) -> None:
        raise FileNotFoundError("films.csv")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function of a model, a data module and arguments that runs the command; exit code,
    stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run_advise(model: str, data: str, *args: str, **trainer: Any) -> tuple[int, str, str]:
        usual = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_tuned"}
        write_config(f"tests.support.advised_models.{model}", data, usual | trainer)
        return run_command(capsys, "advise", "--config", "job.yaml", *args)

    return run_advise


def test_it_prints_what_each_strategy_needs_and_why_one_is_chosen(run: Run, tmp_path: Path) -> None:
    code, text, _ = run("WithBags", IDS, "--device-memory", "2GB")
    assert code == 0
    assert text.splitlines()[0].strip() == (
        "2 ranks on 1 node, 1.9 GiB each, precision 32-true: memory per rank"
    )
    rows = [line.split() for line in text.splitlines() if "tuned" in line and "│" in line]
    assert [row[1] for row in rows] == ["ddp_tuned", "fsdp_tuned"]
    assert (
        "strategy: torchrec_sharded, because 2 tables, including bags.many of 120,000 rows" in text
    )
    assert "activations are left out" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"], "something was written"


def test_without_a_batch_activations_are_left_out_with_a_note(run: Run) -> None:
    assert "no batch was read (--no-batch)" in " ".join(run("Wide", IDS, "--no-batch")[1].split())
    assert (
        "the first batch could not be read (FileNotFoundError: films.csv)"
        in run("Wide", "tests.unit.advice.test_advise_command.NoData", "--json")[1]
    )
    assert "the module is on the meta device" in run("Wide", IDS, "--meta", "--json")[1]


@pytest.mark.parametrize(
    ("args", "trainer", "message"),
    [
        (("--devices", "0"), {}, "--devices 0: must be at least 1."),
        (("--device-memory", "80QB"), {}, "--device-memory '80QB': A size above 0 is needed"),
        (
            (),
            {"accelerator": "gpu", "devices": -1},
            "there is no GPU on this machine to count. Set --devices 8.",
        ),
    ],
)
def test_what_cannot_be_is_reported_in_one_line(
    run: Run, args: tuple[str, ...], trainer: dict[str, Any], message: str
) -> None:
    code, out, error = run("Wide", IDS, *args, **trainer)
    assert (code, out) == (2, "")
    assert error.startswith("lightning-distrec: ")
    assert error.count("\n") == 1
    assert message in error
