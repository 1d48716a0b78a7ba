"""What each strategy needs for a module: bytes of memory per rank, and bytes that a rank sends per
step.

Estimated from sizes, without ranks. Sent bytes are those of ring collectives, and of all-to-alls
among equal ranks."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from lightning_distrec.errors import DistRecError
from lightning_distrec.strategies.data_parallel.activations import ActivationCheckpointing
from lightning_distrec.strategies.data_parallel.gradient_exchange import sent_numbers
from lightning_distrec.strategies.estimates.dense_options import DenseOptions
from lightning_distrec.strategies.estimates.module_sizes import Job, ModuleSizes, ParameterSize
from lightning_distrec.strategies.estimates.step_profile import StepProfile
from lightning_distrec.strategies.fully_sharded.fsdp_options import (
    FSDPOptions,
    choose_dtypes,
    num_replicas,
)


class ShardedBytes:
    """How parameters are sharded, gathered and freed in a job. Raises as training does."""

    def __init__(self, job: Job, options: FSDPOptions | None = None) -> None:
        self._job, self._options = job, options or FSDPOptions()
        self._dtypes = choose_dtypes(self._options, job.precision)
        ranks_on_node = [job.num_ranks // job.num_nodes] * job.num_ranks
        self._replicas = num_replicas(self._options.replicas, ranks_on_node)
        self._ranks = job.num_ranks // self._replicas

    def memory(self, parameters: list[ParameterSize]) -> dict[str, float]:
        """Return use of memory -> bytes."""
        memory = {"parameters": 0.0, "gradients": 0.0, "optimizer state": 0.0}
        weights: dict[int | None, float] = defaultdict(float)
        gradients: dict[int | None, float] = defaultdict(float)
        for parameter in parameters:
            itemsize, local_numel = self._job.itemsize(parameter), self._local_numel(parameter)
            memory["parameters"] += local_numel * itemsize
            # The state is sharded as its parameter is.
            memory["optimizer state"] += (
                parameter.state_numel * itemsize * local_numel / max(parameter.numel, 1)
            )
            memory["gradients"] += local_numel * itemsize if parameter.requires_grad else 0
            if parameter.is_sharded:
                gathered = parameter.numel * self._gathered_itemsize(parameter)
                weights[parameter.block] += gathered
                gradients[parameter.block] += gathered if parameter.requires_grad else 0.0
        if self._ranks > 1:
            # The root's parameters stay gathered for the whole step. Of blocks one is gathered at
            # the peak, with its gradients before they are reduced, unless the options let all stay
            # after forward.
            root_bytes = weights.pop(None, 0.0) + gradients.pop(None, 0.0)
            if self._options.reshard_after_forward is False:
                peak = sum(weights.values()) + max(gradients.values(), default=0.0)
            else:
                peak = max((weights[block] + gradients[block] for block in weights), default=0.0)
            memory["gathered"] = root_bytes + peak
        return memory

    def sent(self, parameters: list[ParameterSize]) -> dict[str, float]:
        """Return the bytes of all-gathers and reduce-scatters, and of what replicas average."""
        last = max((p.block for p in parameters if p.block is not None), default=None)
        gathered = scattered = averaged = replicated = 0.0
        for parameter in parameters:
            itemsize = self._job.itemsize(parameter)
            # Scalars and the like, which fully_shard leaves out, are averaged over all ranks.
            if not parameter.is_sharded:
                averaged += parameter.numel * itemsize if parameter.requires_grad else 0
                continue
            numel = self._local_numel(parameter) * self._ranks
            gathered_itemsize = self._gathered_itemsize(parameter)
            block, reshard = parameter.block, self._options.reshard_after_forward
            # What is in no block is gathered twice where training_step calls self(batch):
            # docs/how_to/fsdp_tuned.md.
            stays_gathered = block is not None and (
                reshard is False or (reshard == "auto" and block == last)
            )
            gathered += (1 if stays_gathered else 2) * numel * gathered_itemsize
            if parameter.requires_grad:
                reduce = self._dtypes.reduce
                reduced = numel * (gathered_itemsize if reduce is None else reduce.itemsize)
                scattered += reduced
                # Replicas average what reduce-scatter leaves on a rank, its shard.
                replicated += reduced / self._ranks
        # Of what is gathered or scattered, a rank sends all but its shard. An all-reduce is both,
        # one after the other.
        share, between = (self._ranks - 1) / self._ranks, 2 * (self._replicas - 1) / self._replicas
        # of those that are not sharded
        over_all = 2 * (self._job.num_ranks - 1) / self._job.num_ranks
        return {
            "gathered parameters": share * gathered,
            "dense gradients": share * scattered + between * replicated + over_all * averaged,
        }

    def _gathered_itemsize(self, parameter: ParameterSize) -> int:
        # Without autocast nothing casts inputs of what is in no block: it is gathered, and
        # computes, in its own type.
        is_own = self._dtypes.param is None or (parameter.block is None and self._dtypes.casts)
        return self._job.itemsize(parameter) if is_own else self._dtypes.param.itemsize  # type: ignore[union-attr]

    def _local_numel(self, parameter: ParameterSize) -> int:
        """Return a parameter's elements on one rank: FSDP2 shards dim 0, padded to the same on all
        ranks."""
        if not parameter.is_sharded or not parameter.rows:
            return parameter.numel
        return math.ceil(parameter.rows / self._ranks) * (parameter.numel // parameter.rows)


DDP, FSDP, TORCHREC = "ddp_tuned", "fsdp_tuned", "torchrec_sharded"
TORCHREC_FSDP = "torchrec_sharded with dense: fsdp"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one strategy needs, in bytes per rank."""

    strategy: str
    memory: dict[str, float] = field(default_factory=dict)
    """Use of memory -> bytes: parameters, gradients, optimizer state, gathered, exchange,
    activations, recomputed."""
    sent: dict[str, float] | None = None
    """What is sent in a step -> bytes that leave a rank; None: unknown without a batch."""
    idle: float | None = None
    """The share of a step in which ranks of a pipeline wait for each other."""
    refused: str = ""
    """Why the strategy refuses the module."""

    @property
    def total(self) -> float:
        """All bytes of memory."""
        return sum(self.memory.values())

    @property
    def sent_total(self) -> float | None:
        """All bytes that leave a rank in a step."""
        return None if self.sent is None else sum(self.sent.values())


