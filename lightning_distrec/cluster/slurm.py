"""What Slurm passes to each task of a step: its rank, its node, and where rank 0 is."""

import os
import re
import socket
import subprocess
import zlib
from collections.abc import Mapping
from itertools import zip_longest

from lightning_distrec.cluster.launched import Launched, number
from lightning_distrec.cluster.rendezvous import MeetingPoint
from lightning_distrec.errors import ConfigError

NO_STEPS = ("4294967290", "4294967291", "4294967292", "4294967293", "4294967294", "4294967295")
"""Step ids of other things than srun's tasks: an interactive shell, a batch script and others. Source: slurm.h."""
AS_THE_STEP = {
    "SLURM_NTASKS": "SLURM_STEP_NUM_TASKS",
    "SLURM_NNODES": "SLURM_STEP_NUM_NODES",
    "SLURM_TASKS_PER_NODE": "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST": "SLURM_STEP_NODELIST",
}
"""Variable of a process -> variable of its step: equal in the tasks of a step. Seen in Slurm 22.05."""
FIRST_PORT, NUM_PORTS, NUM_TRIES = 20_000, 10_000, 8
"""Ports to listen at: below those that systems use for outgoing connections."""
SCONTROL_SECONDS = 30.0


def by_srun(given: Mapping[str, str]) -> Launched | None:
    """Return what Slurm passes to a task that srun started, None for a script or a shell, for example.

    given: the environment's variables. The step's own numbers count: it may be smaller than the job.
    Raises ConfigError: the name of the first node cannot be resolved.
    """
    if not in_step(given):
        return None
    nodes = hosts(given["SLURM_STEP_NODELIST"])
    per_node = counts(given["SLURM_STEP_TASKS_PER_NODE"])
    node = number(given, "SLURM_NODEID")
    by_rank = _nodes_by_rank(given, nodes, per_node)
    return Launched(
        by=f"Slurm, step {given['SLURM_JOB_ID']}.{given['SLURM_STEP_ID']}",
        rank=number(given, "SLURM_PROCID"),
        num_ranks=number(given, "SLURM_STEP_NUM_TASKS"),
        local_rank=number(given, "SLURM_LOCALID"),
        local_num_ranks=per_node[node],
        node=node,
        num_nodes=len(per_node),
        point=_meeting_point(given, by_rank, nodes),
        is_step=True,
        job=f"slurm-{_name_of_cluster(given)}{given['SLURM_JOB_ID']}",
        attempt=int(given.get("SLURM_RESTART_COUNT", "0")),
        nodes=by_rank,
    )


def in_step(given: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task of a step, and not as an interactive shell.

    A batch script that was submitted from inside of a step inherits that step's variables. Those that Slurm sets for
    every process, in a step or not, then differ from them.
    """
    needed = (*AS_THE_STEP.values(), "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")
    if any(name not in given for name in needed) or given["SLURM_STEP_ID"] in NO_STEPS:
        return False
    if any(given.get(name, given[of_step]) != given[of_step] for name, of_step in AS_THE_STEP.items()):
        return False
    if given["SLURM_STEP_NUM_TASKS"] == "1" and "SLURM_PTY_PORT" in given:
        return False  # probably srun --pty bash; for a single rank it makes no difference
    per_node, node = counts(given["SLURM_STEP_TASKS_PER_NODE"]), number(given, "SLURM_NODEID")
    return "SLURM_GTIDS" not in given or len(given["SLURM_GTIDS"].split(",")) == per_node[node]


def refuse_lone_script(given: Mapping[str, str]) -> None:
    """Raise ConfigError where a job of several nodes runs its program on one of them, without srun."""
    num_nodes = int(given.get("SLURM_NNODES", "1"))
    if "SLURM_JOB_ID" in given and num_nodes > 1:
        raise ConfigError(
            f"Slurm gave this job {num_nodes} nodes, and this process was started on one of them alone. Start it with "
            "srun, as `srun python ...`; set the number of ranks per node with --ntasks-per-node when requesting the "
            "nodes."
        )


def hosts(nodelist: str) -> list[str]:
    """Return the names in a list such as `rack[1-2]n[05-07],login`.

    Slurm's own scontrol expands it; where that is missing, the list is parsed here.
    """
    names = _scontrol("show", "hostnames", nodelist)
    return names.split() if names else _expanded(nodelist)


def counts(tasks_per_node: str) -> list[int]:
    """Return the numbers in Slurm's short form: `2(x3),1` is 2, 2, 2, 1."""
    numbers = []
    for word in tasks_per_node.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if not found:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} cannot be parsed.")
        numbers += [int(found[1])] * int(found[2] or 1)
    return numbers


