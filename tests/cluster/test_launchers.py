"""Ranks that torchrun, mpirun and users start."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.debian import require
from tests.support.launches import SCRIPT, check, ended, results_of, start
from tests.support.ports import free_port

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).parents[2] / "docs/how_to/networks.md"


def _agent(*arguments: str, **environ: str) -> "subprocess.Popen[str]":
    return start(sys.executable, "-m", "torch.distributed.run", *arguments, *SCRIPT[1:], **environ)


@pytest.mark.slow
def test_agents_may_have_unequal_numbers_of_ranks() -> None:
    together = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=unequal",
    )
    out, _ = ended(*(_agent(*together, f"--nproc-per-node={ranks}") for ranks in (2, 1)))
    results = results_of(out)
    sizes = [int(result["published"]["LOCAL_WORLD_SIZE"]) for result in results]
    check(results, [2, 1] if sizes == [2, 2, 1] else [1, 2])  # whichever agent came first


@pytest.mark.slow
def test_mpirun_sets_the_ranks() -> None:
    require(["mpirun"], ["openmpi-bin"])
    out, err = ended(start("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *SCRIPT))
    check(results_of(out), [2])
    assert "started by mpirun" in err + out


WAYS = {
    "`RANK`, `WORLD_SIZE`, `LOCAL_RANK`": (
        {"WORLD_SIZE": "22", "RANK": "10", "LOCAL_RANK": "10"},
        [2],
    ),
    "`NODE_RANK`, `LOCAL_WORLD_SIZE`": (
        {
            "WORLD_SIZE": "333",
            "RANK": "012",
            "LOCAL_RANK": "010",
            "NODE_RANK": "001",
            "LOCAL_WORLD_SIZE": "221",
        },
        [2, 1],
    ),
    "`RANK`, `WORLD_SIZE` alone": ({"WORLD_SIZE": "22", "RANK": "01"}, [1, 1]),
    "`NODE_RANK` alone": ({"NODE_RANK": "01"}, [2, 2]),
}
"""Rows of the page's table: the number of each process, as a digit of each variable, and the ranks
on the nodes."""


@pytest.mark.slow
@pytest.mark.parametrize("row", WAYS)
def test_ranks_are_started_by_hand_in_each_way_of_the_page(row: str) -> None:
    variables, ranks_on_nodes = WAYS[row]
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    if "RANK" not in variables:
        job["LAUNCHED_OPTIONS"] = json.dumps({"num_nodes": 2, "devices": 2})
    processes = [
        dict(zip(variables, digits, strict=True))
        for digits in zip(*variables.values(), strict=True)
    ]
    out, err = ended(*(start(*SCRIPT, **job, **numbers) for numbers in processes))
    check(results_of(out), ranks_on_nodes)
    assert ("started by the variables RANK and WORLD_SIZE" in err + out) == ("RANK" in variables)


def test_the_page_has_no_other_way_to_start_ranks_by_hand() -> None:
    table = PAGE.read_text().partition("## Start ranks by hand")[2].partition("<!--")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert rows == ["`MASTER_ADDR`, `MASTER_PORT`", *WAYS], "each way sets the first and the last"
