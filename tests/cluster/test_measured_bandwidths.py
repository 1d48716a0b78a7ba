"""Bandwidths measured over a link of limited rate are near that rate."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.debian import require
from tests.support.launches import ended, start
from tests.support.two_machines import NoMachines, two_machines

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

MBIT_PER_SECOND = 200
RANKS_BY_NODE = ("2", "1")


def test_a_slow_link_is_measured_as_such_and_what_stays_on_a_machine_is_not(tmp_path: Path) -> None:
    require(["ip", "tc"], ["iproute2"])
    try:
        with two_machines(MBIT_PER_SECOND) as machines:
            started = []
            for number, machine in enumerate(machines):
                script = [sys.executable, "-m", "tests.support.measuring_script", str(number), *RANKS_BY_NODE]
                job = {
                    "MASTER_ADDR": machines[0].address,
                    "MASTER_PORT": "29517",
                    "GLOO_SOCKET_IFNAME": machine.device,
                    "XDG_CACHE_HOME": str(tmp_path),
                }
                started.append(start(*machine.command(*script), **job))
            out, _ = ended(*started, timeout_seconds=90)
    except NoMachines as reason:
        pytest.skip(f"no network namespaces: {reason}")
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert len(found) == 3
    assert all(one == found[0] for one in found)
    # All wait for the rank that is alone on its machine, and has its link for itself.
    limit = MBIT_PER_SECOND * 1e6 / 8
    assert found[0]["cross_node"] == pytest.approx(limit, rel=0.3)
    assert found[0]["intra_node"] > 2 * limit
