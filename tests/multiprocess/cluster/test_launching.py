"""A whole script, started as a user would: the same numbers with only `strategy=` changed, and a
clean end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import environment
from tests.support.launches import ended, start
from tests.support.limits import LIMIT_SECONDS
from tests.support.ports import free_port

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
    """The metrics of the script under Lightning's own DDP, every rank with whole tables, without
    this package."""
    return _metrics(_run(SCRIPT, "--strategy", "ddp", "--devices", "2"))


@pytest.mark.slow
def test_an_ordinary_dlrm_with_adam_trains_sharded_with_only_the_strategy_changed(
    unsharded: dict[str, Any],
) -> None:
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
    # Lightning's launcher looks every five seconds whether a child has ended, and kills the process
    # that it is in where that one is still on its way out.
    assert done.returncode == 1 or (
        done.returncode == -9 and "Forcefully terminating" in done.stderr
    )
    assert "ValueError: the user's code failed" in done.stderr
    assert "terminate called" not in done.stderr
    assert "core dumped" not in done.stderr


@pytest.mark.slow
def test_a_local_rank_that_is_there_by_chance_is_named() -> None:
    leaked = {"LOCAL_RANK": "0", "PROCESS_GROUP_TIMEOUT_SECONDS": "3"}
    done = _run(SCRIPT, "--strategy", "torchrec_sharded", "--devices", "2", **leaked)
    assert done.returncode == 1
    assert (
        "1 of 2 ranks arrived at 127.0.0.1; waiting for rank 1 (the environment has LOCAL_RANK=0"
        in done.stderr
    )
    assert "where no launcher has set it, unset it): not within 3 s" in done.stderr


@pytest.mark.slow
def test_a_rank_that_ends_before_the_ranks_meet_is_named_within_seconds(tmp_path: Path) -> None:
    """Also with status 0, which launchers take for success; one that nobody sees, by the limit of
    the start."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "if os.environ.get('LOCAL_RANK') == '1':\n"
        "    sys.exit()\n"
        "import lightning.pytorch as pl\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "from lightning_distrec import TunedDDPStrategy\n"
        "strategy = TunedDDPStrategy(start_seconds=float(os.environ['START_SECONDS']))\n"
        "pl.Trainer(accelerator='cpu', devices=2, strategy=strategy, "
        "logger=False).fit(BoringModel())\n"
    )
    command, folder = (
        [sys.executable, str(script)],
        {"PYTHONPATH": os.getcwd(), "MASTER_PORT": str(free_port())},
    )
    seen = start(*command, START_SECONDS="1000", **folder)
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    unseen = start(
        *command, START_SECONDS="3", **folder | by_hand | {"MASTER_PORT": str(free_port())}
    )
    for process, expected in (
        (
            seen,
            "RendezvousError: rank 1 has ended with status 0 before all ranks had arrived. Its "
            "own output says why",
        ),
        (
            unseen,
            "1 of 2 ranks arrived at 127.0.0.1; waiting for rank 1: not within 3 s",
        ),
    ):
        try:
            _, errors = process.communicate(timeout=LIMIT_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 1
        assert expected in errors, errors[-3000:]
    assert "not within 3 s (start_seconds, or timeout_seconds)" in errors


LEAVING = """
import os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from lightning_distrec.strategies.run.process_runs import PROCESS

rank = int(sys.argv[1])
dist.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[2]}", timedelta(seconds=60), 2, rank)
store, destroy, is_over = dist.distributed_c10d._get_default_store(), dist.destroy_process_group, threading.Event()

def ask():
    while not is_over.wait(0.05):
        store.check(["should dump"])

def destroy_slowly():
    time.sleep(rank)
    is_over.set()
    asks.join()
    destroy()

(asks := threading.Thread(target=ask)).start()
dist.destroy_process_group, dist.get_backend = destroy_slowly, lambda *_: "nccl"
time.sleep(0 if rank else 1)
PROCESS.leave()
os._exit(0)
"""


def test_ranks_leave_before_the_one_that_holds_the_store() -> None:
    """Over NCCL a thread of torch's asks the store every second, until the group is destroyed."""
    port = str(free_port())
    _, errors = ended(*(start(sys.executable, "-c", LEAVING, str(rank), port) for rank in range(2)))
    assert "c10d" not in errors, "torch prints a stack trace where the store has gone"
    assert "Traceback" not in errors
