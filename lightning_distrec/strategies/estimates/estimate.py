"""What each strategy needs for a module: bytes of memory per rank, and bytes that a rank sends per step.

Estimated from sizes, without ranks. Sent bytes are those of ring collectives, and of all-to-alls among equal ranks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_distrec.strategies.estimates.module_sizes import ModuleSizes, ParameterSize, TableSize
from lightning_distrec.strategies.estimates.step_profile import StepProfile

DDP, FSDP, TORCHREC = "ddp_tuned", "fsdp_tuned", "torchrec_sharded"
TORCHREC_FSDP = "torchrec_sharded with dense: fsdp"

TRUE_ITEMSIZE = {"16-true": 2, "bf16-true": 2, "64-true": 8}
MIXED_ITEMSIZE = {"16-mixed": 2, "bf16-mixed": 2}
ID_BYTES = 4
ROW_ITEMSIZE = 4
"""Rows and their gradients are sent as float32, unless quantized_comms chooses another type."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Where a module is to train."""

    num_ranks: int
    num_nodes: int
    memory_bytes: int
    """Memory of one rank."""
    precision: str = "32-true"

    def itemsize(self, parameter: ParameterSize) -> int:
        """Return the bytes of one element of a parameter in this precision."""
        return TRUE_ITEMSIZE.get(self.precision, parameter.itemsize)

    @property
    def sent_share(self) -> float:
        """The share of a collective's bytes that leaves a rank: all but its own shard."""
        return (self.num_ranks - 1) / self.num_ranks


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one strategy needs, in bytes per rank."""

    strategy: str
    memory: dict[str, float] = field(default_factory=dict)
    """Use of memory -> bytes: parameters, gradients, optimizer state, gathered, exchange, activations."""
    sent: dict[str, float] | None = None
    """What is sent in a step -> bytes that leave a rank; None: unknown without a batch."""
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
    sizes: ModuleSizes, job: Job, profile: StepProfile, planned: TablesShare | None = None
) -> list[Estimate]:
    """Return what each strategy needs. planned: of the tables, by a plan; None: they are spread evenly."""
    every, dense = sizes.parameters, sizes.dense_parameters
    rows = _rows_sent(sizes.tables, job, profile)
    if planned is not None and rows is not None:
        rows = planned.sent
    estimates = [
        Estimate(strategy=DDP, memory=replicated_memory(every, job), sent=_ddp_sent(every, job)),
        Estimate(strategy=FSDP, memory=_fsdp_memory(every, job), sent=_fsdp_sent(every, job)),
    ]
    if sizes.tables or TORCHREC in sizes.refused:
        tables = _tables_memory(sizes.tables, job) if planned is None else planned.memory
        sent = None if rows is None else rows | _ddp_sent(dense, job)
        estimates.append(Estimate(strategy=TORCHREC, memory=_added(replicated_memory(dense, job), tables), sent=sent))
        sent = None if rows is None else rows | _fsdp_sent(dense, job)
        estimates.append(Estimate(strategy=TORCHREC_FSDP, memory=_added(_fsdp_memory(dense, job), tables), sent=sent))
    return [_completed(estimate, sizes, profile) for estimate in estimates]


def dense_memory(sizes: ModuleSizes, job: Job, is_sharded: bool) -> dict[str, float]:
    """Return the memory of the layers without tables on a rank: replicated as under DDP, or sharded by FSDP."""
    memory = _fsdp_memory(sizes.dense_parameters, job) if is_sharded else replicated_memory(sizes.dense_parameters, job)
    return _added(memory, {"parameters": float(sizes.buffer_bytes)})


def _completed(estimate: Estimate, sizes: ModuleSizes, profile: StepProfile) -> Estimate:
    """Return the estimate with buffers and activations, or with the reason why its strategy refuses the module."""
    refused = next((why for strategy, why in sizes.refused.items() if estimate.strategy.startswith(strategy)), "")
    if refused:
        return Estimate(strategy=estimate.strategy, refused=refused)
    memory = _added(estimate.memory, {"parameters": float(sizes.buffer_bytes)})
    if profile.activation_bytes is not None:
        memory["activations"] = float(profile.activation_bytes)
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


def _fsdp_memory(parameters: list[ParameterSize], job: Job) -> dict[str, float]:
    memory = _no_memory()
    gathered: dict[int | None, float] = {}
    for parameter in parameters:
        itemsize, local_numel = job.itemsize(parameter), _local_numel(parameter, job)
        memory["parameters"] += local_numel * itemsize
        memory["optimizer state"] += parameter.state_numel * itemsize * local_numel / max(parameter.numel, 1)
        memory["gradients"] += local_numel * itemsize if parameter.requires_grad else 0
        if parameter.is_sharded:
            gathered_itemsize = MIXED_ITEMSIZE.get(job.precision, itemsize)
            copies = 2 if parameter.requires_grad else 1  # the parameter, and its gradient before reduce-scatter
            gathered[parameter.block] = (
                gathered.get(parameter.block, 0.0) + copies * parameter.numel * gathered_itemsize
            )
    if job.num_ranks > 1:
        in_blocks = [total for block, total in gathered.items() if block is not None]
        memory["gathered"] = gathered.get(None, 0.0) + max(in_blocks, default=0.0)
    return memory


def _local_numel(parameter: ParameterSize, job: Job) -> int:
    """Return the number of elements of a parameter on one rank: FSDP2 shards dim 0, padded to the same on all ranks."""
    if not parameter.is_sharded or not parameter.rows:
        return parameter.numel
    return math.ceil(parameter.rows / job.num_ranks) * (parameter.numel // parameter.rows)


def _tables_memory(tables: Iterable[TableSize], job: Job) -> dict[str, float]:
    """Return a rank's share of the tables, which stay 32 bits wide (16 where they are) in any precision."""
    memory = _no_memory()
    for table in tables:
        itemsize = 2 if table.weight.itemsize == 2 else 4
        memory["parameters"] += table.weight.numel * itemsize / job.num_ranks
        memory["optimizer state"] += table.weight.state_numel * itemsize / job.num_ranks
        memory["gradients"] += table.weight.numel * itemsize / job.num_ranks if table.has_dense_gradient else 0
    return memory


