"""Signals to real processes of a job: SIGTERM to its ranks in any order, and Ctrl-C in its
terminal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.environments import environment
from tests.support.interrupted_script import READY
from tests.support.launches import ONE_THREAD
from tests.support.limits import LIMIT_SECONDS
from tests.support.ports import free_port
from tests.support.processes import processes_with

pytestmark = pytest.mark.slow

NUM_RANKS = 3
SCRIPT = [sys.executable, "-m", "tests.support.interrupted_script"]
ORDERS = {
    "the first": [(0, 0.0)],
    "all at once": [(0, 0.0), (1, 0.0), (2, 0.0)],
    "down, apart": [(2, 0.0), (1, 0.3), (0, 0.3)],
}
"""Rank, and seconds after the one before."""
TERM_SECONDS = 6
CTRL_C_SECONDS = 5


@contextmanager
def _training(
    out: Path, *commands: list[str], **environ: str
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Yield processes whose ranks train."""
    variables = environment(
        GLOO_SOCKET_IFNAME="lo", SIGNALS_FOLDER=str(out), **ONE_THREAD, **environ
    )
    with open(out / "printed", "wb") as file:
        started = [
            subprocess.Popen(
                command, env=variables | {"RANK": str(rank)} if len(commands) > 1 else variables,
                stdout=file, stderr=file, start_new_session=True,
            )
            for rank, command in enumerate(commands)
        ]  # fmt: skip
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while (out / "printed").read_text().count(READY) < NUM_RANKS:
                assert time.monotonic() < deadline
                assert all(process.poll() is None for process in started), (
                    out / "printed"
                ).read_text()[-3000:]
                time.sleep(0.02)
            yield started
        finally:
            for pid in processes_with(f"SIGNALS_FOLDER={out}"):
                os.kill(pid, signal.SIGKILL)
            for process in started:
                process.wait()


@pytest.mark.parametrize("order", ORDERS)
def test_sigterm_in_any_order_ends_all_ranks_with_143_within_seconds(
    tmp_path: Path, order: str
) -> None:
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(NUM_RANKS),
    }
    with _training(tmp_path, *[[*SCRIPT, "torchrec_sharded"]] * NUM_RANKS, **environ) as ranks:
        began = time.monotonic()
        for rank, seconds in ORDERS[order]:
            time.sleep(seconds)
            if ranks[rank].poll() is None:
                ranks[rank].terminate()
        codes = [rank.wait(LIMIT_SECONDS) for rank in ranks]
        elapsed = time.monotonic() - began
    print(f"{order}: {elapsed:.1f} s")
    # -15: a second signal has met a rank that was done, and was leaving. A shell gives 143 for it,
    # too.
    assert {128 - code if code < 0 else code for code in codes} == {143}, (
        tmp_path / "printed"
    ).read_text()[-3000:]
    assert elapsed < TERM_SECONDS


@pytest.mark.parametrize("strategy", ["torchrec_sharded", "ddp_tuned", "fsdp_tuned"])
def test_ctrl_c_ends_all_ranks_within_seconds_and_with_one_line(
    tmp_path: Path, strategy: str
) -> None:
    with _training(tmp_path, [*SCRIPT, strategy, str(NUM_RANKS)]) as (first,):
        length = len((tmp_path / "printed").read_text())
        began = time.monotonic()
        os.killpg(first.pid, signal.SIGINT)  # as a terminal does
        code = first.wait(LIMIT_SECONDS)
        while processes_with(f"SIGNALS_FOLDER={tmp_path}", "interrupted_script"):
            assert time.monotonic() - began < LIMIT_SECONDS
            time.sleep(0.02)
        seconds = time.monotonic() - began
    print(f"{strategy}: {seconds:.1f} s")
    assert code == 1
    output = [
        line for line in (tmp_path / "printed").read_text()[length:].splitlines() if line.strip()
    ]
    assert [line for line in output if READY not in line] == [
        "Detected KeyboardInterrupt, attempting graceful shutdown ..."
    ]
    assert seconds < CTRL_C_SECONDS
