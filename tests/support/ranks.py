"""Runs a function on several real gloo ranks of this machine, each a process of its own."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy
import torch
import torch.distributed as dist

from lightning_distrec.sharding.planning import search
from tests.support.limits import LIMIT_SECONDS
from tests.support.ports import free_port

PRELOAD = ["tests.support.preloaded"]
THREADS_HAVE_NAMES = torch.__version__ >= (2, 13)
"""Whether the threads that serve sockets of gloo can be told from others."""

FAREWELL_SECONDS = 60
"""How long the others may take to end once a rank has failed."""


class RankFailed(AssertionError):
    """A rank raised, died or took too long; the message holds its traceback."""


def words_of_ranks(failed: RankFailed) -> dict[int, str]:
    """Return rank -> what it said at its end."""
    parts = re.split(r"^--- rank (\d+) ", str(failed), flags=re.MULTILINE)[1:]
    return {int(rank): words for rank, words in zip(parts[::2], parts[1::2], strict=True)}


def join_group() -> tuple[int, int]:
    """Collective. Return this rank and the number of ranks, which have a group from here on."""
    rank, num_ranks = rank_and_num_ranks()
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    return rank, num_ranks


def num_socket_threads() -> int:
    """Return how many threads of this process serve sockets of gloo. On Linux, where
    `THREADS_HAVE_NAMES`."""
    return sum(
        path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm")
    )


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = LIMIT_SECONDS
) -> list[Any]:
    """Return what `function(*args)` returns on each of `num_ranks` ranks, in rank order.

    function: importable by name (a module's top level). The ranks see the environment that
    Lightning's launcher would give them, so that a `Trainer(devices=num_ranks)` inside joins the
    others instead of starting processes. Raises RankFailed: a rank raised (its traceback is shown),
    died (the end of its stderr is), or was not done after `timeout_seconds` (its stack is); no rank
    outlives the call.
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
    """Return what each call returns on each rank, made one after the other by the same ranks, which
    costs one start.

    calls: of each, the function and its arguments. Otherwise as `run_on_warm_ranks`.
    """
    return run_on_warm_ranks(_call_each, num_ranks, calls, timeout_seconds=timeout_seconds)


class CallsOnRanks:
    """Calls as of `run_each_on_ranks`, each made when its result is wanted: one that fails leaves
    the others alone."""

    def __init__(
        self,
        calls: dict[str, tuple[Any, ...]],
        num_ranks: int,
        timeout_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._calls, self._num_ranks, self._timeout_seconds = calls, num_ranks, timeout_seconds
        self._results: dict[str, list[Any] | RankFailed] = {}

    def __getitem__(self, name: str) -> list[Any]:
        """Return what a call returns on each rank. Raises RankFailed, for each test that asks for
        this call."""
        if name not in self._results:
            function, *args = self._calls[name]
            try:
                limit = self._timeout_seconds
                self._results[name] = run_on_warm_ranks(
                    function, self._num_ranks, *args, timeout_seconds=limit
                )
            except RankFailed as error:
                self._results[name] = error
        results_or_error = self._results[name]
        if isinstance(results_or_error, RankFailed):
            raise results_or_error
        return results_or_error


def run_on_warm_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = LIMIT_SECONDS
) -> list[Any]:
    """As `run_on_ranks`, on ranks that stay for the next call of the same test file: that spares
    their start.

    They keep their process group and what modules remember; environment, random numbers and
    warnings begin as in new ranks. After a failure the next call gets new ones.
    """
    if num_ranks not in _warm:
        _warm[num_ranks] = WarmRanks(num_ranks)
    try:
        return _warm[num_ranks].call(function, args, timeout_seconds)
    except BaseException:
        _warm.pop(num_ranks).kill()
        raise


def stop_warm_ranks() -> None:
    """End the ranks that `run_on_warm_ranks` has kept."""
    while _warm:
        _warm.popitem()[1].stop()


def rank_and_num_ranks() -> tuple[int, int]:
    """Return this rank's number and the number of ranks, inside of a function that `run_on_ranks`
    runs."""
    return int(os.environ["RANK"]), int(os.environ["TEST_NUM_RANKS"])


class WarmRanks:
    """Ranks that run one function after the other."""

    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipes, ends = zip(*(context.Pipe() for _ in range(num_ranks)), strict=True)
        self._processes = [
            context.Process(target=_serve, args=(end, rank, num_ranks), daemon=True)
            for rank, end in enumerate(ends)
        ]
        for process, end in zip(self._processes, ends, strict=True):
            process.start()
            end.close()

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float
    ) -> list[Any]:
        """Return what the function returns on each rank. Raises RankFailed."""
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            for pipe in self._pipes:
                pipe.send((function, args, port, folder))
            late = _wait(self._processes, folder, timeout_seconds, self._pipes)
            for rank in range(len(self._pipes)):
                sys.stderr.write(_read(folder, rank, "stderr"))
            return _results(self._processes, folder, late, timeout_seconds, expected_exit=None)

    def stop(self) -> None:
        """Let them leave their group and end."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=FAREWELL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End them at once."""
        for process in self._processes:
            process.kill()
            process.join()


