"""A script for sbatch that runs a recipe with srun, a signal before the time limit, and one log for all requeues."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What the script requests of Slurm.

    Args:
        config: YAML of the recipe.
        nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node, usually its GPUs.
        gpus: Request a GPU for each rank.
        cpus_per_rank: CPUs for the rank itself and the workers of its dataloaders.
        time: Time limit in Slurm's form: minutes, hours:minutes:seconds, days-hours and so on.
        partition: Slurm's default if empty.
        account: Slurm's default if empty.
        signal_seconds: Seconds before the time limit at which Slurm signals the ranks to save a checkpoint.
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
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1.")
        if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time):
            raise ConfigError(f"--time {self.time}: Slurm does not know it. Use 90, 24:00:00 or 7-0, for example.")
        if not Path(self.config).is_file():
            raise ConfigError(f"--config {self.config}: there is no such file. Give it a recipe's YAML.")


def batch_script(job: BatchJob) -> str:
    """Return the script; its jobs run with this Python, in the folder that they are submitted from."""
    options = {
        "job-name": re.sub(r"\W+", "-", Path(job.config).absolute().parent.name) or "train",
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "gpus-per-node": job.ranks_per_node if job.gpus else "",
        "cpus-per-task": job.cpus_per_rank,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "signal": f"USR1@{job.signal_seconds}",
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    asked = "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items() if value != "")
    program = shlex.join([sys.executable, "-m", "lightning_distrec"])
    return f"""#!/bin/bash
{asked}
#SBATCH --requeue

set -euo pipefail

# With the same ranks as the job: problems show before the training starts.
srun --kill-on-bad-exit=1 {program} doctor

# One rank per task. {job.signal_seconds} seconds before the time limit the ranks save a checkpoint and the job is
# requeued; it resumes from the checkpoint. Exit code 75: the checkpoint is saved, but the job could not be requeued.
srun --kill-on-bad-exit=1 {program} fit --config {shlex.quote(job.config)}
"""
