"""A script for sbatch that runs a recipe under Slurm."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What the script requests of Slurm, and runs; `lightning-distrec slurm --help` describes each
    field."""

    configs: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    gpus: bool = True
    cpus_per_rank: int = 8
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    signal_seconds: int = 120
    job_name: str = ""
    output: str = "%x-%j.out"
    error: str = ""
    setup: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    launcher: str = "srun"
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "cpus_per_rank", "signal_seconds"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1."
                )
        if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time):
            raise ConfigError(
                f"--time {self.time}: Slurm does not know it. Use 90, 24:00:00 or 7-0, for example."
            )
        if not self.configs:
            raise ConfigError(
                "slurm: --config is missing. Give it the YAML file that fit would get."
            )
        for config in self.configs:
            if not Path(config).is_file():
                raise ConfigError(
                    f"--config {config}: there is no such file. Give it a recipe's YAML."
                )
        for option in self.sbatch:
            if option.startswith("-") or any(
                letter.isspace() for letter in option.partition("=")[0]
            ):
                raise ConfigError(
                    f"--sbatch {option!r}: give an option without hyphens, such as qos=high."
                )


# Words in place of shell variables, which `shlex.join` would quote.
HOST = "RENDEZVOUS_HOST"
ATTEMPT = "RENDEZVOUS_ID"
RENDEZVOUS = (
    "",
    "# The first node's torchrun is where the others meet; set MASTER_ADDR if its name has no "
    "address.",
    'host=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}',
    "attempt=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}",
)


def batch_script(job: BatchJob) -> str:
    """Return the script; its jobs run with this Python, in the folder that they are submitted
    from."""
    uses_torchrun = job.launcher == "torchrun"
    options = {
        "job-name": job.job_name
        or re.sub(r"\W+", "-", Path(job.configs[0]).absolute().parent.name)
        or "train",
        "nodes": job.nodes,
        "ntasks-per-node": 1 if uses_torchrun else job.ranks_per_node,
        "gpus-per-node": job.ranks_per_node if job.gpus else "",
        # The single task of a node is torchrun, with which its ranks share the CPUs.
        "cpus-per-task": job.cpus_per_rank * (job.ranks_per_node if uses_torchrun else 1),
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        # Without "B:" Slurm signals the steps, where the ranks are, and not the shell of the
        # script.
        "signal": f"USR1@{job.signal_seconds}",
        "output": job.output,
        "error": job.error,
        # By default a requeued job truncates the log of its earlier starts.
        "open-mode": "append",
    }
    sbatch_lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value != ""]
    sbatch_lines += ["#SBATCH --requeue", *(f"#SBATCH --{option}" for option in job.sbatch)]
    # --kill-on-bad-exit: srun would let the other ranks of a failed one wait for their timeouts.
    start = _torchrun(job) if uses_torchrun else ["srun", "--kill-on-bad-exit=1", sys.executable]
    program = (
        shlex
        .join([*start, "-m", "lightning_distrec"])
        .replace(HOST, '"$host"')
        .replace(ATTEMPT, '"$attempt"')
    )
    fit = shlex.join([
        *(word for config in job.configs for word in ("--config", config)),
        *job.overrides,
    ])
    setup = "".join(f"{line}\n" for line in (*job.setup, *(RENDEZVOUS if uses_torchrun else ())))
    ranks_start = "One torchrun per node" if uses_torchrun else "One rank per task"
    header = "\n".join(["#!/bin/bash", *sbatch_lines])
    return f"""{header}

set -euo pipefail
{setup}
# With the same ranks as the job: problems show before the training starts.
{program} doctor

# {ranks_start}. {job.signal_seconds} seconds before the time limit the ranks save a checkpoint
# and the job is requeued; it resumes from the checkpoint.
# Exit code 75: the checkpoint is saved, but the job could not be requeued.
{program} fit {fit}
"""


def _torchrun(job: BatchJob) -> list[str]:
    return [
        # torchrun would end at the signal that asks its ranks for a checkpoint. The ranks install a
        # handler.
        *("srun", "--kill-on-bad-exit=1", "bash", "-c", "trap '' USR1; exec \"$@\"", "ignore-usr1"),
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks_per_node}", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}", f"--rdzv-id={ATTEMPT}"),
        # What is started is `python -m lightning_distrec`, by the Python of this environment.
        *("--no-python", sys.executable),
    ]
