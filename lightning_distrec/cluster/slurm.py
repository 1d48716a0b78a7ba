"""Slurm: what it passes to each task of a step, and how a job is requeued."""

import contextlib
import itertools
import os
import re
import socket
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path

from lightning_distrec.cluster.launched import Launched, MeetingPoint, parse_number
from lightning_distrec.errors import ConfigError

NO_STEPS = ("4294967290", "4294967291", "4294967292", "4294967293", "4294967294", "4294967295")
"""Step ids of other things than srun's tasks: an interactive shell, a batch script and others.
Source: slurm.h."""
AS_THE_STEP = {
    "SLURM_NTASKS": "SLURM_STEP_NUM_TASKS",
    "SLURM_NNODES": "SLURM_STEP_NUM_NODES",
    "SLURM_TASKS_PER_NODE": "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST": "SLURM_STEP_NODELIST",
}
"""Variable of a process -> variable of its step: equal in the tasks of a step. Seen in Slurm
22.05."""
FIRST_PORT = 20_000
NUM_PORTS = 10_000
NUM_TRIES = 8
"""Ports to listen at: below those that systems use for outgoing connections."""
SCONTROL_SECONDS = 30.0


def read_srun(environ: Mapping[str, str]) -> Launched | None:
    """Return what Slurm passes to a task that srun started, None for a script or a shell, for
    example.

    environ: the environment. The step's own numbers count: it may be smaller than the job.
    Raises ConfigError: the name of the first node cannot be resolved.
    """
    if not in_step(environ):
        return None
    nodes = expand_hosts(environ["SLURM_STEP_NODELIST"])
    per_node = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    node = parse_number(environ, "SLURM_NODEID")
    nodes_by_rank = _find_nodes_by_rank(environ, nodes, per_node)
    # Clusters that share a file system count their jobs alike.
    cluster = (
        [re.sub(r"\W", "_", environ["SLURM_CLUSTER_NAME"])]
        if environ.get("SLURM_CLUSTER_NAME")
        else []
    )
    return Launched(
        launcher=f"Slurm, step {environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}",
        rank=parse_number(environ, "SLURM_PROCID"),
        num_ranks=parse_number(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=parse_number(environ, "SLURM_LOCALID"),
        local_num_ranks=per_node[node],
        node=node,
        num_nodes=len(per_node),
        point=_find_meeting_point(environ, nodes_by_rank, nodes),
        is_step=True,
        job="-".join(["slurm", *cluster, environ["SLURM_JOB_ID"]]),
        attempt=int(environ.get("SLURM_RESTART_COUNT", "0")),
        nodes=nodes_by_rank,
    )


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task of a step, and not as an interactive shell.

    A batch script that was submitted from inside of a step inherits that step's variables. Those
    that Slurm sets for every process, in a step or not, then differ from them. Raises ConfigError:
    those of the nodes do not fit together.
    """
    needed = (
        *AS_THE_STEP.values(),
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_JOB_ID",
    )
    if any(name not in environ for name in needed) or environ["SLURM_STEP_ID"] in NO_STEPS:
        return False
    if any(
        environ.get(name, environ[step_name]) != environ[step_name]
        for name, step_name in AS_THE_STEP.items()
    ):
        return False
    if environ["SLURM_STEP_NUM_TASKS"] == "1" and "SLURM_PTY_PORT" in environ:
        return False  # probably srun --pty bash; for a single rank it makes no difference
    # A batch script has GTIDS of its own node's task alone, whatever it has inherited.
    tasks = environ["SLURM_STEP_TASKS_PER_NODE"]
    nodelist = environ["SLURM_STEP_NODELIST"]
    per_node = expand_counts(tasks)
    node = parse_number(environ, "SLURM_NODEID")
    if not node < len(per_node) == len(expand_hosts(nodelist)):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodelist}, SLURM_STEP_TASKS_PER_NODE={tasks} and "
            f"SLURM_NODEID={node} (from 0) are not of one step's nodes. Start the ranks with srun, "
            "and leave the variables as it sets them."
        )
    return "SLURM_GTIDS" not in environ or len(environ["SLURM_GTIDS"].split(",")) == per_node[node]


def refuse_lone_script(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where a job of several nodes runs its program on one of them, without
    srun."""
    num_nodes = int(environ.get("SLURM_NNODES", "1"))
    if "SLURM_JOB_ID" in environ and num_nodes > 1:
        raise ConfigError(
            f"Slurm gave this job {num_nodes} nodes, and this process was started on one of them "
            "alone. Start it with srun, as `srun python ...`; --ntasks-per-node sets the number of "
            "ranks per node."
        )


def expand_hosts(nodelist: str) -> list[str]:
    """Return the names in a list such as `rack[1-2]n[05-07],login`; a container has no scontrol
    that would do it."""
    names = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", word)  # text and ranges in turns
        choices = []
        for index, part in enumerate(parts):
            choices.append(_expand_ranges(part) if index % 2 else [part])
        names += list(map("".join, itertools.product(*choices)))
    return names


def expand_counts(tasks_per_node: str) -> list[int]:
    """Return the numbers in Slurm's short form: `2(x3),1` is 2, 2, 2, 1."""
    numbers = []
    for word in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if not match:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} cannot be parsed.")
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def requeue() -> str:
    """Let Slurm requeue this job, which stops it; returns why that failed, or ""."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return "it is not a Slurm job"
    if array is not None:
        # An array's number is the job id of one of its tasks, too: by it alone, all tasks would be
        # requeued.
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=SCONTROL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"scontrol: {error}"
    return f"scontrol requeue {job}: {done.stderr.strip()}" if done.returncode else ""


def _find_nodes_by_rank(
    environ: Mapping[str, str], nodes: list[str], per_node: list[int]
) -> tuple[str, ...]:
    """Return the node of each rank; () where its order is not known."""
    distribution = environ.get("SLURM_DISTRIBUTION", "")
    if distribution.startswith("arbitrary"):
        try:
            return tuple(Path(environ["SLURM_HOSTFILE"]).read_text().replace(",", " ").split())
        except (KeyError, OSError):
            return ()
    tasks = [[node] * count for node, count in zip(nodes, per_node, strict=True)]
    block = tuple(itertools.chain(*tasks))
    cyclic = tuple(node for node in itertools.chain(*itertools.zip_longest(*tasks)) if node)
    # Slurm does not always name the distribution; the ranks of this node show which it is.
    local_ranks = environ.get("SLURM_GTIDS", "")
    local_node = nodes[parse_number(environ, "SLURM_NODEID")]
    for order in (cyclic, block) if distribution.startswith("cyclic") else (block, cyclic):
        expected_ranks = ",".join(
            str(rank) for rank, node in enumerate(order) if node == local_node
        )
        if local_ranks in ("", expected_ranks):
            return order
    return ()


def _find_meeting_point(
    environ: Mapping[str, str], nodes_by_rank: tuple[str, ...], nodes: list[str]
) -> MeetingPoint:
    # Steps of two components of a heterogeneous job may share their numbers, but not their nodes.
    step = (
        f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']} on {environ['SLURM_STEP_NODELIST']}"
    )
    identity = f"slurm {step} restart {environ.get('SLURM_RESTART_COUNT', '0')}"
    is_arbitrary = environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    if not nodes_by_rank and is_arbitrary and "MASTER_ADDR" not in environ:
        raise ConfigError(
            "srun --distribution=arbitrary, and SLURM_HOSTFILE cannot be read here: the node of "
            "rank 0 is unknown. Set MASTER_ADDR to it, for all ranks."
        )
    host = environ.get("MASTER_ADDR") or _find_address(
        nodes_by_rank[0] if nodes_by_rank else nodes[0]
    )
    if "MASTER_PORT" in environ:
        return MeetingPoint(host, (parse_number(environ, "MASTER_PORT"),), identity)
    # All ranks compute the same ports, jobs that share a node begin at different ones, and 37 is no
    # divisor of their number.
    begin = zlib.crc32(identity.encode())
    ports = tuple(FIRST_PORT + (begin + 37 * trial) % NUM_PORTS for trial in range(NUM_TRIES))
    return MeetingPoint(host, ports, identity)


def _find_address(node: str) -> str:
    """Return a name or address by which `node` can be reached."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        output = ""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = ["scontrol", "show", "node", "-o", node]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_SECONDS)
            output = done.stdout
        match = re.search(r"NodeAddr=(\S+)", output)
    if not match:
        raise ConfigError(
            f"the name of the first node, {node}, cannot be resolved, and scontrol has no address "
            "for it. Set MASTER_ADDR, for all ranks, to an address that the other nodes can reach."
        )
    return match[1]


def _expand_ranges(ranges: str) -> list[str]:
    numbers = []
    for word in ranges.split(","):
        first, _, last = word.partition("-")
        for value in range(int(first), int(last or first) + 1):
            numbers.append(f"{value:0{len(first)}d}")
    return numbers
