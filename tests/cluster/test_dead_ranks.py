"""A rank that dies, stops or goes another way: the others end within seconds, and say which one it
was."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_distrec.errors import RankError
from tests.support.faulty_script import (
    WORKER_SECONDS,
    fail_at_start,
    fit_and_validate,
    hang_at_exit,
)
from tests.support.hooks_that_raise import FAULTY, HOOKS, SAID, fit
from tests.support.parameters import slow_except
from tests.support.ranks import (
    RankFailed,
    rank_and_num_ranks,
    run_on_ranks,
    words_of_ranks,
)

NUM_RANKS = 3
GONE = "rank 1 has died: its process is gone"
STOPPED = "rank 1 has been silent for 3 s: it is stopped, or"


def _fails(folder: Path, kind: str, **options: Any) -> dict[int, str]:
    """Run ranks of which rank 1 fails, check that all end and nothing of them is left, and return
    what each said."""
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(_run, NUM_RANKS, kind, str(folder), options)
    assert "was not done" not in str(failed.value)
    return {
        r: words + (folder / f"{r}.out").read_text()
        for r, words in words_of_ranks(failed.value).items()
    }


def _run(kind: str, folder: str, options: dict[str, Any]) -> list[float]:
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/{rank_and_num_ranks()[0]}.out", "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    if kind.startswith("kill at start") and rank_and_num_ranks()[0] == 1:
        fail_at_start(kind.removeprefix("kill at start, "))
    try:
        return fit_and_validate(kind, folder, options, devices=NUM_RANKS)
    except RankError:
        if kind.endswith("then hang at exit"):
            hang_at_exit()
        raise


def test_a_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    output = _fails(tmp_path, "kill in a checkpoint")
    assert "exit code -9" in output[1]
    assert GONE in output[0]
    assert GONE in output[2]


@pytest.mark.slow
def test_a_killed_rank_is_named_while_its_workers_live(tmp_path: Path) -> None:
    """Not only gloo's sockets would stay open, by the copies that forks have."""
    output = _fails(tmp_path, "kill_but_a_worker in a step")
    worker, killed_at = (tmp_path / "worker").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    assert time.time() - float(killed_at) < WORKER_SECONDS / 2
    assert GONE in output[0]
    assert GONE in output[2]


@pytest.mark.parametrize("place", slow_except(["in teardown"], ["in teardown", "at exit"]))
def test_ranks_that_hang_on_their_way_out_are_ended_and_say_for_whom(
    tmp_path: Path, place: str
) -> None:
    output = _fails(tmp_path, f"kill in a step, then hang {place}", watchdog_seconds=3)
    ended = [words for rank, words in output.items() if rank != 1 and "exit code -9" in words]
    assert ended, "the one that is ended first frees the other"
    for words in ended:
        assert (
            f"Terminating this rank: {GONE} (killed, or out of memory?), and this rank, whose run "
            "has failed, has not "
            "ended its teardown within 3 s." in words
        ), words


@pytest.mark.parametrize(
    "moment",
    slow_except(
        ["before the process group"],
        ["at the first contact", "before the process group", "after the process group"],
    ),
)
def test_a_rank_that_was_killed_while_ranks_meet_is_named_within_seconds(
    tmp_path: Path, moment: str
) -> None:
    began = time.monotonic()
    output = _fails(tmp_path, f"kill at start, {moment}", timeout_seconds=60)
    assert time.monotonic() - began < 45
    assert "exit code -9" in output[1]
    assert GONE in output[0]
    assert GONE in output[2]


def test_a_rank_that_was_stopped_is_named_and_ended_once_it_goes_on(tmp_path: Path) -> None:
    output = _fails(tmp_path, "stop in a step", watchdog_seconds=3)
    assert all(STOPPED in output[rank] for rank in range(NUM_RANKS)), output


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreter_is_waited_for(tmp_path: Path) -> None:
    # The others wait for it in one exchange: that is no deadlock either.
    options = {"watchdog_seconds": 3, "deadlock_seconds": 1}
    losses = run_on_ranks(_run, NUM_RANKS, "hold in a step", str(tmp_path), options)
    assert losses == run_on_ranks(
        _run, NUM_RANKS, "nothing", str(tmp_path), {"watchdog_seconds": 0}
    )


