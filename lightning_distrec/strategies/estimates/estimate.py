"""What each strategy needs for a module: bytes of memory per rank, and bytes that a rank sends per step.

Estimated from sizes, without ranks. Sent bytes are those of ring collectives, and of all-to-alls among equal ranks."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from lightning_distrec.errors import DistRecError
from lightning_distrec.strategies.activations.layers import ActivationCheckpointing, target_bytes
from lightning_distrec.strategies.data_parallel.powersgd import sent_numbers
from lightning_distrec.strategies.estimates.dense_options import MAX_MEMORY_SHARE, DenseOptions
from lightning_distrec.strategies.estimates.module_sizes import Job, ModuleSizes, ParameterSize, TableSize
from lightning_distrec.strategies.estimates.step_profile import StepProfile
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
        weights: dict[int | None, float] = defaultdict(float)
        gradients: dict[int | None, float] = defaultdict(float)
        for parameter in parameters:
            itemsize, local_numel = self._job.itemsize(parameter), self._local_numel(parameter)
            memory["parameters"] += local_numel * itemsize
            # The state is sharded as its parameter is.
            memory["optimizer state"] += parameter.state_numel * itemsize * local_numel / max(parameter.numel, 1)
            memory["gradients"] += local_numel * itemsize if parameter.requires_grad else 0
            if parameter.is_sharded:
                gathered = parameter.numel * self._gathered_itemsize(parameter)
                weights[parameter.block] += gathered
                gradients[parameter.block] += gathered if parameter.requires_grad else 0.0
        if self._ranks > 1:
            # The root's parameters stay gathered for the whole step. Of blocks one is gathered at the peak, with its
            # gradients before they are reduced, unless the options let all stay after forward.
            root_bytes = weights.pop(None, 0.0) + gradients.pop(None, 0.0)
            if self._options.reshard_after_forward is False:
                peak = sum(weights.values()) + max(gradients.values(), default=0.0)
            else:
                peak = max((weights[block] + gradients[block] for block in weights), default=0.0)
            memory["gathered"] = root_bytes + peak
        return memory

    def sent(self, parameters: list[ParameterSize]) -> dict[str, float]:
        """Return the bytes of all-gathers and reduce-scatters, and of what replicas average.

        Blocks are gathered twice, but for those whose parameters backward reuses.
        """
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
            # What is in no block is gathered twice where training_step calls self(batch): docs/how_to/fsdp_tuned.md.
            stays_gathered = block is not None and (reshard is False or (reshard == "auto" and block == last))
            gathered += (1 if stays_gathered else 2) * numel * gathered_itemsize
            if parameter.requires_grad:
                reduce = self._dtypes.reduce
                reduced = numel * (gathered_itemsize if reduce is None else reduce.itemsize)
                scattered += reduced
                # Replicas average what reduce-scatter leaves on a rank, its shard.
                replicated += reduced / self._ranks
        # Of what is gathered or scattered, a rank sends all but its shard. An all-reduce is both, one after the other.
        share, between = (self._ranks - 1) / self._ranks, 2 * (self._replicas - 1) / self._replicas
        over_all = 2 * (self._job.num_ranks - 1) / self._job.num_ranks  # of those that are not sharded
        return {
            "gathered parameters": share * gathered,
            "dense gradients": share * scattered + between * replicated + over_all * averaged,
        }

    def _gathered_itemsize(self, parameter: ParameterSize) -> int:
        # Without autocast nothing casts inputs of what is in no block: it is gathered, and computes, in its own type.
        is_own = self._dtypes.param is None or (parameter.block is None and self._dtypes.casts)
        return self._job.itemsize(parameter) if is_own else self._dtypes.param.itemsize  # type: ignore[union-attr]

    def _local_numel(self, parameter: ParameterSize) -> int:
        """Return a parameter's elements on one rank: FSDP2 shards dim 0, padded to the same on all ranks."""
        if not parameter.is_sharded or not parameter.rows:
            return parameter.numel
        return math.ceil(parameter.rows / self._ranks) * (parameter.numel // parameter.rows)


DDP, FSDP, TORCHREC = "ddp_tuned", "fsdp_tuned", "torchrec_sharded"
TORCHREC_FSDP = "torchrec_sharded with dense: fsdp"

ID_BYTES = 4
ROW_ITEMSIZE = 4
"""Rows and their gradients are sent as float32, unless quantized_comms chooses another type."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one strategy needs, in bytes per rank."""

    strategy: str
    memory: dict[str, float] = field(default_factory=dict)
    """Use of memory -> bytes: parameters, gradients, optimizer state, gathered, exchange, activations, recomputed."""
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
    """What tables take of the fullest rank, and what the busiest rank sends for them, in bytes."""

    memory: dict[str, float]
    """As `Estimate.memory`, with the exchange's buffers."""
    sent: dict[str, float]


def estimate_strategies(
    sizes: ModuleSizes,
    job: Job,
    profile: StepProfile,
    planned: TablesShare | None = None,
    options: DenseOptions | None = None,
) -> list[Estimate]:
    """Return what each strategy needs.

    planned: of the tables, by a plan; None: they are spread evenly. options: None: the defaults.
    """
    options = options or DenseOptions()
    every, dense = sizes.parameters, sizes.dense_parameters
    rows = None
    if profile.batch_size is not None:
        rows = _rows_sent(sizes.tables, job, profile, profile.batch_size) if planned is None else planned.sent
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
        tables = _tables_memory(sizes.tables, job) if planned is None else planned.memory
        sent = None if rows is None else rows | _ddp_sent(dense, job)
        estimates.append(Estimate(strategy=TORCHREC, memory=_added(replicated_memory(dense, job), tables), sent=sent))
        # By the defaults: `options.fsdp` is of fsdp_tuned.
        shards = ShardedBytes(job)
        sent = None if rows is None else rows | shards.sent(dense)
        estimates.append(Estimate(strategy=TORCHREC_FSDP, memory=_added(shards.memory(dense), tables), sent=sent))
    checkpointing = {DDP: options.ddp_checkpointing, FSDP: options.fsdp.activation_checkpointing}
    return [_completed(e, sizes, profile, job, checkpointing.get(e.strategy, False)) for e in estimates]


def _completed(
    estimate: Estimate, sizes: ModuleSizes, profile: StepProfile, job: Job, checkpointing: ActivationCheckpointing
) -> Estimate:
    """Return the estimate with buffers and activations, or with the reason why its strategy refuses the module."""
    # By prefix: a module that torchrec_sharded refuses, it refuses with dense: fsdp as well.
    refused = next((reason for strategy, reason in sizes.refused.items() if estimate.strategy.startswith(strategy)), "")
    if refused or estimate.refused:
        return Estimate(strategy=estimate.strategy, refused=refused or estimate.refused)
    memory = _added(estimate.memory, {"parameters": float(sizes.buffer_bytes)})
    if profile.activation_bytes is not None:
        memory["activations"] = float(profile.activation_bytes)
    if checkpointing and profile.saved is not None:
        layers = sizes.recomputed.get(estimate.strategy, [])
        if isinstance(checkpointing, str):
            target = target_bytes(checkpointing)
            if target is None:
                fixed = sum(bytes_ for use, bytes_ in memory.items() if use != "activations")
                target = int(MAX_MEMORY_SHARE * job.memory_bytes - fixed)
            layers = profile.saved.last_that_fit(layers, target)
        memory["activations"] = float(profile.saved.kept_bytes(layers))
        # Backward computes one layer again at a time, so that the largest counts.
        memory["recomputed"] = float(max(map(profile.saved.layer_bytes, layers), default=0))
    return Estimate(strategy=estimate.strategy, memory=memory, sent=estimate.sent)


def replicated_memory(parameters: Iterable[ParameterSize], job: Job) -> dict[str, float]:
    """Return the memory of parameters that a rank has in full, with their gradients and optimizer state."""
    memory = _no_memory()
    for parameter in parameters:
        itemsize = job.itemsize(parameter)
        memory["parameters"] += parameter.numel * itemsize
        memory["optimizer state"] += parameter.state_numel * itemsize
        if parameter.requires_grad and not parameter.has_sparse_gradient:
            memory["gradients"] += parameter.numel * itemsize
    return memory


def _tables_memory(tables: Iterable[TableSize], job: Job) -> dict[str, float]:
    """Return a rank's share of the tables, which stay 32 bits wide (16 where they are) in any precision."""
    memory = _no_memory()
    for table in tables:
        itemsize = 2 if table.weight.itemsize == 2 else 4
        memory["parameters"] += table.weight.numel * itemsize / job.num_ranks
        memory["optimizer state"] += table.weight.state_numel * itemsize / job.num_ranks
        memory["gradients"] += table.weight.numel * itemsize / job.num_ranks if table.has_dense_gradient else 0
    return memory


def _compression_memory(parameters: Iterable[ParameterSize], job: Job, options: DenseOptions) -> dict[str, float]:
    """Return what PowerSGD keeps: what it has left over, of all gradients, and the matrices that it sends."""
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
    """Return the elements of a gradient that ddp_tuned sends: all, or those of PowerSGD's two matrices."""
    if options.powersgd is None:
        return parameter.numel
    # As PowerSGD sees it: a matrix of the first dim by all others.
    shape = torch.Size((parameter.rows, parameter.numel // max(parameter.rows, 1)))
    return sent_numbers(shape, options.powersgd.matrix_rank)


def _ddp_sent(parameters: Iterable[ParameterSize], job: Job, options: DenseOptions | None = None) -> dict[str, float]:
    options = options or DenseOptions()
    sent = 0
    for p in parameters:
        if p.requires_grad and not p.has_sparse_gradient:
            sent += _sent_numel(p, options) * (job.itemsize(p) if options.comm_dtype == "fp32" else 2)
    return {"dense gradients": 2 * job.sent_share * sent}


def _rows_sent(tables: list[TableSize], job: Job, profile: StepProfile, batch_size: int) -> dict[str, float]:
    """Return the bytes that lookups send: ids (input dist), rows (output dist), and the rows' gradients."""
    ids = rows = gradients = 0.0
    for table in tables:
        counted = profile.lookups.get(table.path)
        num_ids = num_vectors = batch_size * len(table.features)  # one id per feature and sample, unless counted
        if counted is not None:
            num_ids = sum(counted.ids[feature] for feature in table.features)
            num_vectors = sum(counted.vectors[feature] for feature in table.features)
        row_bytes = job.sent_share * num_vectors * table.dim * ROW_ITEMSIZE
        ids += job.sent_share * num_ids * ID_BYTES
        rows += row_bytes
        gradients += row_bytes if table.weight.requires_grad else 0
    return {"ids": ids, "rows": rows, "row gradients": gradients}


def _no_memory() -> dict[str, float]:
    return {"parameters": 0.0, "gradients": 0.0, "optimizer state": 0.0}


def _added(memory: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: memory.get(name, 0.0) + other.get(name, 0.0) for name in {**memory, **other}}