_warm: dict[int, WarmRanks] = {}


def _serve(pipe: Any, rank: int, num_ranks: int) -> None:
    # Daemons end with the tests, but may not start workers of dataloaders; only multiprocessing
    # minds.
    multiprocessing.current_process()._config["daemon"] = False
    gc.freeze()
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    start = dict(os.environ), os.getcwd(), list(warnings.filters)
    random_state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    while (call := pipe.recv()) is not None:
        function, args, port, folder = call
        environment, directory, warnings.filters[:] = start
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        torch.set_rng_state(random_state[0])
        random.setstate(random_state[1])
        numpy.random.set_state(random_state[2])
        for module in list(sys.modules.values()):
            vars(module).get("__warningregistry__", {}).clear()
        stack = _set_up_rank(rank, num_ranks, port, folder)
        _run_and_save(function, args, rank, folder)
        gc.collect()
        pipe.send(True)
        stack.close()
    _leave_group()


def _call_each(calls: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: function(*args) for name, (function, *args) in calls.items()}


def _wait(
    processes: list[Any], folder: str, timeout_seconds: float, pipes: Sequence[Any] = ()
) -> list[int]:
    """Return the ranks that are late. pipes: of ranks that stay, which say by them that they are
    done."""
    deadline = time.monotonic() + timeout_seconds
    done: set[int] = set()
    while time.monotonic() < deadline:
        for rank, pipe in enumerate(pipes):
            with contextlib.suppress(EOFError, OSError):  # it has ended
                if rank not in done and pipe.poll() and pipe.recv():
                    done.add(rank)
        if all(rank in done or not p.is_alive() for rank, p in enumerate(processes)):
            return []
        if any(p.exitcode not in (None, 0) for p in processes):
            # Give the others a moment to fail by themselves: what they say is part of what is
            # tested.
            deadline = min(deadline, time.monotonic() + FAREWELL_SECONDS)
        time.sleep(0.02)
    late = [rank for rank, p in enumerate(processes) if p.is_alive() and rank not in done]
    for rank in late:
        os.kill(processes[rank].pid, 10)  # SIGUSR1: faulthandler writes the stack
    time.sleep(0.5)
    return late


def _results(
    processes: list[Any],
    folder: str,
    late: list[int],
    timeout_seconds: float,
    expected_exit: int | None = 0,
) -> list[Any]:
    results, problems = [], []
    for rank, process in enumerate(processes):
        out, stack = Path(folder) / f"{rank}.pt", _read(folder, rank, "stack")
        if error := _read(folder, rank, "error"):
            problems.append(f"--- rank {rank} raised:\n{error}")
        elif rank in late:
            problems.append(f"--- rank {rank} was not done after {timeout_seconds} s:\n{stack}")
        elif process.exitcode != expected_exit or not out.exists():
            last = _read(folder, rank, "stderr")[-2000:]
            problems.append(
                f"--- rank {rank} ended with exit code {process.exitcode}:\n{stack}{last}"
            )
        else:
            results.append(torch.load(out, map_location="cpu", weights_only=False))
    if problems:
        raise RankFailed("\n".join(problems))
    return results


def _read(folder: str, rank: int, kind: str) -> str:
    path = Path(folder) / f"{rank}.{kind}"
    return path.read_text(errors="replace") if path.exists() else ""


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    port: int,
    folder: str,
) -> None:
    # What was imported before the fork is not looked through for garbage by each rank: that would
    # copy its memory.
    gc.freeze()
    torch.set_num_threads(1)
    # Workers of dataloaders start as in a user's script; as children of a fork server each would
    # import torch anew.
    multiprocessing.set_start_method("fork", force=True)
    _stack = _set_up_rank(rank, num_ranks, port, folder)  # open until the process ends
    _run_and_save(function, args, rank, folder)
    _leave_group()


def _set_up_rank(rank: int, num_ranks: int, port: int, folder: str) -> IO[str]:
    """Give this process a rank's variables, and files for its stderr and its stack; returns the
    latter."""
    with open(f"{folder}/{rank}.stderr", "w") as stderr:
        os.dup2(stderr.fileno(), 2)
    stack = open(f"{folder}/{rank}.stack", "w")  # noqa: SIM115  the caller closes it
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
    # Plans of toys take a quarter of a fit's time otherwise; random moves gain nothing there.
    search.MOVES_PER_MILLISECOND = 0
    # of a test before, in the process that started the ranks
    os.environ.pop("PL_GLOBAL_SEED", None)
    return stack


def _run_and_save(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, folder: str
) -> None:
    try:
        result = function(*args)
    except BaseException as error:
        Path(f"{folder}/{rank}.error").write_text("".join(traceback.format_exception(error)))
        # A failed rank must go at once: its peers notice by the closed connections.
        sys.stdout.flush()
        os._exit(1)
    torch.save(result, f"{folder}/{rank}.pt")


def _leave_group() -> None:
    from lightning_distrec.strategies.run.process_runs import PROCESS

    PROCESS.leave()
