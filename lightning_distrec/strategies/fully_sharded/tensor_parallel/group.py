"""The ranks that compute one batch together: what they must have alike, and whom a run's sums are taken over."""

from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from lightning_distrec.checkpoint.generators import generator_states, set_generator_states
from lightning_distrec.cluster.consensus import Consensus, RankFlags
from lightning_distrec.errors import DataError, UnsupportedError

CLOSE = 1e-3
"""How far the losses of a group's ranks may be from each other; kernels that add in any order differ by less."""


class TensorParallelGroup:
    """One group of a run, as seen by one of its ranks."""

    def __init__(self, mesh: DeviceMesh, timeout_seconds: float) -> None:
        """Collective. mesh: (data_parallel, tensor_parallel)."""
        self.mesh = mesh["tensor_parallel"]
        self.replicas = mesh["data_parallel"].get_group()
        """Process group of the ranks with the same part of the weights, one of each group: for metrics and sums."""
        self.replica, _ = mesh.get_coordinate() or [0, 0]
        self.num_replicas, self.size = mesh.shape
        self._ranks = Consensus(timeout_seconds, RankFlags(), self.mesh.mesh.tolist())
        self._has_begun = False
        self._checks_loss = False

    def begin_run(self) -> None:
        """Check the first step of a run."""
        self._has_begun = False

    def begin_step(self, args: tuple[Any, ...]) -> None:
        """Collective in the first step of a run, and where args[1], the number of the batch, is 0.

        Gives the ranks one state of the random generators in the first step: a job that does not seed itself has ranks
        with states of their own. Raises DataError, UnsupportedError on every rank: batches or states differ.
        """
        if self._has_begun and not (len(args) > 1 and args[1] == 0):
            return
        if not self._has_begun:
            self._has_begun = True
            set_generator_states(self._ranks.all_gather(generator_states())[0])
        sums: list[float] = []
        apply_to_collection(args[:1], Tensor, lambda tensor: sums.append(float(tensor.detach().double().sum())))
        state = crc32(repr(generator_states()).encode(), crc32(torch.get_rng_state().numpy().tobytes()))
        of_ranks = self._ranks.all_gather((sums, state))
        if any(repr(of_rank[0]) != repr(sums) for of_rank in of_ranks):
            raise DataError(
                "tensor_parallel: the ranks of a group have different batches. Let the Trainer make the sampler, or "
                "give yours num_replicas and rank of trainer.distributed_sampler_kwargs."
            )
        if any(of_rank[1] != state for of_rank in of_ranks):
            raise UnsupportedError(
                "tensor_parallel: random generators have different states on the ranks of a group, so that they would "
                "draw other numbers in a step. Between steps (in callbacks, in hooks), draw on all ranks alike, or "
                "from a generator of your own."
            )
        self._checks_loss = True

    def check_loss(self, loss: Tensor) -> None:
        """Collective where begin_step was. Raises UnsupportedError: the ranks have computed different losses."""
        if not self._checks_loss:
            return
        self._checks_loss = False
        of_ranks = [float(of_rank) for of_rank in self._ranks.all_gather(float(loss.detach()))]
        if any(abs(of_rank - of_ranks[0]) > CLOSE * max(1.0, abs(of_ranks[0])) for of_rank in of_ranks):
            raise UnsupportedError(
                f"tensor_parallel: the ranks of a group have different losses of one batch, {of_ranks}. What a step "
                "computes must not depend on the rank."
            )

    def sync_metrics(self, module: nn.Module) -> Callable[[], None]:
        """Let metrics count each batch once, not on every rank of its group; returns an undo."""
        metrics = [m for m in module.modules() if isinstance(m, Metric) and m.process_group is None]
        for metric in metrics:
            metric.process_group = self.replicas

        def undo() -> None:
            for metric in metrics:
                metric.process_group = None

        return undo
