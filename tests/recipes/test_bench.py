"""`lightning-distrec bench` runs a recipe as it is, and a strategy that refuses a module is a row that says why."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.environments import environment
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def bench(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Return the results, and what was printed."""
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "lightning-distrec"), "bench", *arguments),
            *("--steps", "2", "--warmup", "1", "--rounds", "1", "--out", str(folder / "out")),
        ],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out" / "results.json").read_text()), done.stdout


@pytest.mark.slow
def test_the_recipe_is_measured_on_one_and_on_two_ranks(tmp_path: Path) -> None:
    recipe = "recipes/next_character/cpu.yaml"
    actual, text = bench(tmp_path, "--config", recipe, "--strategies", "ddp_tuned", "--devices", "1,2")
    assert [(row["strategy"], row["devices"], row["failure"]) for row in actual] == [
        ("ddp_tuned", 1, None),
        ("ddp_tuned", 2, None),
    ]
    for row in actual:
        # 16 windows a rank; rates are told by the same median.
        assert row["samples_per_second"] * row["step_ms"] / 1000 == pytest.approx(16 * row["devices"])
        assert row["peak_bytes"] > 10**8
    assert actual[0]["efficiency"] == 1.0
    assert "Medians over 2 steps and 1 round" in text
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_strategy_that_refuses_the_module_is_a_row_that_gives_the_reason(tmp_path: Path) -> None:
    model = {
        "class_path": "tests.support.advised_models.WithTable",
        "init_args": {"optimizer": "SGD", "sparse": True},
    }
    config = {
        "model": model,
        "data": {"class_path": "tests.support.advised_models.Ids"},
        "trainer": {"accelerator": "cpu"},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    arguments = ("--config", str(tmp_path / "job.yaml"), "--strategies", "fsdp_tuned,ddp_tuned", "--devices", "1")
    actual, text = bench(tmp_path, *arguments)
    assert actual[0]["failure"].startswith("'users' has sparse gradients, which FSDP2 does not reduce.")
    assert actual[1]["failure"] is None
    assert "fsdp_tuned on 1: 'users' has sparse gradients" in text
