"""What launchers pass to each process that they start: its rank, the number of ranks, and the rendezvous point.

Only the launcher's own counts are used: a Trainer's devices and num_nodes do not show how many processes there are.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_distrec.cluster.rendezvous import MeetingPoint
from lightning_distrec.errors import ConfigError

SCHEDULED_PORT = 29500
"""Port of launchers that give a host only."""


@dataclass(frozen=True)
class Launched:
    """One process among those that were started together."""

    by: str
    """Name of the launcher."""
    rank: int
    num_ranks: int
    local_rank: int
    local_num_ranks: int
    """Number of ranks on this node; other nodes may have other numbers."""
    node: int
    """Number of this node."""
    num_nodes: int
    point: MeetingPoint
    is_step: bool = False
    """Whether it is a task of a Slurm job, which can be requeued."""
    job: str = ""
    """Name that the job keeps over restarts and shares with no other, for names of files; "" if there is none."""
    attempt: int = 0
    """How often the launcher, or its scheduler, has started the job again."""
    nodes: tuple[str, ...] = ()
    """The node of each rank by name; empty where the launcher does not pass it."""

    def publish(self) -> None:
        """Set the variables that torch and torchrec read."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.num_ranks),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_num_ranks),
            GROUP_RANK=str(self.node),
            NODE_RANK=str(self.node),
        )


def by_torchrun(given: Mapping[str, str]) -> Launched | None:
    """Return what torchrun (or anything on torch.distributed.elastic) passes, None if it did not start this process.

    given: the environment's variables. Source: torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    if "TORCHELASTIC_RUN_ID" not in given:
        return None
    attempt, run = given.get("TORCHELASTIC_RESTART_COUNT", "0"), given["TORCHELASTIC_RUN_ID"]
    is_hosted = given.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return Launched(
        by="torchrun",
        rank=number(given, "RANK"),
        num_ranks=number(given, "WORLD_SIZE"),
        local_rank=number(given, "LOCAL_RANK"),
        local_num_ranks=number(given, "LOCAL_WORLD_SIZE"),
        node=number(given, "GROUP_RANK"),
        num_nodes=number(given, "GROUP_WORLD_SIZE"),
        point=MeetingPoint(
            given["MASTER_ADDR"],
            (number(given, "MASTER_PORT"),),
            # Nodes count attempts each for themselves: see introduction.py; without a shared store each has a port.
            f"torchrun {run}" if is_hosted else f"torchrun {run} at {given['MASTER_PORT']}",
            is_hosted=is_hosted,
        ),
        job="" if run == "none" else "torchrun-" + re.sub(r"\W", "_", run),  # "none": torchrun's default
        attempt=int(attempt) if attempt.isdecimal() else 0,
    )


def by_open_mpi(given: Mapping[str, str]) -> Launched | None:
    """Return what Open MPI's mpirun passes, None if it did not start this process.

    mpirun does not pass nodes: they are counted as if all had as many ranks as this one, in order.
    Raises ConfigError: it started ranks on several nodes, and MASTER_ADDR is not set.
    Source: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    """
    if "OMPI_COMM_WORLD_SIZE" not in given:
        return None
    num_ranks, rank = number(given, "OMPI_COMM_WORLD_SIZE"), number(given, "OMPI_COMM_WORLD_RANK")
    here = number(given, "OMPI_COMM_WORLD_LOCAL_SIZE")
    host = given.get("MASTER_ADDR", "127.0.0.1" if here == num_ranks else "")
    if not host:
        raise ConfigError(
            f"mpirun started {num_ranks} ranks, {here} of them here, and does not pass the address of rank 0. Set "
            "MASTER_ADDR to the name of the first host: mpirun -x MASTER_ADDR=node1 ..."
        )
    job = given.get("PMIX_NAMESPACE", given.get("OMPI_MCA_ess_base_jobid", ""))
    return Launched(
        by="mpirun",
        rank=rank,
        num_ranks=num_ranks,
        local_rank=number(given, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_num_ranks=here,
        node=rank // here,
        num_nodes=-(-num_ranks // here),
        point=MeetingPoint(host, (int(given.get("MASTER_PORT", SCHEDULED_PORT)),), f"mpirun {job}"),
    )


def by_variables(given: Mapping[str, str]) -> Launched | None:
    """Return what a Kubernetes PyTorchJob passes, None if these are not its variables.

    One process per pod, each with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and without LOCAL_RANK, which all
    launchers of several processes on a machine set. Source: pkg/controller.v1/pytorch/envvar.go of Kubeflow's training
    operator.
    """
    if "LOCAL_RANK" in given or any(name not in given for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    rank, num_ranks = number(given, "RANK"), number(given, "WORLD_SIZE")
    identity = f"variables {given['MASTER_ADDR']}:{given['MASTER_PORT']}"
    return Launched(
        by="the variables RANK and WORLD_SIZE",
        rank=rank,
        num_ranks=num_ranks,
        local_rank=0,
        local_num_ranks=1,
        node=rank,
        num_nodes=num_ranks,
        point=MeetingPoint(given["MASTER_ADDR"], (number(given, "MASTER_PORT"),), identity),
    )


def number(given: Mapping[str, str], name: str) -> int:
    """Return a variable's number. Raises ConfigError: it has none."""
    try:
        return int(given[name])
    except (KeyError, ValueError):
        raise ConfigError(
            f"{name} is {given.get(name, 'not set')}: the launcher's other variables are set, so this must be a number."
        ) from None
