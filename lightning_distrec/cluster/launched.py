"""What launchers pass to each process that they start: its rank, the number of ranks, and the rendezvous point.

Only the launcher's own counts are used: a Trainer's devices and num_nodes do not show how many processes there are.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_distrec.cluster.rendezvous import MeetingPoint
from lightning_distrec.errors import ConfigError

# The default of torchrun's --master-port, too.
SCHEDULED_PORT = 29500
"""Port of launchers that give a host only."""


@dataclass(frozen=True)
class Launched:
    """One process among those that were started together."""

    launcher: str
    rank: int
    num_ranks: int
    local_rank: int
    local_num_ranks: int
    """Number of ranks on this node; other nodes may have other numbers."""
    node: int
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
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.num_ranks}
        numbers |= {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.local_num_ranks}
        # The node's number: as torchelastic names it, and as Lightning does.
        numbers |= {"GROUP_RANK": self.node, "NODE_RANK": self.node}
        os.environ.update({name: str(number) for name, number in numbers.items()})


def read_torchrun(environ: Mapping[str, str]) -> Launched | None:
    """Return what torchrun (or anything on torch.distributed.elastic) passes, None if it did not start this process.

    environ: of the environment. Source: torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    attempt, run = environ.get("TORCHELASTIC_RESTART_COUNT", "0"), environ["TORCHELASTIC_RUN_ID"]
    is_hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return Launched(
        launcher="torchrun",
        rank=parse_number(environ, "RANK"),
        num_ranks=parse_number(environ, "WORLD_SIZE"),
        local_rank=parse_number(environ, "LOCAL_RANK"),
        local_num_ranks=parse_number(environ, "LOCAL_WORLD_SIZE"),
        node=parse_number(environ, "GROUP_RANK"),
        num_nodes=parse_number(environ, "GROUP_WORLD_SIZE"),
        point=MeetingPoint(
            environ["MASTER_ADDR"],
            (parse_number(environ, "MASTER_PORT"),),
            # Nodes count attempts each for themselves: see introduction.py; without a shared store each has a port.
            f"torchrun {run}" if is_hosted else f"torchrun {run} at {environ['MASTER_PORT']}",
            is_hosted=is_hosted,
        ),
        job="" if run == "none" else "torchrun-" + re.sub(r"\W", "_", run),  # "none": torchrun's default
        attempt=int(attempt) if attempt.isdecimal() else 0,
    )


def read_open_mpi(environ: Mapping[str, str]) -> Launched | None:
    """Return what Open MPI's mpirun passes, None if it did not start this process.

    mpirun does not pass nodes: they are counted as if all had as many ranks as this one, in order.
    Raises ConfigError: it started ranks on several nodes, and MASTER_ADDR is not set.
    Source: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    num_ranks, rank = parse_number(environ, "OMPI_COMM_WORLD_SIZE"), parse_number(environ, "OMPI_COMM_WORLD_RANK")
    num_local_ranks = parse_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    # Ranks that are all on this machine need no address.
    host = environ.get("MASTER_ADDR", "127.0.0.1" if num_local_ranks == num_ranks else "")
    if not host:
        raise ConfigError(
            f"mpirun started {num_ranks} ranks, {num_local_ranks} of them here, and does not pass the address of rank "
            "0. Set MASTER_ADDR to the name of the first host: mpirun -x MASTER_ADDR=node1 ..."
        )
    # Open MPI 5 names jobs by PMIx, earlier versions by ORTE.
    job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", ""))
    return Launched(
        launcher="mpirun",
        rank=rank,
        num_ranks=num_ranks,
        local_rank=parse_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_num_ranks=num_local_ranks,
        node=rank // num_local_ranks,
        # Rounded up, as the last node may have fewer ranks.
        num_nodes=-(-num_ranks // num_local_ranks),
        point=MeetingPoint(host, (int(environ.get("MASTER_PORT", SCHEDULED_PORT)),), f"mpirun {job}"),
    )


def read_pytorchjob(environ: Mapping[str, str]) -> Launched | None:
    """Return what a Kubernetes PyTorchJob passes, None if these are not its variables.

    One process per pod, without LOCAL_RANK, which all launchers of several processes on a machine set.
    Source: pkg/controller.v1/pytorch/envvar.go of Kubeflow's training operator.
    """
    # Lightning's own launcher sets these, with LOCAL_RANK.
    if "LOCAL_RANK" in environ or not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(environ):
        return None
    rank, num_ranks = parse_number(environ, "RANK"), parse_number(environ, "WORLD_SIZE")
    identity = f"environ {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return Launched(
        launcher="the variables RANK and WORLD_SIZE",
        rank=rank,
        num_ranks=num_ranks,
        local_rank=0,
        local_num_ranks=1,
        node=rank,
        num_nodes=num_ranks,
        point=MeetingPoint(environ["MASTER_ADDR"], (parse_number(environ, "MASTER_PORT"),), identity),
    )


def parse_number(environ: Mapping[str, str], name: str) -> int:
    """Return a variable's number. Raises ConfigError: it has none."""
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(
            f"{name} is {environ.get(name, 'not set')}: the launcher's other variables are set, so it must be a number."
        ) from None
