"""Runs a function on several real gloo ranks of this machine, each a process of its own."""

import faulthandler
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.limits import LIMIT_SECONDS
from tests.support.ports import free_port

PRELOAD = ["lightning.pytorch", "torchmetrics", "torchrec.distributed.planner", "lightning_distrec.strategies.torchrec"]


FAREWELL_SECONDS = 60
"""How long the others may take to end once a rank has failed."""


class RankFailed(AssertionError):
    """A rank raised, died or took too long; the message holds its traceback."""


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = LIMIT_SECONDS
) -> list[Any]:
    """Return what `function(*args)` returns on each of `num_ranks` ranks, in rank order.

    function: importable by name (a module's top level). The ranks see the environment that Lightning's launcher would
    give them, so that a `Trainer(devices=num_ranks)` inside joins the others instead of starting processes.
    Raises RankFailed: a rank raised (its traceback is shown), died (the end of its stderr is), or was not done after
    `timeout_seconds` (its stack is); no rank outlives the call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [
            context.Process(target=_run, args=(function, args, rank, num_ranks, port, folder))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            late = _wait(processes, folder, timeout_seconds)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for rank in range(num_ranks):
                sys.stderr.write(_read(folder, rank, "stderr"))
        return _results(processes, folder, late, timeout_seconds)


def run_each_on_ranks(
    calls: dict[str, tuple[Any, ...]], num_ranks: int, timeout_seconds: float = LIMIT_SECONDS
) -> list[dict[str, Any]]:
    """Return what each call returns on each rank, made one after the other by the same ranks, which costs one start.

    calls: of each, the function and its arguments. Otherwise as `run_on_ranks`.
    """
    return run_on_ranks(_call_each, num_ranks, calls, timeout_seconds=timeout_seconds)


def rank_and_num_ranks() -> tuple[int, int]:
    """Return this rank's number and the number of ranks, inside of a function that `run_on_ranks` runs."""
    return int(os.environ["RANK"]), int(os.environ["TEST_NUM_RANKS"])


def _call_each(calls: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: function(*args) for name, (function, *args) in calls.items()}


def _wait(processes: list[Any], folder: str, timeout_seconds: float) -> list[int]:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if all(not p.is_alive() for p in processes):
            return []
        if any(p.exitcode not in (None, 0) for p in processes):
            # Give the others a moment to fail by themselves: what they say is part of what is tested.
            deadline = min(deadline, time.monotonic() + FAREWELL_SECONDS)
        time.sleep(0.02)
    late = [rank for rank, p in enumerate(processes) if p.is_alive()]
    for rank in late:
        os.kill(processes[rank].pid, 10)  # SIGUSR1: faulthandler writes the stack
    time.sleep(0.5)
    return late


def _results(processes: list[Any], folder: str, late: list[int], timeout_seconds: float) -> list[Any]:
    results, problems = [], []
    for rank, process in enumerate(processes):
        out, stack = Path(folder) / f"{rank}.pt", _read(folder, rank, "stack")
        if error := _read(folder, rank, "error"):
            problems.append(f"--- rank {rank} raised:\n{error}")
        elif rank in late:
            problems.append(f"--- rank {rank} was not done after {timeout_seconds} s:\n{stack}")
        elif process.exitcode != 0 or not out.exists():
            last = _read(folder, rank, "stderr")[-2000:]
            problems.append(f"--- rank {rank} ended with exit code {process.exitcode}:\n{stack}{last}")
        else:
            results.append(torch.load(out, weights_only=False))
    if problems:
        raise RankFailed("\n".join(problems))
    return results


def _read(folder: str, rank: int, kind: str) -> str:
    path = Path(folder) / f"{rank}.{kind}"
    return path.read_text(errors="replace") if path.exists() else ""


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, num_ranks: int, port: int, folder: str
) -> None:
    with open(f"{folder}/{rank}.stderr", "w") as stderr:
        os.dup2(stderr.fileno(), 2)
    # What was imported before the fork is not looked through for garbage by each rank: that would copy its memory.
    gc.freeze()
    stack = open(f"{folder}/{rank}.stack", "w")  # noqa: SIM115  open until the process ends
    faulthandler.enable(stack)
    faulthandler.register(10, stack)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        # Lightning deletes WORLD_SIZE after each run.
        TEST_NUM_RANKS=str(num_ranks),
    )
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.set_num_threads(1)
    # Workers of dataloaders start as in a user's script; as children of a fork server each would import torch anew.
    multiprocessing.set_start_method("fork", force=True)
    try:
        result = function(*args)
    except BaseException as error:
        Path(f"{folder}/{rank}.error").write_text("".join(traceback.format_exception(error)))
        # A failed rank must go at once: its peers notice by the closed connections.
        sys.stdout.flush()
        os._exit(1)
    torch.save(result, f"{folder}/{rank}.pt")
    _leave_group()


def _leave_group() -> None:
    from lightning_distrec.cluster.process_exit import _leave

    _leave()