@dataclass(frozen=True, kw_only=True)
class TablesShare:
    """What tables take of the fullest rank, and what the busiest rank sends for them, in bytes, by
    a plan."""

    memory: dict[str, float] = field(default_factory=dict)
    """As `Estimate.memory`, with the exchange's buffers."""
    sent: dict[str, float] = field(default_factory=dict)
    refused: str = ""
    """Why there is no plan."""
    start: str = ""
    """What tables take while ranks start, in words."""


def estimate_strategies(
    sizes: ModuleSizes,
    job: Job,
    profile: StepProfile,
    planned: TablesShare | None = None,
    options: DenseOptions | None = None,
) -> list[Estimate]:
    """Return what each strategy needs.

    planned: of the tables; None: there are none, or torchrec_sharded refuses them. options: None:
    the defaults.
    """
    options = options or DenseOptions()
    every, dense = sizes.parameters, sizes.dense_parameters
    memory = _added(replicated_memory(every, job), _compression_memory(every, job, options))
    replicated = Estimate(strategy=DDP, memory=memory, sent=_ddp_sent(every, job, options))
    try:
        shards = ShardedBytes(job, options.fsdp)
        sharded = Estimate(strategy=FSDP, memory=shards.memory(every), sent=shards.sent(every))
    except DistRecError as error:
        sharded = Estimate(strategy=FSDP, refused=str(error))
    estimates = [replicated, sharded]
    # Where it is refused too, so that the reason is shown.
    if sizes.tables or TORCHREC in sizes.refused:
        planned = planned or TablesShare()
        # By the defaults: `options.fsdp` is of fsdp_tuned.
        shards = ShardedBytes(job)
        dense_bytes = {
            TORCHREC: (replicated_memory(dense, job), _ddp_sent(dense, job)),
            TORCHREC_FSDP: (shards.memory(dense), shards.sent(dense)),
        }
        for strategy, (memory, sent) in dense_bytes.items():
            estimate = Estimate(
                strategy=strategy,
                memory=_added(memory, planned.memory),
                sent=None if profile.batch_size is None else planned.sent | sent,
                refused=planned.refused,
            )
            estimates.append(estimate)
    checkpointing = {DDP: options.ddp_checkpointing, FSDP: options.fsdp.activation_checkpointing}
    return [
        _completed(e, sizes, profile, job, checkpointing.get(e.strategy, False)) for e in estimates
    ]


