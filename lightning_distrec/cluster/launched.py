"""What launchers pass to each process that they start: its rank, the number of ranks, and the
rendezvous point.

Only the launcher's own counts are used: a Trainer's devices and num_nodes do not show how many
processes there are.
"""

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from lightning_distrec.errors import ConfigError
from lightning_distrec.units import format_ranks

# The default of torchrun's --master-port, too.
SCHEDULED_PORT = 29500
"""Port of launchers that give a host only."""
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACKS = ("localhost", "127.0.0.1", "::1")
PLACE = "place"
NAME = "lightning_distrec/job"


@dataclass(frozen=True)
class MeetingPoint:
    """Where ranks meet."""

    host: str
    """Name or address of rank 0's node, as the others reach it."""
    ports: tuple[int, ...]
    """Ports to try, in this order; the same on all ranks."""
    identity: str
    """The job's name: a text that no other job, step or attempt has."""
    is_hosted: bool = False
    """Whether a store of the launcher listens there, as torchrun's does; otherwise rank 0 does."""
    one_node: bool = False
    """Whether all ranks are on one node: then rank 0 listens at `host` only, even a loopback."""
    find_loss: Callable[[], str] = str
    """Returns which process of this job has ended, as far as this one sees; "" if none has."""
    hint: str = ""
    """Why there may be nobody else, and what to do: shown where nobody else has arrived."""


@dataclass(frozen=True)
class Place:
    """Where a rank that was started by hand is, by its variables: None where one is not set."""

    local_rank: int | None
    node: int | None
    local_num_ranks: int | None
    host: str
    machine: str
    """Different on different machines, even if they share a name; containers of a machine share
    it."""


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
    """Name that the job keeps over restarts and shares with no other, for names of files; "" if
    there is none."""
    attempt: int = 0
    """How often the launcher, or its scheduler, has started the job again."""
    nodes: tuple[str, ...] = ()
    """The node of each rank by name; empty where the launcher does not pass it."""
    place: Place | None = None
    """What `count_nodes` has yet to compare with the other ranks'; None where the launcher has
    counted."""

    def publish(self) -> None:
        """Set the variables that torch and torchrec read."""
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.num_ranks}
        numbers |= {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.local_num_ranks}
        # The node's number: as torchelastic names it, and as Lightning does.
        numbers |= {"GROUP_RANK": self.node, "NODE_RANK": self.node}
        os.environ.update({name: str(number) for name, number in numbers.items()})


def read_torchrun(environ: Mapping[str, str]) -> Launched | None:
    """Return what torchrun (or anything on torch.distributed.elastic) passes, None if it did not
    start this process.

    environ: of the environment. Source:
    torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run = environ["TORCHELASTIC_RUN_ID"]
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
            # Nodes count attempts each for themselves: see meeting.py; without a shared store each
            # has a port.
            f"torchrun {run}" if is_hosted else f"torchrun {run} at {environ['MASTER_PORT']}",
            is_hosted=is_hosted,
        ),
        # "none": torchrun's default
        job="" if run == "none" else "torchrun-" + re.sub(r"\W", "_", run),
        attempt=int(attempt) if attempt.isdecimal() else 0,
    )


def name_in_store(point: MeetingPoint, rank: int) -> str:
    """Return a name that a job without an id keeps over restarts; "" on other ranks than 0.

    torchrun on several nodes calls all jobs "none" that are started without --rdzv-id; its agent's
    store stays.
    """
    if rank:
        return ""
    store = PrefixStore(NAME, TCPStore(point.host, point.ports[0], is_master=False))
    # Where "" is expected, only an absent key is set: a restarted rank 0 gets the first one's name.
    return store.compare_set(NAME, "", f"torchrun-{secrets.token_hex(8)}").decode()


def read_open_mpi(environ: Mapping[str, str]) -> Launched | None:
    """Return what Open MPI's mpirun passes, None if it did not start this process.

    mpirun does not pass nodes: they are counted as if all had as many ranks as this one, in order.
    Raises ConfigError: it started ranks on several nodes, and MASTER_ADDR is not set.
    Source: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    num_ranks = parse_number(environ, "OMPI_COMM_WORLD_SIZE")
    rank = parse_number(environ, "OMPI_COMM_WORLD_RANK")
    num_local_ranks = parse_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    # Ranks that are all on this machine need no address.
    host = environ.get("MASTER_ADDR", "127.0.0.1" if num_local_ranks == num_ranks else "")
    if not host:
        raise ConfigError(
            f"mpirun started {num_ranks} ranks, {num_local_ranks} of them here, and does not pass "
            "the address of rank 0. Set MASTER_ADDR to the name of the first host: mpirun -x "
            "MASTER_ADDR=node1 ..."
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
        point=MeetingPoint(
            host, (int(environ.get("MASTER_PORT", SCHEDULED_PORT)),), f"mpirun {job}"
        ),
    )