def test_a_failure_where_the_others_wait_for_something_else_is_named_with_its_message(
    tmp_path: Path,
) -> None:
    output = _fails(tmp_path, "raise at the end")
    assert "ValueError: a fault of this rank alone" in output[1]
    for rank in (0, 2):
        assert "rank 1 failed: ValueError: a fault of this rank alone" in output[rank]


def test_a_rank_that_leaves_between_two_runs_is_missed_in_the_next(
    tmp_path: Path,
) -> None:
    output = _fails(tmp_path, "exit between")
    assert "SystemExit: 3" in output[1]
    assert GONE in output[0]
    assert GONE in output[2]


@pytest.mark.slow
def test_ranks_that_exchange_different_things_are_named_with_their_places(tmp_path: Path) -> None:
    output = _fails(tmp_path, "collective in a step", timeout_seconds=6)
    match = re.search(
        r"RankError: a collective failed \(.*\). Where the ranks are: (.*)",
        "\n".join(output.values()),
    )
    assert match is not None, output
    parted = match[1]
    pattern = r"rank 1: (?:has failed at )?train batch 3, exchanges [\d/]+/1, faulty_script.py:\d+ in _collective"
    assert re.search(pattern, parted), parted
    assert re.search(
        r"ranks? 0.*: (?:has failed at )?train batch [34], exchanges [\d/]+/0, ", parted
    ), parted


@pytest.mark.parametrize(
    "kind",
    slow_except(
        ["save in a step"],
        ["save in a step", "save in a step, then spin", "leave in a step"],
    ),
)
def test_ranks_that_wait_in_different_exchanges_are_ended_with_their_places(
    tmp_path: Path, kind: str
) -> None:
    """One saves a checkpoint alone, or sets should_stop alone; its processor may be taken
    meanwhile."""
    began = time.monotonic()
    output = _fails(tmp_path, kind, deadlock_seconds=4)
    assert time.monotonic() - began < 90, "and not timeout_seconds, half an hour"
    if kind.startswith("save"):
        place = r"faulty_script.py:\d+ in _fail \(\w+\)"
        pattern = rf"ranks wait in different exchanges for 4 s: .*rank 1: .*, {place}.* All ranks must make the same calls"
    else:  # its next message meets one of theirs
        pattern = r"ranks exchange messages in different places:\nrank 0: .*\nrank 1: .*\nrank 2: .*\nProbably"
    assert any(re.search(pattern, words) for words in output.values()), output


@pytest.mark.slow
@pytest.mark.parametrize("sync_interval", [1, 4])
def test_a_dead_rank_or_a_signal_to_one_ends_the_groups_that_it_is_not_in(
    tmp_path: Path, sync_interval: int
) -> None:
    groups = {"sharding_groups": {"size": 1, "sync_interval": sync_interval}}
    output = _fails(tmp_path / "killed", "kill in a step", **groups)
    assert GONE in output[0]
    assert GONE in output[2]
    output = _fails(tmp_path / "asked", "term in a step", **groups)
    assert all("Exception: 143" in words for words in output.values()), output


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_a_hook_of_one_rank_is_named_on_all(tmp_path: Path, hook: str) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(fit, NUM_RANKS, hook, str(tmp_path))
    assert "was not done" not in str(failed.value)
    words = words_of_ranks(failed.value)
    assert words.keys() == set(range(NUM_RANKS))
    for rank in words:
        output = words[rank] + (tmp_path / f"{rank}.out").read_text()
        expected = f"ValueError: {SAID}" if rank == FAULTY else rf"rank {FAULTY} failed"
        assert re.search(expected, output), output[-2000:]
