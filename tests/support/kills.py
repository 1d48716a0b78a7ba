"""torchrun with a random rank killed at random moments, and what its attempts together have
trained."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.environments import environment
from tests.support.killed_script import NUM_STEPS, main
from tests.support.launches import ONE_THREAD
from tests.support.limits import LIMIT_SECONDS
from tests.support.ranks import run_on_ranks
from tests.support.resuming import differences

RESUMES = re.compile(r"training resumes from (\S+), step (\d+), .*")
COME_TO = re.compile(r"had come to step (\d+): (\d+) steps? (?:is|are) trained again")


@dataclass
class Restart:
    """What a restarted job said of where it goes on."""

    path: str
    step: int
    reached: int | None
    repeated: int | None


@dataclass
class Trained:
    """What the attempts of one job did. losses: rank -> step -> each loss of that step."""

    printed: str
    losses: list[dict[int, list[float]]] = field(default_factory=list)
    first_steps: dict[int, int] = field(default_factory=dict)
    """Attempt -> the first step that it trained."""
    last_steps: dict[int, int] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    num_kills: int = 0

    @property
    def restarts(self) -> list[Restart]:
        """Return what was said, in order."""
        actual = []
        for message in RESUMES.finditer(self.printed):
            far = COME_TO.search(message[0])
            reached, repeated = (int(far[1]), int(far[2])) if far else (None, None)
            actual.append(Restart(message[1], int(message[2]), reached, repeated))
        return actual


def read_trained(folder: Path, printed: str = "") -> Trained:
    """Return what the ranks have written into a folder."""
    trained = Trained(printed)
    for path in sorted(folder.glob("losses.*")):
        steps: dict[int, list[float]] = {}
        for text in path.read_text().splitlines():
            line = json.loads(text)
            steps.setdefault(line["step"], []).append(line["loss"])
            trained.first_steps.setdefault(line["attempt"], line["step"])
            trained.last_steps[line["attempt"]] = max(
                line["step"], trained.last_steps.get(line["attempt"], 0)
            )
        trained.losses.append(steps)
    result = folder / "result.json"
    trained.result = json.loads(result.read_text()) if result.exists() else {}
    return trained


@cache
def _never_stopped() -> Trained:
    with TemporaryDirectory() as folder:
        run_on_ranks(_train, 2, folder)
        return read_trained(Path(folder))


def _train(folder: str) -> None:
    main(Path(folder), {"devices": 2})


def check_trained(trained: Trained, root: Path, allowed: float = 0.0) -> None:
    """Check that a job trained what one does that nobody kills, and resumed where it said.

    allowed: how much its losses may differ from those of a job on one node, which has another plan.
    A step that was trained again has the same loss, bit by bit.
    """
    reference_run = _never_stopped()
    for losses, reference in zip(trained.losses, reference_run.losses, strict=True):
        assert sorted(losses) == list(range(NUM_STEPS)) == sorted(reference)
        assert {step: item for step, item in losses.items() if len(set(item)) > 1} == {}
        assert (
            differences(
                [losses[step][0] for step in losses],
                [reference[step][0] for step in losses],
                "losses",
                allowed,
            )
            == []
        )
    assert differences(trained.result, reference_run.result, "result", allowed) == []
    for restart in trained.restarts:
        assert restart.path.startswith(str(root))
        assert restart.step in set(trained.first_steps.values()) | {NUM_STEPS}
        if restart.reached is not None:
            assert restart.repeated == restart.reached - restart.step
            assert restart.reached <= max(trained.last_steps.values()) + 1


def train_with_kills(
    folder: Path,
    num_kills: int,
    draw: random.Random,
    options: Mapping[str, Any],
    arguments: tuple[str, ...] = (),
) -> Trained:
    """Train by torchrun on two ranks, of which a random one is killed at random moments, and return
    all that happened.

    One of four kills comes before the first step of its attempt, while ranks meet, look for
    checkpoints and shard.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--max-restarts={max(num_kills, 1)}",
    ]
    inputs = environment(GLOO_SOCKET_IFNAME="lo", KILLED_OPTIONS=json.dumps(options), **ONE_THREAD)
    with open(folder / "printed", "w") as file:
        agent = subprocess.Popen(
            [*command, *arguments, "-m", "tests.support.killed_script", str(folder)],
            env=inputs,
            stdout=file,
            stderr=file,
        )
        killed = 0
        try:
            for attempt in range(num_kills):
                killed += _kill(folder, agent, attempt, draw)
            agent.wait(LIMIT_SECONDS)
        finally:
            agent.kill()
            agent.wait()
    trained = read_trained(folder, (folder / "printed").read_text(errors="replace"))
    assert agent.returncode == 0, trained.printed[-3000:]
    trained.num_kills = killed
    return trained


def _kill(folder: Path, agent: "subprocess.Popen[bytes]", attempt: int, draw: random.Random) -> int:
    """Kill a rank of an attempt, and return 1; 0: it has ended before."""
    pid = folder / f"pid.{attempt}.{draw.randrange(2)}"
    if draw.random() < 0.25:
        _wait_for(agent, lambda: pid.exists() and bool(pid.read_text()))
        time.sleep(draw.uniform(0.0, 4.0))
    else:
        _wait_for(agent, lambda: attempt in read_trained(folder).first_steps)
        time.sleep(draw.uniform(0.0, 2.0))
    if agent.poll() is not None:
        return 0
    try:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def _wait_for(agent: "subprocess.Popen[bytes]", met: Any) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not met() and agent.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