def requeue() -> str:
    """Let Slurm requeue this job, which stops it; returns why that failed, or nothing."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID")
    if job is None:
        return "it is not a Slurm job"
    if array is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=SCONTROL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"scontrol: {error}"
    return f"scontrol requeue {job}: {done.stderr.strip()}" if done.returncode else ""


def _name_of_cluster(given: Mapping[str, str]) -> str:
    """Return a part of a job's name: clusters that share a file system count their jobs alike."""
    name = re.sub(r"\W", "_", given.get("SLURM_CLUSTER_NAME", ""))
    return f"{name}-" if name else ""


def _nodes_by_rank(given: Mapping[str, str], nodes: list[str], per_node: list[int]) -> tuple[str, ...]:
    """Return the node of each rank; () where its order is not known."""
    block = tuple(node for node, count in zip(nodes, per_node, strict=True) for _ in range(count))
    rounds = zip_longest(*([node] * count for node, count in zip(nodes, per_node, strict=True)))
    cyclic = tuple(node for of_round in rounds for node in of_round if node)
    if given.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return _arbitrary(given)
    # Slurm does not always name the distribution; the ranks of this node show which it is.
    here = [rank for rank in given.get("SLURM_GTIDS", "").split(",") if rank]
    for order in (cyclic, block) if given.get("SLURM_DISTRIBUTION", "").startswith("cyclic") else (block, cyclic):
        mine = [str(rank) for rank, node in enumerate(order) if node == nodes[number(given, "SLURM_NODEID")]]
        if not here or here == mine:
            return order
    return ()


def _arbitrary(given: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes in the order of SLURM_HOSTFILE."""
    try:
        with open(given["SLURM_HOSTFILE"]) as file:
            return tuple(re.split(r"[\s,]+", file.read().strip()))
    except (KeyError, OSError):
        return ()


def _meeting_point(given: Mapping[str, str], by_rank: tuple[str, ...], nodes: list[str]) -> MeetingPoint:
    # Steps of two components of a heterogeneous job may share their numbers, but not their nodes.
    step = f"{given['SLURM_JOB_ID']}.{given['SLURM_STEP_ID']} on {given['SLURM_STEP_NODELIST']}"
    identity = f"slurm {step} restart {given.get('SLURM_RESTART_COUNT', '0')}"
    if not by_rank and given.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") and "MASTER_ADDR" not in given:
        raise ConfigError(
            "srun --distribution=arbitrary, and SLURM_HOSTFILE cannot be read here: the node of rank 0 is unknown. Set "
            "MASTER_ADDR to it, for all ranks."
        )
    host = given.get("MASTER_ADDR") or _address(by_rank[0] if by_rank else nodes[0])
    if "MASTER_PORT" in given:
        return MeetingPoint(host, (number(given, "MASTER_PORT"),), identity)
    begin = zlib.crc32(identity.encode())
    ports = tuple(FIRST_PORT + (begin + 37 * trial) % NUM_PORTS for trial in range(NUM_TRIES))
    return MeetingPoint(host, ports, identity)


def _address(node: str) -> str:
    """Return a name or address by which `node` can be reached."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        found = re.search(r"NodeAddr=(\S+)", _scontrol("show", "node", "-o", node))
    if not found:
        raise ConfigError(
            f"the name of the first node, {node}, cannot be resolved, and scontrol has no address for it. Set "
            "MASTER_ADDR, for all ranks, to an address that the other nodes can reach."
        )
    return found[1]


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=SCONTROL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _expanded(nodelist: str) -> list[str]:
    names = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", word)
        expanded = [parts[0]]
        for ranges, rest in zip(parts[1::2], parts[2::2], strict=True):
            expanded = [f"{head}{one}{rest}" for head in expanded for one in _numbers(ranges)]
        names += expanded
    return names


def _numbers(ranges: str) -> list[str]:
    found = []
    for word in ranges.split(","):
        first, _, last = word.partition("-")
        found += [f"{value:0{len(first)}d}" for value in range(int(first), int(last or first) + 1)]
    return found
