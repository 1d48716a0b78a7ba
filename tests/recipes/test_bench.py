"""`lightning-distrec bench` runs a recipe as it is, and a strategy that refuses a module is a row
that says why."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.environments import environment
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]


CONSOLE = (str(Path(sys.executable).parent / "lightning-distrec"),)
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node=2",
    "-m",
    "lightning_distrec",
)


def bench(
    folder: Path, *arguments: str, program: Sequence[str] = CONSOLE
) -> tuple[list[dict[str, Any]], str]:
    """Return the results, and what was printed."""
    done = subprocess.run(
        [
            *(*program, "bench", *arguments),
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
    arguments = (
        "--config",
        str(tmp_path / "job.yaml"),
        "--strategies",
        "fsdp_tuned,ddp_tuned",
        "--devices",
        "1",
    )
    actual, text = bench(tmp_path, *arguments)
    assert actual[0]["failure"].startswith(
        "'users' has sparse gradients, which FSDP2 does not reduce."
    )
    assert actual[1]["failure"] is None
    assert "fsdp_tuned on 1: 'users' has sparse gradients" in text


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_SECONDS)
def test_random_ids_measure_the_tables_of_a_module_without_data_under_a_launcher_too(
    tmp_path: Path,
) -> None:
    model = {"class_path": "tests.support.advised_models.WithBags"}
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump({"model": model, "trainer": {"accelerator": "cpu"}})
    )
    strategy = {
        "class_path": "lightning_distrec.TorchRecShardedStrategy",
        "init_args": {"prefetch": {"depth": 1}},
    }
    (tmp_path / "no_prefetch.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    cases = f"torchrec_sharded,{tmp_path / 'no_prefetch.yaml'},ddp"
    arguments = (
        "--config",
        str(tmp_path / "job.yaml"),
        "--synthetic",
        "64",
        "--synthetic-ids",
        "3",
    )
    actual, text = bench(tmp_path, *arguments, "--strategies", cases, program=TORCHRUN)
    assert [(row["strategy"], row["devices"], row["failure"]) for row in actual] == [
        ("torchrec_sharded", 2, None),
        ("no_prefetch", 2, None),
        ("ddp", 2, None),
    ]
    for row in actual:
        assert row["samples_per_second"] * row["step_ms"] / 1000 == pytest.approx(2 * 64)
    assert text.count("Medians over 2 steps") == 1, "one rank prints"
    actual, text = bench(tmp_path, *arguments, "--strategies", "ddp_tuned", "--devices", "1")
    assert actual[0]["samples_per_second"] > 0
