"""A whole script, started as a user would: the same numbers with only `strategy=` changed, and a
clean end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.console import finished
from tests.support.environments import environment
from tests.support.launches import ended, start
from tests.support.limits import LIMIT_SECONDS
from tests.support.ports import free_port

TRAINS = """
import json, os
import lightning.pytorch as pl
from torch.utils.data import DataLoader
from tests.support.launched_script import Clicks, Numbered

class Raises(Clicks):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and os.environ.get("RAISE_ON_RANK") == str(self.global_rank):
            raise ValueError("the user's code failed")
        self.ranks = os.environ.get("LOCAL_WORLD_SIZE")
        return super().training_step(batch, batch_idx)

pl.seed_everything(1)
model, trainer = Raises(), pl.Trainer(
    strategy=os.environ["STRATEGY"], accelerator="cpu", devices=2, max_epochs=2, logger=False,
    enable_checkpointing=False)
trainer.fit(model, DataLoader(Numbered(), batch_size=2, shuffle=True))
if trainer.is_global_zero:
    print(json.dumps({"losses": model.losses, "ranks": model.ranks}))
"""
ENDS = """
import os, sys
if os.environ.get("LOCAL_RANK") == "1":
    sys.exit()
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_distrec import TunedDDPStrategy
strategy = TunedDDPStrategy(start_seconds=float(os.environ["START_SECONDS"]))
pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False).fit(BoringModel())
"""


def _run(
    folder: Path, strategy: str = "torchrec_sharded", **environ: str
) -> subprocess.CompletedProcess[str]:
    (script := folder / "script.py").write_text(TRAINS)
    variables = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.getcwd(), "STRATEGY": strategy}
    return finished(
        [sys.executable, str(script)], env=environment(OMP_NUM_THREADS="1") | variables | environ
    )


@pytest.mark.slow
def test_a_script_trains_sharded_with_only_the_strategy_changed(tmp_path: Path) -> None:
    results = []
    for strategy in ("ddp", "torchrec_sharded"):
        done = _run(tmp_path, strategy)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "terminate called" not in done.stderr
        results.append(json.loads(done.stdout.strip().splitlines()[-1]))
    unsharded, sharded = results
    assert len(sharded["losses"]) == 12
    assert sharded["losses"] == pytest.approx(unsharded["losses"], abs=1e-5)
    assert (sharded["ranks"], unsharded["ranks"]) == ("2", None)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_exception_on_one_rank_ends_all_with_its_message_and_no_abort(
    rank: str, tmp_path: Path
) -> None:
    done = _run(tmp_path, RAISE_ON_RANK=rank)
    # Lightning's launcher looks every five seconds whether a child has ended, and kills the process
    # that it is in where that one is still on its way out.
    is_killed = done.returncode == -9 and "Forcefully terminating" in done.stderr
    assert done.returncode == 1 or is_killed
    assert "ValueError: the user's code failed" in done.stderr
    assert "terminate called" not in done.stderr
    assert "core dumped" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_ends_before_the_ranks_meet_is_named_within_seconds(tmp_path: Path) -> None:
    """Also with status 0, which launchers take for success; one that nobody sees, by the limit of
    the start."""
    (script := tmp_path / "script.py").write_text(ENDS)
    command = [sys.executable, str(script)]
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    ends = {
        "RendezvousError: rank 1 has ended with status 0 before all ranks had arrived. Its own "
        "output says why": {"START_SECONDS": "1000"},
        "1 of 2 ranks arrived at 127.0.0.1; waiting for rank 1: not within 3 s (start_seconds, or "
        "timeout_seconds)": {"START_SECONDS": "3"} | by_hand,
    }
    for expected, variables in ends.items():
        place = {"PYTHONPATH": os.getcwd(), "MASTER_PORT": str(free_port())}
        process = start(*command, **place, **variables)
        try:
            _, errors = process.communicate(timeout=LIMIT_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 1
        assert expected in errors, errors[-3000:]


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