def _completed(
    estimate: Estimate,
    sizes: ModuleSizes,
    profile: StepProfile,
    job: Job,
    checkpointing: ActivationCheckpointing,
) -> Estimate:
    """Return the estimate with buffers and activations, or with the reason why its strategy refuses
    the module."""
    # By prefix: a module that torchrec_sharded refuses, it refuses with dense: fsdp as well.
    refused = estimate.refused
    for strategy, reason in sizes.refused.items():
        if estimate.strategy.startswith(strategy):
            refused = reason
            break
    if refused:
        return Estimate(strategy=estimate.strategy, refused=refused)
    memory = _added(estimate.memory, {"parameters": float(sizes.buffer_bytes)})
    if profile.activation_bytes is not None:
        memory["activations"] = float(profile.activation_bytes)
    if checkpointing and profile.saved is not None:
        layers = sizes.recomputed.get(estimate.strategy, [])
        memory["activations"] = float(profile.saved.retained_bytes(layers))
        # Backward computes one layer again at a time, so that the largest counts.
        memory["recomputed"] = float(max(map(profile.saved.layer_bytes, layers), default=0))
    return Estimate(strategy=estimate.strategy, memory=memory, sent=estimate.sent)


def replicated_memory(parameters: Iterable[ParameterSize], job: Job) -> dict[str, float]:
    """Return the memory of parameters that a rank has in full, with their gradients and optimizer
    state."""
    memory = {"parameters": 0.0, "gradients": 0.0, "optimizer state": 0.0}
    for parameter in parameters:
        itemsize = job.itemsize(parameter)
        memory["parameters"] += parameter.numel * itemsize
        memory["optimizer state"] += parameter.state_numel * itemsize
        if parameter.requires_grad and not parameter.has_sparse_gradient:
            memory["gradients"] += parameter.numel * itemsize
    return memory


def _compression_memory(
    parameters: Iterable[ParameterSize], job: Job, options: DenseOptions
) -> dict[str, float]:
    """Return what PowerSGD keeps: what it has left over, of all gradients, and the matrices that it
    sends."""
    if options.powersgd is None:
        return {}
    state = 0
    for p in parameters:
        if p.requires_grad:
            sent = _sent_numel(p, options)
            # Gradients that are sent as they are need no matrices.
            state += job.itemsize(p) * (p.numel + (sent if sent < p.numel else 0))
    return {"exchange": float(state)}


def _sent_numel(parameter: ParameterSize, options: DenseOptions) -> int:
    """Return the elements of a gradient that ddp_tuned sends: all, or those of PowerSGD's two
    matrices."""
    if options.powersgd is None:
        return parameter.numel
    # As PowerSGD sees it: a matrix of the first dim by all others.
    shape = torch.Size((parameter.rows, parameter.numel // max(parameter.rows, 1)))
    return sent_numbers(shape, options.powersgd.matrix_rank)


def _ddp_sent(
    parameters: Iterable[ParameterSize], job: Job, options: DenseOptions | None = None
) -> dict[str, float]:
    options = options or DenseOptions()
    sent = 0
    for p in parameters:
        if p.requires_grad and not p.has_sparse_gradient:
            sent += _sent_numel(p, options) * (
                job.itemsize(p) if options.comm_dtype == "fp32" else 2
            )
    return {"dense gradients": 2 * job.sent_share * sent}


def _added(memory: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: memory.get(name, 0.0) + other.get(name, 0.0) for name in {**memory, **other}}
