"""A whole script, started as a user would: the same numbers with only `strategy=` changed, and a clean end."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.environments import environment
from tests.support.limits import LIMIT_SECONDS

SCRIPT = "tests.support.dlrm_script"


def _run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo") | environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def _metrics(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    assert "terminate called" not in done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def unsharded() -> dict[str, Any]:
    """The metrics of the script under Lightning's own DDP, every rank with whole tables, without this package."""
    return _metrics(_run(SCRIPT, "--strategy", "ddp", "--devices", "2"))


@pytest.mark.slow
def test_an_ordinary_dlrm_with_adam_trains_sharded_with_only_the_strategy_changed(unsharded: dict[str, Any]) -> None:
    done = _run(SCRIPT, "--strategy", "torchrec_sharded", "--devices", "2")
    sharded = _metrics(done)
    assert sharded["loss_epoch"] == pytest.approx(unsharded["loss_epoch"], abs=1e-5)
    assert sharded["auroc"] == pytest.approx(unsharded["auroc"], abs=1e-4)
    assert unsharded["auroc"] > 0.9
    assert sharded["LOCAL_WORLD_SIZE"] == "2"
    assert unsharded["LOCAL_WORLD_SIZE"] is None
    assert "Adam moves rows that no id touched" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_exception_on_one_rank_ends_all_with_its_message_and_no_abort(rank: str) -> None:
    done = _run(SCRIPT, "--strategy", "torchrec_sharded", "--devices", "2", RAISE_ON_RANK=rank)
    # Lightning's launcher looks every five seconds whether a child has ended, and kills the process that it is in where
    # that one is still on its way out.
    assert done.returncode == 1 or (done.returncode == -9 and "Forcefully terminating" in done.stderr)
    assert "ValueError: the user's code failed" in done.stderr
    assert "terminate called" not in done.stderr
    assert "core dumped" not in done.stderr


@pytest.mark.slow
def test_a_local_rank_that_is_there_by_chance_is_named() -> None:
    leaked = {"LOCAL_RANK": "0", "PROCESS_GROUP_TIMEOUT_SECONDS": "3"}
    done = _run(SCRIPT, "--strategy", "torchrec_sharded", "--devices", "2", **leaked)
    assert done.returncode == 1
    assert "1 of 2 ranks arrived at 127.0.0.1; waiting for rank 1 (the environment has LOCAL_RANK=0" in done.stderr
    assert "unset LOCAL_RANK): not within timeout_seconds=3." in done.stderr
