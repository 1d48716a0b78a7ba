"""`lightning-distrec advise`: what it prints, its errors, and that nothing is trained."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_distrec.cli import main as cli
from tests.support.advised_models import Ids
from tests.support.environments import environment
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., tuple[int, str, str]]
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

    def run_command(model: str, data: str, *args: str, **trainer: Any) -> tuple[int, str, str]:
        config = {
            "model": {"class_path": f"tests.support.advised_models.{model}"},
            "data": {"class_path": data},
            "trainer": {"accelerator": "cpu", "devices": 2, "strategy": "ddp_tuned"} | trainer,
        }
        Path("job.yaml").write_text(yaml.safe_dump(config))
        capsys.readouterr()
        try:
            code = cli.main(["advise", "--config", "job.yaml", *args])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return (code, *capsys.readouterr())

    return run_command


def test_it_prints_what_each_strategy_needs_and_why_one_is_chosen(run: Run, tmp_path: Path) -> None:
    code, text, _ = run("WithBags", IDS, "--device-memory", "2GB")
    assert code == 0
    assert text.splitlines()[0].strip() == (
        "2 ranks on 1 node, 1.9 GiB each, precision 32-true: memory per rank"
    )
    assert [line.split()[1] for line in text.splitlines() if "tuned" in line and "│" in line] == [
        "ddp_tuned",
        "fsdp_tuned",
    ]
    assert (
        "strategy: torchrec_sharded, because 2 tables, including bags.many of 120,000 rows" in text
    )
    assert "activations are left out" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"], "something was written"


def test_json_is_for_scripts(run: Run) -> None:
    code, text, _ = run(
        "Wide", IDS, "--devices", "8", "--nodes", "2", "--device-memory", "10MiB", "--json"
    )
    advice = json.loads(text)
    assert code == 0
    assert (advice["num_ranks"], advice["num_nodes"], advice["memory_bytes_per_rank"]) == (
        16,
        2,
        10 * 2**20,
    )
    assert advice["strategy"] == "fsdp_tuned"
    assert advice["strategies"][0]["memory_bytes"]["activations"] > 0


def test_the_settings_of_the_yaml_count(run: Run) -> None:
    plain, clipped = (
        json.loads(run("WithBags", IDS, "--json", **settings)[1])["strategies"][2]["memory_bytes"][
            "gradients"
        ]
        for settings in ({"max_epochs": 1}, {"accumulate_grad_batches": 4})
    )
    assert clipped == plain, "Adagrad has a sparse form"
    half = json.loads(run("Wide", IDS, "--json", precision="bf16-true")[1])
    assert half["precision"] == "bf16-true"


def test_options_of_the_strategy_of_the_yaml_count(run: Run) -> None:
    def estimate_of(strategy: str, kind: str = "", **options: Any) -> dict[str, Any]:
        trainer = (
            {"strategy": {"class_path": f"lightning_distrec.{kind}", "init_args": options}}
            if kind
            else {}
        )
        advice = json.loads(run("Chained", IDS, "--json", **trainer)[1])
        assert (f"options of {kind} are those of the YAML" in advice["assumed"]) == bool(kind)
        return next(entry for entry in advice["strategies"] if entry["strategy"] == strategy)

    plain = estimate_of("ddp_tuned")
    link = json.loads(run("Chained", IDS, "--json", "--bandwidth", "intra_node=10MB/s")[1])
    assert link["bytes_per_second"] == 10**7
    compressed = link["compressed_bytes_per_step"]
    assert compressed["comm_dtype: bf16"] * 2 == plain["sent_bytes_per_step"]["dense gradients"]
    half = estimate_of("ddp_tuned", "TunedDDPStrategy", comm_dtype="bf16")
    assert (
        half["sent_bytes_per_step"]["dense gradients"] * 2
        == plain["sent_bytes_per_step"]["dense gradients"]
    )
    squeezed = estimate_of("ddp_tuned", "TunedDDPStrategy", powersgd={"matrix_rank": 4})
    assert (
        compressed["powersgd: {matrix_rank: 4}"]
        == squeezed["sent_bytes_per_step"]["dense gradients"]
    )
    assert (
        squeezed["sent_bytes_per_step"]["dense gradients"] * 20
        < plain["sent_bytes_per_step"]["dense gradients"]
    )
    text = run("Chained", IDS, "--bandwidth", "intra_node=10MB/s")[1]
    milliseconds = f"{1000 * compressed['comm_dtype: bf16'] / 10**7:,.3g} ms with comm_dtype: bf16"
    assert f"Gradients over intra_node, while backward computes: {milliseconds}" in " ".join(
        text.split()
    )
    code, _, error = run("Chained", IDS, "--bandwidth", "cross_node=1GB/s")
    assert (code, "--bandwidth cross_node: of 1 node, advise takes intra_node." in error) == (
        2,
        True,
    )
    recomputed = estimate_of("ddp_tuned", "TunedDDPStrategy", activation_checkpointing=["blocks"])
    assert recomputed["memory_bytes"]["activations"] < plain["memory_bytes"]["activations"]
    assert recomputed["memory_bytes"]["recomputed"] > 0
    sharded = estimate_of("fsdp_tuned", "TunedFSDPStrategy", param_dtype="bf16", wrap=["blocks"])
    assert (
        sharded["memory_bytes"]["gathered"] < estimate_of("fsdp_tuned")["memory_bytes"]["gathered"]
    )
    refused = estimate_of("fsdp_tuned", "TunedFSDPStrategy", param_dtype="fp16")
    assert "gradients of 16 bits need loss scaling" in refused["refused"]
    staged = estimate_of(
        "pipeline_parallel", "PipelineParallelStrategy", split=["blocks.1"], microbatches=2
    )
    assert (
        staged["memory_bytes"]["parameters"]
        > estimate_of("pipeline_parallel")["memory_bytes"]["parameters"]
    )
    assert 0 < staged["idle_share"] < 1
    many = estimate_of("pipeline_parallel", "PipelineParallelStrategy", stages=4)
    assert "2 ranks cannot be pipelines of 4 ranks each" in many["refused"]
    unknown = estimate_of("pipeline_parallel", "PipelineParallelStrategy", chain="block")
    assert "did you mean 'blocks'" in unknown["refused"]


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
        (("--nodes", "-1"), {}, "--nodes -1: must be at least 1."),
        (("--device-memory", "80QB"), {}, "--device-memory '80QB': A size above 0 is needed"),
        (
            (),
            {"accelerator": "gpu", "devices": -1},
            "there is no GPU on this machine to count. Set --devices 8.",
        ),
        (
            (),
            {"accelerator": "gpu", "devices": 4},
            "this machine has no GPU to read the memory from. Set --device-mem",
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


def test_a_config_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise"]) == 2
    assert (
        "advise: --config is missing. Give it the YAML file that fit would get."
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_the_recipe_gets_advice_from_the_console() -> None:
    done = subprocess.run(
        [os.path.join(os.path.dirname(sys.executable), "lightning-distrec"), "advise", "--config"]
        + [
            "recipes/next_character/cpu.yaml",
            "--config",
            "recipes/strategies/torchrec_sharded.yaml",
        ],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "strategy: ddp_tuned, because the replicated module needs " in done.stdout
