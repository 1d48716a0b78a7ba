"""The ranks of a strategy: as many as were launched, wherever Lightning counts devices and nodes."""

import functools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_info
from typing_extensions import override

from lightning_distrec._compat.lightning import resume_from
from lightning_distrec.cluster.consensus import CONTINUE, Consensus, consensus_of_all_ranks
from lightning_distrec.cluster.environment import LaunchedRanks, check_numbers, publish_local_world_size
from lightning_distrec.cluster.interface import GLOO, choose_interface
from lightning_distrec.cluster.launched import Launched
from lightning_distrec.cluster.rendezvous import MeetingPoint, meet
from lightning_distrec.cluster.threads import VARIABLE, cpus_of_this_process, num_threads, use_threads
from lightning_distrec.strategies.checkpoints.job_checkpoint import JobCheckpoint, next_fit
from lightning_distrec.strategies.run.watchdog import start_watchdog, watched
from lightning_distrec.units import quantity


class RanksFromLauncher(DDPStrategy):
    """A strategy whose ranks are those that the cluster environment counts."""

    takes_launched_ranks = True
    """Read by `lightning_distrec`, before Lightning chooses a cluster environment."""
    _resumes = True
    _watchdog_seconds = 30.0
    _sets_threads = False
    job_checkpoint = JobCheckpoint(".", "")
    """What this job saves when it is asked to leave, and goes on from."""
    num_local_ranks = 1
    """Ranks on this node, once the ranks have met."""

    @property
    def launched(self) -> Launched | None:
        """What the launcher told this process; None under Lightning's own launcher, or a plugin of the user's."""
        environment = self.cluster_environment
        return environment.launched if isinstance(environment, LaunchedRanks) else None

    @property
    def num_nodes(self) -> int:
        """Nodes that ranks are on."""
        return self._num_nodes if self.launched is None else self.launched.num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    @override
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        assert devices
        # A task that may see one device alone (--gpus-per-task, --gpu-bind) has that, whatever its number.
        return devices[self.local_rank % len(devices)]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def _waits(self) -> timedelta:
        """How long a rank waits for the others."""
        assert self._timeout is not None
        return self._timeout

    def all_ranks(self) -> tuple[Consensus, Consensus]:
        """Return what all ranks agree by, and what they do at each step, once the ranks have met."""
        return consensus_of_all_ranks(self._waits.total_seconds())

    @override
    def _configure_launcher(self) -> None:
        self._sets_threads = self.launched is not None and VARIABLE not in os.environ  # Lightning's launcher sets it
        if self.launched is not None:
            assert self.accelerator is not None
            assert self.parallel_devices is not None
            available = self.accelerator.auto_device_count()
            check_numbers(self.launched, len(self.parallel_devices), available, self._num_nodes)
        super()._configure_launcher()
        launcher: Any = self._launcher
        launch = launcher.launch

        def prepare_and_launch(function: Any, *args: Any, trainer: Any = None, **options: Any) -> Any:
            if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
                self._before_fit(trainer)
            with watched(trainer, self._all_leave):
                return launch(function, *args, trainer=trainer, **options)

        launcher.launch = prepare_and_launch

    def _all_leave(self) -> bool:
        """Whether all ranks know that one was asked to stop."""
        return dist.is_initialized() and self.all_ranks()[0].flags.agreed != CONTINUE

    def _before_fit(self, trainer: Trainer) -> None:
        job = self.launched.job if self.launched else ""
        self.job_checkpoint = checkpoint = JobCheckpoint(trainer.default_root_dir, job, next_fit())

        @functools.cache
        def found() -> str | None:
            if not job or not self._resumes:
                return None
            self.setup_environment()  # rank 0 decides, so the ranks must have met
            return checkpoint.found(self.all_ranks()[0])

        resume_from(trainer, found)

    @override
    def setup_distributed(self) -> None:
        """Collective. Meet the other ranks and make the process group, unless there is one.

        Raises RendezvousError: not all ranks arrive within the timeout.
        """
        reset_seed()
        self.set_world_ranks()
        environment = self.cluster_environment
        assert environment is not None
        self._process_group_backend = backend = self._get_process_group_backend()
        self.num_local_ranks = publish_local_world_size(environment, self.num_processes)
        if dist.is_initialized():
            return
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        point = _meeting_point(environment)
        nodes = self.launched.nodes if self.launched else ()
        rank, num_ranks = self.global_rank, self.world_size
        store = meet(point, rank, num_ranks, self._waits.total_seconds(), self._say, nodes)
        if self.num_nodes > 1:
            os.environ |= choose_interface(store, rank, num_ranks, point.host, backend, os.environ)
        device = self.root_device
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=self._waits,
            device_id=None if device.type == "cpu" else device,
        )
        if num_ranks > 1:
            start_watchdog(rank, point.host, store, self._watchdog_seconds, nodes)
        if self._sets_threads:
            ranks = self.all_ranks()[0].all_gather(cpus_of_this_process(self.node_rank))
            use_threads(num_threads(ranks, self.global_rank, os.environ))
        by = self.launched.by if self.launched else type(environment).__name__.removesuffix("Environment")
        total = f"{quantity(self.world_size, 'rank')} on {quantity(self.num_nodes, 'node')}"
        over = f" over {os.environ[GLOO]}" if self.num_nodes > 1 and os.environ.get(GLOO) else ""
        rank_zero_info(f"{total}, started by {by}, exchange by {backend}{over}.")

    def _say(self, what: str) -> None:
        print(rank_prefixed_message(what, self.global_rank), flush=True)


def _meeting_point(environment: ClusterEnvironment) -> MeetingPoint:
    if isinstance(environment, LaunchedRanks):
        return environment.launched.point
    return MeetingPoint(environment.main_address, (environment.main_port,), type(environment).__name__)
