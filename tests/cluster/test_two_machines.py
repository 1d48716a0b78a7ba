"""Two machines that only one network joins: the interface is found, and a machine that is cut off
is named."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.kills import check_trained, read_trained
from tests.support.launches import SCRIPT, check, ended, results_of, start
from tests.support.limits import LIMIT_SECONDS
from tests.support.two_machines import Machine

pytestmark = pytest.mark.cluster

JOB = {"WORLD_SIZE": "2", "MASTER_PORT": "29513"}


def _start(
    machines: tuple[Machine, Machine], command: list[str], job: dict[str, str]
) -> "list[subprocess.Popen[str]]":
    without = ["env", "-u", "GLOO_SOCKET_IFNAME"]
    # Both have this machine's name: by that alone they would be one node.
    places = [
        {"RANK": str(node), "LOCAL_RANK": "0", "NODE_RANK": str(node)}
        for node in range(len(machines))
    ]
    return [
        start(*machines[node].command(*without, *command), **place, **job)
        for node, place in enumerate(places)
    ]


@pytest.mark.slow
def test_the_interface_between_them_is_found(machines: tuple[Machine, Machine]) -> None:
    # The machine's own name, by which gloo goes, leads nowhere there.
    job = JOB | {"MASTER_ADDR": machines[0].address}
    ranks = _start(machines, SCRIPT, job)
    out, err = ended(*ranks)
    check(results_of(out), [1, 1])
    assert f"by gloo over {machines[0].device}" in err + out


@pytest.mark.slow
def test_a_machine_that_is_cut_off_is_named(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    job = JOB | {"MASTER_ADDR": machines[0].address, "FAULTY_FOLDER": str(tmp_path)}
    script = [
        sys.executable,
        "-m",
        "tests.support.faulty_script",
        "wait in a step",
        '{"watchdog_seconds": 3}',
    ]
    ranks = _start(machines, script, job)
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (tmp_path / "waits").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        machines[1].cut_off()
        output = [rank.communicate(timeout=LIMIT_SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "rank 1 has been silent for 3 s: it is stopped, or in one call" in output[0]
    assert "rank 0 has been silent for 3 s" in output[1]
    assert all(rank.returncode for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5, 20])
def test_a_link_that_comes_back_costs_time_alone(
    machines: tuple[Machine, Machine], tmp_path: Path, seconds: int
) -> None:
    options = {"KILLED_OPTIONS": json.dumps({"pause": 0.02})}
    job = JOB | {"MASTER_ADDR": machines[0].address} | options
    ranks = _start(
        machines, [sys.executable, "-m", "tests.support.killed_script", str(tmp_path)], job
    )
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while max(read_trained(tmp_path).last_steps.values(), default=0) < 5:
            assert time.monotonic() < deadline
            assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()
            time.sleep(0.02)
        machines[1].cut_off()
        time.sleep(seconds)
        machines[1].join_again()
        stood_still = max(read_trained(tmp_path).last_steps.values())
        out, err = ended(*ranks)
    finally:
        for rank in ranks:
            rank.kill()
    trained = read_trained(tmp_path, out + err)
    assert stood_still < max(trained.last_steps.values()), "the link was cut when all was trained"
    check_trained(trained, tmp_path, allowed=1e-6)
    assert trained.first_steps == {0: 0}