def read_variables(environ: Mapping[str, str]) -> Launched | None:
    """Return what a user, or a Kubernetes PyTorchJob, sets for each process that it starts; None if
    RANK is not set.

    Which ranks share a node is not known before `count_nodes`: until then each rank is a node of
    its own.
    Raises ConfigError: variables are missing, or contradict each other.
    Source: torch's env:// rendezvous; pkg/controller.v1/pytorch/envvar.go of Kubeflow's training
    operator.
    """
    # Lightning's own launcher sets all of them but RANK. Its environment deletes WORLD_SIZE at the
    # end of a run of its own strategies; these ranks have met.
    if "RANK" not in environ or (
        "WORLD_SIZE" not in environ and dist.is_available() and dist.is_initialized()
    ):
        return None
    missing = [name for name in REQUIRED if name not in environ]
    if missing:
        raise ConfigError(
            f"RANK={environ['RANK']} is set, but not {', '.join(missing)}. Set "
            f"{', '.join(REQUIRED)} and LOCAL_RANK for each process; or unset RANK, and Lightning "
            "starts the ranks."
        )
    names = (*REQUIRED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
    numbers = {
        name: parse_number(environ, name)
        for name in names
        if name in environ and name != "MASTER_ADDR"
    }
    rank = numbers["RANK"]
    num_ranks = numbers["WORLD_SIZE"]
    node = numbers.get("NODE_RANK", numbers.get("GROUP_RANK"))
    if not 0 <= rank < num_ranks:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={num_ranks}: ranks are numbered from 0 to WORLD_SIZE - 1."
        )
    if node != numbers.get("GROUP_RANK", node):
        raise ConfigError(
            f"NODE_RANK={node} and GROUP_RANK={numbers['GROUP_RANK']} of rank {rank}: unset one of "
            "them."
        )
    host = environ["MASTER_ADDR"]
    port = numbers["MASTER_PORT"]
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.is_file() else ""
    return Launched(
        launcher="the variables RANK and WORLD_SIZE",
        rank=rank,
        num_ranks=num_ranks,
        local_rank=numbers.get("LOCAL_RANK", 0),
        local_num_ranks=1,
        node=rank,
        num_nodes=num_ranks,
        # Whoever names the loopback has all ranks on this machine.
        point=MeetingPoint(host, (port,), f"environ {host}:{port}", one_node=host in LOOPBACKS),
        place=Place(
            numbers.get("LOCAL_RANK"),
            node,
            numbers.get("LOCAL_WORLD_SIZE"),
            socket.gethostname(),
            machine,
        ),
    )


def count_nodes(launched: Launched, store: Store) -> Launched:
    """Collective. Return a rank's place by what all ranks that were started by hand have in their
    variables.

    store: shared by all ranks. Raises ConfigError on every rank: the ranks' variables contradict
    each other.
    """
    if launched.place is None:
        return launched
    store.set(f"{PLACE}/{launched.rank}", json.dumps(asdict(launched.place)))
    # Collective: every rank waits for what each writes above.
    texts = store.multi_get([f"{PLACE}/{rank}" for rank in range(launched.num_ranks)])
    nodes = find_nodes([Place(**json.loads(text)) for text in texts])
    node = nodes[launched.rank]
    return replace(
        launched, node=node, num_nodes=max(nodes) + 1, local_num_ranks=nodes.count(node), place=None
    )


def find_nodes(places: Sequence[Place]) -> list[int]:
    """Return the node of each rank: by NODE_RANK, or else by host; without LOCAL_RANK each rank is
    a node.

    Raises ConfigError: variables of several ranks contradict each other.
    """
    ranks = range(len(places))
    columns = {
        "LOCAL_RANK": [place.local_rank for place in places],
        "NODE_RANK": [place.node for place in places],
    }
    columns["LOCAL_WORLD_SIZE"] = [place.local_num_ranks for place in places]
    for name, numbers in columns.items():
        absent = [rank for rank in ranks if numbers[rank] is None]
        if 0 < len(absent) < len(places):
            raise ConfigError(
                f"{name} is not set for rank {format_ranks(absent)}, but for others: set it for "
                "all."
            )
    has_node = places[0].node is not None
    has_local_rank = places[0].local_rank is not None
    keys: list[Any] = columns["NODE_RANK"] if has_node else list(ranks)
    if has_local_rank and not has_node:
        # Not by name alone: cloned machines may share one.
        keys = [(place.host, place.machine) for place in places]
    nodes = list(dict.fromkeys(keys))
    if has_node and set(nodes) != set(range(len(nodes))):
        raise ConfigError(
            f"NODE_RANK is {', '.join(map(str, nodes))} on {len(nodes)} nodes: number them from 0."
        )
    for key in nodes:
        members = [rank for rank in ranks if keys[rank] == key]
        node = f"rank {format_ranks(members)} on {places[members[0]].host}"
        if len({places[rank].machine for rank in members}) > 1:
            raise ConfigError(
                f"NODE_RANK={key} for rank {format_ranks(members)}, which are on different "
                "machines."
            )
        local_ranks = [places[rank].local_rank or 0 for rank in members]
        if sorted(local_ranks) != list(range(len(members))):
            raise ConfigError(
                f"LOCAL_RANK is {', '.join(map(str, local_ranks))} for {node}: number the ranks of "
                "each node from 0, and set NODE_RANK if they are on several nodes."
            )
        counts = (None, len(members))
        wrong = [rank for rank in members if places[rank].local_num_ranks not in counts]
        if wrong:
            size = places[wrong[0]].local_num_ranks
            raise ConfigError(
                f"LOCAL_WORLD_SIZE={size} for rank {wrong[0]}, but its node has {len(members)}: "
                f"{node}."
            )
    return [key if has_node else nodes.index(key) for key in keys]


def parse_number(environ: Mapping[str, str], name: str) -> int:
    """Return a variable's number. Raises ConfigError: it has none."""
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(
            f"{name} is {environ.get(name, 'not set')}: the launcher's other variables are set, so "
            "it must be a number."
        ) from None
