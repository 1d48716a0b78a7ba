"""A lost node is replaced, or done without, or a rank on one of two nodes is killed: the job
resumes from disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import environment
from tests.support.killed_script import EPOCHS
from tests.support.kills import check_trained, read_trained
from tests.support.launched_script import NUM_SAMPLES
from tests.support.launches import ONE_THREAD
from tests.support.ports import free_port
from tests.support.two_machines import Machine

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

EVERY = 5
"""Steps between two checkpoints of `killed_script`."""
LIMIT_SECONDS = 120
REORDERED = 1e-6
"""How much losses may differ from those of one node, which has another plan."""


class _Agents:
    """torchrun on each machine."""

    def __init__(
        self,
        machines: tuple[Machine, Machine],
        folder: Path,
        num_nodes: str = "2",
        rendezvous: str = "",
        **options: Any,
    ) -> None:
        self.machines, self.folder, self.num_nodes, self.rendezvous = (
            machines,
            folder,
            num_nodes,
            rendezvous,
        )
        self.options = {"pause": 0.1} | options
        self.port = free_port()
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        machine = self.machines[number]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.num_nodes}",
            "--nproc-per-node=1",
        ]
        command += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.machines[0].address}:{self.port}",
            "--rdzv-id=job",
        ]
        command += [f"--rdzv-conf=is_host={int(number == 0)}{self.rendezvous}"]
        command += [
            f"--local-addr={machine.address}",
            "--max-restarts=3",
            "-m",
            "tests.support.killed_script",
        ]
        # torch 2.13 gives an agent that joins later no address in the store that it shares among
        # attempts.
        environ = environment(
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            KILLED_OPTIONS=json.dumps(self.options),
            **ONE_THREAD,
        )
        environ.pop("GLOO_SOCKET_IFNAME", None)
        with open(self.folder / f"printed.{number}", "a") as file:
            self.running[number] = subprocess.Popen(
                machine.command(*command, str(self.folder)), env=environ, stdout=file, stderr=file
            )

    def lose(self, number: int) -> None:
        """Kill a machine's agent and its rank."""
        pids = [
            path
            for path in self.folder.glob("pid.*.*")
            if self._is_on(number, int(path.read_text()))
        ]
        self.running[number].kill()
        self.running[number].wait()
        for path in pids:
            os.kill(int(path.read_text()), signal.SIGKILL)

    def _is_on(self, number: int, pid: int) -> bool:
        try:
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return False
        return int(parent) == self.running[number].pid

    def wait(self, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not met():
            assert time.monotonic() < deadline, self.printed()[-6000:]
            time.sleep(0.05)

    def printed(self) -> str:
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("printed.*"))
        )


@pytest.mark.timeout(2 * LIMIT_SECONDS)
@pytest.mark.parametrize("kind", ["a node is replaced", "a rank is killed"])
def test_a_job_goes_on_when_a_node_is_replaced(
    machines: tuple[Machine, Machine], tmp_path: Path, kind: str
) -> None:
    agents = _Agents(machines, tmp_path)
    try:
        for number in (0, 1):
            agents.start(number)
        agents.wait(lambda: max(read_trained(tmp_path).last_steps.values(), default=0) >= 2 * EVERY)
        if kind == "a node is replaced":
            agents.lose(1)
            agents.start(1)
        else:
            os.kill(int((tmp_path / "pid.0.1").read_text()), signal.SIGKILL)
        agents.wait(lambda: all(agent.poll() is not None for agent in agents.running.values()))
    finally:
        for agent in agents.running.values():
            agent.kill()
    trained = read_trained(tmp_path, agents.printed())
    assert [agent.returncode for agent in agents.running.values()] == [0, 0], trained.printed[
        -6000:
    ]
    (restart,) = trained.restarts
    check_trained(trained, tmp_path, REORDERED)
    assert restart.step >= EVERY
    assert restart.reached is not None
    assert restart.reached - restart.step <= 2 * EVERY


def _lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    file = folder / f"losses.{rank}"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.timeout(4 * LIMIT_SECONDS)
def test_an_elastic_job_shrinks_to_the_node_that_is_left_and_grows_again(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    # By default torch notices a lost agent after 15 s, and waits 30 s for more nodes than the
    # fewest.
    conf = ",last_call_timeout=5,keep_alive_interval=1"
    agents = _Agents(
        machines, tmp_path, "1:2", conf, pause=0.3, stopping={"on_sigterm": "checkpoint"}
    )
    try:
        for number in (0, 1):
            agents.start(number)
        agents.wait(lambda: len(_lines(tmp_path, 1)) > 2 * EVERY)
        agents.lose(1)
        agents.wait(lambda: "1 rank on 1 node, started by torchrun" in agents.printed())
        num_lines = len(_lines(tmp_path, 0))
        agents.wait(lambda: len(_lines(tmp_path, 0)) > num_lines + EVERY)
        agents.start(1)
        agents.wait(lambda: all(agent.poll() is not None for agent in agents.running.values()))
    finally:
        for agent in agents.running.values():
            agent.kill()
    trained = read_trained(tmp_path, agents.printed())
    assert [agent.returncode for agent in agents.running.values()] == [0, 0], trained.printed[
        -6000:
    ]
    shrunk, grown = sorted(trained.restarts, key=lambda restart: restart.step)
    assert (shrunk.step % EVERY, grown.repeated) == (0, 0), (
        "the one who loses nothing is told to stop by its agent"
    )
    # What counts of a step that was trained again is the last time.
    seen = {(0, line["step"]): line["of"] for line in _lines(tmp_path, 0)}
    alone = range(shrunk.step, grown.step)
    seen |= {
        (1, line["step"]): line["of"] for line in _lines(tmp_path, 1) if line["step"] not in alone
    }
    counts = Counter(number for numbers in seen.values() for number in numbers)
    expected = Counter(dict.fromkeys(range(NUM_SAMPLES), EPOCHS))
    assert not expected - counts, "each epoch trains each sample"
    assert (counts - expected).total() == len(alone) % 2, (
        "two ranks repeat one of an odd rest, as of DistributedSampler"
    )
