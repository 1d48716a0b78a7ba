"""What parameters need that FSDP2 shards over the ranks: bytes of memory per rank, and bytes that a rank sends."""

import math

from lightning_distrec.strategies.estimates.module_sizes import Job, ParameterSize
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions, choose_dtypes, num_replicas


class ShardedBytes:
    """How parameters are sharded, gathered and freed in a job.

    Raises UnsupportedError or ConfigError, as training does.
    """

    def __init__(self, job: Job, options: FSDPOptions | None = None) -> None:
        self._job, self._options = job, options or FSDPOptions()
        self._dtypes = choose_dtypes(self._options, job.precision)
        ranks_on_node = [job.num_ranks // job.num_nodes] * job.num_ranks
        self._replicas = num_replicas(self._options.replicas, ranks_on_node)
        self._ranks = job.num_ranks // self._replicas

    def memory(self, parameters: list[ParameterSize]) -> dict[str, float]:
        """Return use of memory -> bytes."""
        memory = {"parameters": 0.0, "gradients": 0.0, "optimizer state": 0.0}
        weights: dict[int | None, float] = {}
        gradients: dict[int | None, float] = {}
        for parameter in parameters:
            itemsize, local_numel = self._job.itemsize(parameter), self._local_numel(parameter)
            memory["parameters"] += local_numel * itemsize
            memory["optimizer state"] += parameter.state_numel * itemsize * local_numel / max(parameter.numel, 1)
            memory["gradients"] += local_numel * itemsize if parameter.requires_grad else 0
            if parameter.is_sharded:
                gathered = parameter.numel * self._gathered_itemsize(parameter)
                weights[parameter.block] = weights.get(parameter.block, 0.0) + gathered
                # The gradient before reduce-scatter.
                learning = gathered if parameter.requires_grad else 0.0
                gradients[parameter.block] = gradients.get(parameter.block, 0.0) + learning
        if self._ranks > 1:
            of_root = weights.pop(None, 0.0) + gradients.pop(None, 0.0)
            memory["gathered"] = of_root + self._max_gathered(weights, gradients)
        return memory

    def _max_gathered(self, weights: dict[int | None, float], gradients: dict[int | None, float]) -> float:
        """Return the bytes of blocks that are gathered at once at the peak: one, unless all stay."""
        if self._options.reshard_after_forward is False:
            return sum(weights.values()) + max(gradients.values(), default=0.0)
        return max((weights[block] + gradients[block] for block in weights), default=0.0)

    def sent(self, parameters: list[ParameterSize]) -> dict[str, float]:
        """Return the bytes of all-gathers and reduce-scatters, and of what replicas average.

        Blocks are gathered twice, but for those whose parameters backward reuses.
        """
        last = max((p.block for p in parameters if p.block is not None), default=None)
        gathered = scattered = averaged = replicated = 0.0
        for parameter in parameters:
            itemsize = self._job.itemsize(parameter)
            if not parameter.is_sharded:
                averaged += parameter.numel * itemsize if parameter.requires_grad else 0
                continue
            numel = self._local_numel(parameter) * self._ranks
            gathered_itemsize = self._gathered_itemsize(parameter)
            gathered += self._times(parameter, last) * numel * gathered_itemsize
            if parameter.requires_grad:
                reduce = self._dtypes.reduce
                reduced = numel * (gathered_itemsize if reduce is None else reduce.itemsize)
                scattered += reduced
                replicated += reduced / self._ranks
        share, between = (self._ranks - 1) / self._ranks, 2 * (self._replicas - 1) / self._replicas
        over_all = 2 * (self._job.num_ranks - 1) / self._job.num_ranks  # of those that are not sharded
        return {
            "gathered parameters": share * gathered,
            "dense gradients": share * scattered + between * replicated + over_all * averaged,
        }

    def _times(self, parameter: ParameterSize, last: int | None) -> int:
        wanted = self._options.reshard_after_forward
        is_in_block = parameter.block is not None
        is_kept = is_in_block and (wanted is False or (wanted == "auto" and parameter.block == last))
        return 1 if is_kept else 2

    def _gathered_itemsize(self, parameter: ParameterSize) -> int:
        is_own = self._dtypes.param is None or (parameter.block is None and self._dtypes.casts)
        return self._job.itemsize(parameter) if is_own else self._dtypes.param.itemsize  # type: ignore[union-attr]

    def _local_numel(self, parameter: ParameterSize) -> int:
        """Return a parameter's elements on one rank: FSDP2 shards dim 0, padded to the same on all ranks."""
        if not parameter.is_sharded or not parameter.rows:
            return parameter.numel
        return math.ceil(parameter.rows / self._ranks) * (parameter.numel // parameter.rows)
