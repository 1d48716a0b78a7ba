"""`lightning-distrec bench` runs a recipe as it is, and a strategy that refuses a module is a row
that says why."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.console import finished
from tests.support.environments import environment

ROOT = Path(__file__).resolve().parents[2]


CONSOLE = (str(Path(sys.executable).parent / "lightning-distrec"),)


def bench(
    folder: Path, *arguments: str, program: Sequence[str] = CONSOLE
) -> tuple[list[dict[str, Any]], str]:
    """Return the results, and what was printed."""
    done = finished(
        [
            *(*program, "bench", *arguments),
            *("--steps", "2", "--warmup", "1", "--rounds", "1", "--out", str(folder / "out")),
        ],
        ROOT,
        env=environment(OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out" / "results.json").read_text()), done.stdout


@pytest.mark.slow
def test_the_recipe_is_measured_on_one_and_on_two_ranks(tmp_path: Path) -> None:
    recipe = "recipes/next_character/cpu.yaml"
    actual, text = bench(
        tmp_path, "--config", recipe, "--strategies", "ddp_tuned", "--devices", "1,2"
    )
    assert [(row["strategy"], row["devices"], row["failure"]) for row in actual] == [
        ("ddp_tuned", 1, None),
        ("ddp_tuned", 2, None),
    ]
    for row in actual:
        # 16 windows a rank; rates are told by the same median.
        assert row["samples_per_second"] * row["step_ms"] / 1000 == pytest.approx(
            16 * row["devices"]
        )
        assert row["peak_bytes"] > 10**8
    assert actual[0]["efficiency"] == 1.0
    assert "Medians over 2 steps and 1 round" in text
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")