def _ddp_sent(parameters: Iterable[ParameterSize], job: Job) -> dict[str, float]:
    averaged = [p for p in parameters if p.requires_grad and not p.has_sparse_gradient]
    gradient_bytes = sum(p.numel * job.itemsize(p) for p in averaged)
    return {"dense gradients": 2 * job.sent_share * gradient_bytes}


def _fsdp_sent(parameters: list[ParameterSize], job: Job) -> dict[str, float]:
    """Return the bytes of all-gathers, two per block (one for the last, which backward reuses), and reduce-scatters."""
    last = max((p.block for p in parameters if p.block is not None), default=None)
    gathered = scattered = averaged = 0.0
    for parameter in parameters:
        itemsize = job.itemsize(parameter)
        if not parameter.is_sharded:
            averaged += parameter.numel * itemsize if parameter.requires_grad else 0
            continue
        numel = _local_numel(parameter, job) * job.num_ranks
        times = 1 if last is not None and parameter.block == last else 2
        gathered += times * numel * MIXED_ITEMSIZE.get(job.precision, itemsize)
        scattered += numel * itemsize if parameter.requires_grad else 0
    return {
        "gathered parameters": job.sent_share * gathered,
        "dense gradients": job.sent_share * (scattered + 2 * averaged),
    }


def _rows_sent(tables: list[TableSize], job: Job, profile: StepProfile) -> dict[str, float] | None:
    """Return the bytes that lookups send: ids (input dist), rows (output dist), and the rows' gradients."""
    if profile.batch_size is None:
        return None
    ids = rows = gradients = 0.0
    for table in tables:
        counted = profile.lookups.get(table.path)
        assumed = profile.batch_size * len(table.features)  # one id per feature and sample
        num_ids = assumed if counted is None else sum(counted.ids[feature] for feature in table.features)
        num_vectors = assumed if counted is None else sum(counted.vectors[feature] for feature in table.features)
        ids += job.sent_share * num_ids * ID_BYTES
        rows += job.sent_share * num_vectors * table.dim * ROW_ITEMSIZE
        gradients += job.sent_share * num_vectors * table.dim * ROW_ITEMSIZE if table.weight.requires_grad else 0
    return {"ids": ids, "rows": rows, "row gradients": gradients}


def _no_memory() -> dict[str, float]:
    return {"parameters": 0.0, "gradients": 0.0, "optimizer state": 0.0}


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}
