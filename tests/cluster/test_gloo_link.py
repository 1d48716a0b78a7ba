"""On a link of limited rate, exchanges whose receives come first use both of its directions at
once."""

import json
import sys

import pytest

from tests.support.debian import require
from tests.support.launches import ended, start
from tests.support.two_machines import NoMachines, two_machines

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MBIT_PER_SECOND = 100


def test_both_directions_of_a_link_are_used_at_once() -> None:
    require(["ip", "tc"], ["iproute2"])
    try:
        with two_machines(MBIT_PER_SECOND) as machines:
            ranks = [
                start(
                    *machine.command(sys.executable, "-m", "tests.support.exchanging_script"),
                    MASTER_ADDR=machines[0].address,
                    MASTER_PORT="29519",
                    GLOO_SOCKET_IFNAME=machine.device,
                    RANK=str(rank),
                    WORLD_SIZE="2",
                )
                for rank, machine in enumerate(machines)
            ]
            out, _ = ended(*ranks)
    except NoMachines as reason:
        pytest.skip(f"no network namespaces: {reason}")
    for line in out.splitlines():
        if line.startswith("{"):
            seconds = json.loads(line)
            # 32 ms for what one direction carries; torch's own takes twice that.
            assert seconds["ours"] < 0.75 * seconds["own"], seconds
