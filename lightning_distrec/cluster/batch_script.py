"""A script for sbatch that starts a recipe as it should be started: srun, a signal in time, one log over requeues."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked of Slurm.

    Args:
        config: A recipe's YAML.
        nodes: How many machines.
        ranks_per_node: How many ranks on each, usually its GPUs.
        gpus: Whether each rank gets a GPU.
        cpus_per_rank: For the rank itself and the workers of its dataloaders.
        time: As Slurm has it: minutes, hours:minutes:seconds, days-hours and so on.
        partition: Slurm's default where empty.
        account: Slurm's default where empty.
        signal_seconds: How long before the time is over the ranks are told, to save a checkpoint.
    """

    config: str
    nodes: int
    ranks_per_node: int
    gpus: bool = True
    cpus_per_rank: int = 8
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    signal_seconds: int = 120

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "cpus_per_rank", "signal_seconds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, and must be at least 1.")
        if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time):
            raise ConfigError(f"time is '{self.time}', which Slurm does not know: 90, 24:00:00 or 7-0, for example.")
        if not Path(self.config).is_file():
            raise ConfigError(f"there is no file {self.config}: config is a recipe's YAML.")


def batch_script(wanted: Wanted) -> str:
    """Return the script; its jobs run in the folder that they are submitted from, as this Python."""
    options = {
        "job-name": re.sub(r"\W+", "-", Path(wanted.config).absolute().parent.name) or "train",
        "nodes": wanted.nodes,
        "ntasks-per-node": wanted.ranks_per_node,
        "gpus-per-node": wanted.ranks_per_node if wanted.gpus else "",
        "cpus-per-task": wanted.cpus_per_rank,
        "time": wanted.time,
        "partition": wanted.partition,
        "account": wanted.account,
        "signal": f"USR1@{wanted.signal_seconds}",
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    asked = "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items() if value != "")
    program = shlex.join([sys.executable, "-m", "lightning_distrec"])
    return f"""#!/bin/bash
{asked}
#SBATCH --requeue

set -euo pipefail

# As the job will be: what stands in its way is said before it waits for it.
srun --kill-on-bad-exit=1 {program} doctor

# One rank for each task; how many there are is Slurm's to say. {wanted.signal_seconds} seconds before the time is over
# they save a checkpoint, the job is requeued, and goes on from there. Exit code 75: saved, but nobody has requeued it.
srun --kill-on-bad-exit=1 {program} fit --config {shlex.quote(wanted.config)}
"""
