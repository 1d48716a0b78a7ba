"""`launched_script` started by any launcher, and what its ranks then say of themselves against one
machine's ranks."""

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.support.environments import environment
from tests.support.launched_script import NUM_SAMPLES, RESULT, train
from tests.support.limits import LIMIT_SECONDS
from tests.support.ranks import rank_and_num_ranks, run_on_ranks

SCRIPT = [sys.executable, "-m", "tests.support.launched_script"]
SHELL = " ".join(SCRIPT)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
Result = dict[str, Any]


def start(*command: str, **extra: str) -> "subprocess.Popen[str]":
    """Start a command on this machine, with one thread for each rank; more: variables."""
    return subprocess.Popen(
        command,
        env=environment(GLOO_SOCKET_IFNAME="lo", **ONE_THREAD) | extra,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(
    *processes: "subprocess.Popen[str]", timeout_seconds: float = LIMIT_SECONDS
) -> tuple[str, str]:
    """Wait for processes, all of which have to succeed, and return what they printed: output,
    errors."""
    try:
        printed = [process.communicate(timeout=timeout_seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    out, err = ("".join(texts) for texts in zip(*printed, strict=True))
    assert [process.returncode for process in processes] == [0] * len(processes), err[-3000:]
    return out, err


def results_of(printed: str) -> list[Result]:
    """Return what the ranks of a script have printed, in their order."""
    # A launcher that hands a terminal's text on, as mpirun does, may part a line from its end: not
    # one line a rank.
    read = json.JSONDecoder().raw_decode
    return sorted(
        (read(text)[0] for text in printed.split(RESULT)[1:]),
        key=lambda result: int(result["rank"]),
    )


def check(results: list[Result], per_node: list[int]) -> None:
    """Check that these are all ranks of one training, of which each node has so many."""
    num_ranks = sum(per_node)
    assert [result["rank"] for result in results] == list(range(num_ranks))
    expected = [(node, local) for node, count in enumerate(per_node) for local in range(count)]
    assert [(result["node"], result["local_rank"]) for result in results] == expected
    for result, single in zip(results, on_one_machine(num_ranks), strict=True):
        assert result["num_ranks"] == num_ranks
        assert result["num_nodes"] == len(per_node)
        local = per_node[result["node"]]
        published = {
            "RANK": result["rank"],
            "WORLD_SIZE": num_ranks,
            "LOCAL_RANK": result["local_rank"],
        }
        published |= {"LOCAL_WORLD_SIZE": local, "GROUP_RANK": result["node"]}
        if result["environment"] != "LightningEnvironment":
            assert result["published"] == {name: str(value) for name, value in published.items()}
        assert result["seen"] == single["seen"]
        assert result["losses"] == pytest.approx(single["losses"], abs=1e-6)
    seen = sorted(number for result in results for number in result["seen"])
    assert seen == list(range(NUM_SAMPLES))


def _alone() -> Result:
    return train(devices=rank_and_num_ranks()[1])


@cache
def on_one_machine(num_ranks: int) -> list[Result]:
    """Return the results of as many ranks on one machine, under Lightning's own launcher."""
    return run_on_ranks(_alone, num_ranks)
