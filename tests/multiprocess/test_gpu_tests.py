"""The tests that need a GPU are right on this CPU: what they compare, and that their models
train."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.smoke import PARTS
from tests.support.host_cuda.runs import variables_or_skip
from tests.support.limits import LIMIT_SECONDS
from tests.support.ranks import CallsOnRanks, RankFailed

ROOT = Path(__file__).parents[2]
FILES = (
    "test_kernels_and_metrics.py",
    "test_pipelines.py",
    "test_prefetching.py",
    "test_shared_gpu.py",
    "test_sparse_updates.py",
)

PIPELINES = "test_losses_and_weights_are_those_of_one_process"
SHARED = "test_two_ranks_on_one_device_train_as_one_rank"
CHECKED = {
    "values that a pipeline logs on another device": (
        "what_is_logged_on_every_rank_is_on_the_modules",
        PIPELINES,
    ),
    "draws of a GPU's generator": ("a_draw_on_a_gpu_counts", "dropout_behind_the_chain_and_16_bit"),
    "means of 16-bit losses": ("means_of_rounded_losses", "dropout_behind_the_chain_and_16_bit"),
    "a mapping of ids on two devices": (
        "the_host_waits_once_in_a_lookup_that_gives_ids_rows",
        SHARED,
    ),
    "metrics that must be deterministic": (
        "running_sums_of_floats_leave",
        "metrics_are_those_of_a_cpu",
    ),
    "tensors that feed ids and are rewritten": (
        "no_stream_uses_memory_of_another",
        "for_inputs_and_batches_of_all",
    ),
    "groups that split NCCL's communicator": ("only_its_members_make_a_group", PIPELINES),
    "a GPU without kernels": (
        "an_fbgemm_without_kernels_for_the_gpu",
        "a_kernel_that_is_called_with_kept_arguments",
    ),
    "batches of a pipeline that differ": (
        "what_cannot_be_exact_is_refused_on_every_rank",
        PIPELINES,
    ),
    "waits for numbers of ids": (
        "the_host_waits_once_in_a_lookup",
        "the_host_waits_for_one_number",
    ),
    "waits for what a pipeline logs": (
        "the_last_stage_of_a_pipeline_reads_once",
        "what_a_pipeline_logs_comes_to",
    ),
}
"""What went wrong on a GPU, by reading -> the names, or parts of them, of a test on CPUs and of one
in tests/gpu."""


def test_what_a_gpu_may_break_has_a_test_on_cpus_and_one_for_gpus() -> None:
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    on_gpu = "".join(text for path, text in tests.items() if path.parent.name == "gpu")
    on_cpu = "".join(text for path, text in tests.items() if path.parent.name != "gpu")
    for hazard, (cpu_test, gpu_test) in CHECKED.items():
        assert re.search(f"^def test_.*{cpu_test.removeprefix('test_')}", on_cpu, re.MULTILINE), (
            hazard
        )
        assert re.search(f"^def test_.*{gpu_test.removeprefix('test_')}", on_gpu, re.MULTILINE), (
            hazard
        )


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_file_of_gpu_tests_passes_on_the_cpu(file: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"tests/gpu/{file}",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
    ]
    environment = os.environ | {"GPU_TESTS_ON": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


ONLY_FOR_TESTS = (
    "hypothesis",
    "iopath",
    "moto",
    "pandas",
    "pytest_instafail",
    "pytest_timeout",
    "xdist",
)


def _hide(folder: Path, *packages: str) -> None:
    for name in packages:
        (folder / f"{name}.py").write_text("raise ImportError")


@pytest.mark.slow
def test_they_need_no_plugins_of_pytest(tmp_path: Path) -> None:
    """As `python -m tests.gpu` runs them, which a machine without a network can."""
    _hide(tmp_path, *ONLY_FOR_TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-q",
        "-o",
        "addopts=",
        "--collect-only",
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def _fails() -> None:
    raise ValueError("one case")


def test_a_case_that_fails_leaves_the_others_alone() -> None:
    results = CallsOnRanks({"bad": (_fails,), "good": (int, "7")}, 1)
    for _ in range(2):
        with pytest.raises(RankFailed, match="one case"):
            results["bad"]
    assert results["good"] == [7]


@pytest.mark.slow
def test_what_a_gpu_is_checked_with_first_passes_on_a_device_in_host_memory(tmp_path: Path) -> None:
    _hide(tmp_path, "pytest", *ONLY_FOR_TESTS)
    variables = variables_or_skip(devices=1)
    variables["PYTHONPATH"] += os.pathsep + str(tmp_path)
    command = [
        sys.executable,
        "-m",
        "tests.gpu.smoke",
        "--small",
        "--json",
        str(tmp_path / "smoke.json"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    actual = json.loads((tmp_path / "smoke.json").read_text())["parts"]
    assert actual.keys() == PARTS.keys()
    # One line a part, and one about all.
    assert len(done.stdout.splitlines()) == len(PARTS) + 1
    waits_of_ours, waits_of_torchrecs = actual["waits"]["differences"][
        "in a step, against TorchRec's"
    ]
    assert 0 < waits_of_ours <= waits_of_torchrecs
