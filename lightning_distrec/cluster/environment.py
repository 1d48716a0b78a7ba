"""The cluster environment, in place of the one that Lightning detects.

Lightning detects Slurm by variables that a batch script has as well, counts ranks by the job
instead of the step, and refuses ways to start ranks that it cannot count.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed import Store
from typing_extensions import override

from lightning_distrec.cluster.launched import (
    Launched,
    count_nodes,
    parse_number,
    read_open_mpi,
    read_torchrun,
    read_variables,
)
from lightning_distrec.cluster.slurm import read_srun, refuse_lone_script
from lightning_distrec.errors import ConfigError

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
_launched: list[Launched] = []


def find_launched() -> Launched | None:
    """Return this process's place among the ranks that a launcher started, None without a launcher.
    Raises ConfigError.

    Cached: `Launched.publish` sets the variables that torch reads, after which the launchers look
    alike.
    """
    if not _launched:
        # torchrun and mpirun first: inside of a Slurm job their processes inherit Slurm's
        # variables.
        for find in (read_torchrun, read_open_mpi, read_srun, read_variables):
            launched = find(os.environ)
            if launched is not None:
                _launched.append(launched)
                break
    return _launched[0] if _launched else None


def complete_launched(launched: Launched, store: Store) -> Launched:
    """Collective. Return the place with the nodes counted, and let `find_launched` return it from
    now on.

    store: shared by all ranks. Raises ConfigError on every rank: see `count_nodes`.
    """
    _launched[:] = [count_nodes(launched, store)]
    return _launched[0]


def choose_environment() -> ClusterEnvironment:
    """Return the environment of this process.

    Raises ConfigError: a script of several nodes was started without srun; see `Launched` for
    others.
    """
    launched = find_launched()
    if launched is not None:
        return SlurmRanks(launched) if launched.is_step else LaunchedRanks(launched)
    # After the launchers: torchrun and mpirun start ranks on several nodes without srun.
    refuse_lone_script(os.environ)
    kind = next(
        (kind for kind in (LSFEnvironment, MPIEnvironment) if kind.detect()), LightningEnvironment
    )
    return kind()


class LaunchedRanks(ClusterEnvironment):
    """The ranks that a launcher started, by its own count."""

    def __init__(self, launched: Launched) -> None:
        super().__init__()
        self.launched = launched

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self.launched.point.host

    @property
    @override
    def main_port(self) -> int:
        return self.launched.point.ports[0]

    @staticmethod
    @override
    def detect() -> bool:
        return find_launched() is not None

    @override
    def world_size(self) -> int:
        return self.launched.num_ranks

    # Lightning sets the numbers that it has counted by the Trainer's devices and nodes; the
    # launcher's stay.

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return self.launched.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return self.launched.local_rank

    @override
    def node_rank(self) -> int:
        return self.launched.node

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing: `check_numbers` does it."""


class SlurmRanks(LaunchedRanks, SLURMEnvironment):
    """The tasks of one Slurm step. A SLURMEnvironment, so that Lightning sees a Slurm job (its id,
    its signals)."""

    def __init__(self, launched: Launched) -> None:
        SLURMEnvironment.__init__(self)  # not by super(): LaunchedRanks takes other arguments
        self.launched = launched

    # Lightning's checks look at the job's variables, and warn of steps that are smaller.
    # `check_numbers` knows better.

    @staticmethod
    @override
    def _validate_srun_used() -> None:
        pass

    @staticmethod
    @override
    def _validate_srun_variables() -> None:
        pass


def check_numbers(launched: Launched, num_devices: int, num_available: int, num_nodes: int) -> None:
    """Raise ConfigError: the Trainer's numbers are none of the launcher's, which count.

    num_available: what devices="auto" means. num_nodes: 1 is the Trainer's default, and ignored.
    """
    num_ranks = launched.local_num_ranks
    launcher = launched.launcher
    if num_nodes not in (1, launched.num_nodes):
        raise ConfigError(
            f"Trainer(num_nodes={num_nodes}), but {launcher} started ranks on {launched.num_nodes} "
            "nodes. Leave num_nodes out: the launcher's own number counts."
        )
    if num_devices not in (1, num_ranks, num_available):
        raise ConfigError(
            f"Trainer(devices={num_devices}), but {launcher} started {num_ranks} ranks on node "
            f"{launched.node}. Start as many, or leave devices out: the launcher's own number "
            "counts."
        )
    if num_devices > num_ranks and launched.rank == 0:
        idle = num_devices - num_ranks
        rank_zero_warn(
            f"{launcher} started {num_ranks} ranks on a node with {num_devices} devices: {idle} "
            "stay idle."
        )


def check_variables(environ: Mapping[str, str], num_devices: int, num_nodes: int) -> None:
    """Raise ConfigError: LOCAL_RANK lets Lightning start no ranks, and there is no RANK by which
    the variables count.

    environ: the environment. Lightning then counts by the Trainer's numbers alone, and would train
    other ranks.
    """
    num_ranks = num_nodes * num_devices
    local_rank = parse_number(environ, "LOCAL_RANK")
    if environ.get("WORLD_SIZE", str(num_ranks)) != str(num_ranks) or local_rank >= num_devices:
        size = f" and WORLD_SIZE={environ['WORLD_SIZE']}" if "WORLD_SIZE" in environ else ""
        raise ConfigError(
            f"LOCAL_RANK={local_rank}{size}, but Trainer(num_nodes={num_nodes}, "
            f"devices={num_devices}) has {num_ranks} ranks, and RANK is not set. Set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT too; or unset LOCAL_RANK, and Lightning "
            "starts the ranks."
        )


def publish_ranks(environment: ClusterEnvironment | None, ranks_on_node: int) -> int:
    """Set the variables that torch reads where a launcher has not, and return the number of ranks
    on this node."""
    if isinstance(environment, LaunchedRanks):
        environment.launched.publish()
        return environment.launched.local_num_ranks
    # Lightning's own, which a user has passed as a plugin; torchrun has set the variables.
    if isinstance(environment, TorchElasticEnvironment) and LOCAL_WORLD_SIZE in os.environ:
        return int(os.environ[LOCAL_WORLD_SIZE])
    return ranks_on_node


@contextmanager
def local_world_size(num_local_ranks: int) -> Iterator[None]:
    """Set LOCAL_WORLD_SIZE for the length of a run, as neither Lightning's launcher nor srun does.

    Unset, torchrec takes 8 wherever the world size divides by 8 (torchrec/distributed/comm.py,
    get_local_size), so that 4 nodes of 4 ranks would be planned as 2 nodes of 8.
    """
    # Put back after the run: later Trainers of this process may have another number of ranks.
    with restored_variables([LOCAL_WORLD_SIZE]):
        os.environ[LOCAL_WORLD_SIZE] = str(num_local_ranks)
        yield


@contextmanager
def restored_variables(names: Iterable[str]) -> Iterator[None]:
    """Put environment variables back after the context."""
    earlier = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in earlier.items():
            # Cleared first: a variable that was not set before must not be left empty.
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
