"""What each strategy needs for a module: bytes of memory on a rank, and bytes that a rank sends in a step.

Reckoned from sizes, without ranks. Sent bytes are those of rings, and of all-to-alls over ranks that are alike.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_distrec.strategies.estimates.activations import Sample
from lightning_distrec.strategies.estimates.module_sizes import ModuleSizes, ParameterSize, TableSize

DDP, FSDP, TORCHREC = "ddp_tuned", "fsdp_tuned", "torchrec_sharded"
TORCHREC_FSDP = "torchrec_sharded with dense: fsdp"

TRUE_BYTES = {"16-true": 2, "bf16-true": 2, "64-true": 8}
MIXED_BYTES = {"16-mixed": 2, "bf16-mixed": 2}
ID_BYTES = 8
ROW_NUMBER_BYTES = 4
"""Rows and their gradients travel as 32-bit numbers, unless quantized_comms says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a module is to train on."""

    num_ranks: int
    num_nodes: int
    memory_bytes: int
    """Of one rank."""
    precision: str = "32-true"

    def number_bytes(self, parameter: ParameterSize) -> int:
        """Return the bytes of one number of a parameter as it is kept."""
        return TRUE_BYTES.get(self.precision, parameter.number_bytes)

    @property
    def share_sent(self) -> float:
        """The share of an exchange that leaves a rank: all but its own part."""
        return (self.num_ranks - 1) / self.num_ranks


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one strategy needs; bytes of one rank."""

    strategy: str
    memory: dict[str, float] = field(default_factory=dict)
    """What takes it -> bytes: parameters, gradients, optimizer state, gathered, activations."""
    sent: dict[str, float] | None = None
    """What travels in a step -> bytes that leave a rank; None: it is not known without a batch."""
    refused: str = ""
    """Why the strategy does not take the module."""

    @property
    def total(self) -> float:
        """All bytes of memory."""
        return sum(self.memory.values())

    @property
    def sent_total(self) -> float | None:
        """All bytes that leave a rank in a step."""
        return None if self.sent is None else sum(self.sent.values())


def reckon(sizes: ModuleSizes, job: Job, sample: Sample) -> list[Estimate]:
    """Return what each strategy needs."""
    dense = sizes.in_no_table
    tables = _tables_memory(sizes.tables, job)
    rows = _rows_sent(sizes.tables, job, sample)
    whole, cut = _ddp_memory(dense, job), _fsdp_memory(dense, job)
    found = [
        Estimate(strategy=DDP, memory=_ddp_memory(sizes.parameters, job), sent=_ddp_sent(sizes.parameters, job)),
        Estimate(strategy=FSDP, memory=_fsdp_memory(sizes.parameters, job), sent=_fsdp_sent(sizes.parameters, job)),
    ]
    if sizes.tables or TORCHREC in sizes.refused:
        sent = None if rows is None else rows | _ddp_sent(dense, job)
        found.append(Estimate(strategy=TORCHREC, memory=_added(whole, tables), sent=sent))
        sent = None if rows is None else rows | _fsdp_sent(dense, job)
        found.append(Estimate(strategy=TORCHREC_FSDP, memory=_added(cut, tables), sent=sent))
    return [_finished(row, sizes, sample) for row in found]


def dense_memory(sizes: ModuleSizes, job: Job, is_cut: bool) -> dict[str, float]:
    """Return what the layers without tables take on a rank: as under DDP, or cut as under fsdp_tuned."""
    memory = _fsdp_memory(sizes.in_no_table, job) if is_cut else _ddp_memory(sizes.in_no_table, job)
    return _added(memory, {"parameters": float(sizes.buffer_bytes)})


def _finished(row: Estimate, sizes: ModuleSizes, sample: Sample) -> Estimate:
    refused = next((why for strategy, why in sizes.refused.items() if row.strategy.startswith(strategy)), "")
    if refused:
        return Estimate(strategy=row.strategy, refused=refused)
    memory = _added(row.memory, {"parameters": float(sizes.buffer_bytes)})
    if sample.activation_bytes is not None:
        memory["activations"] = float(sample.activation_bytes)
    return Estimate(strategy=row.strategy, memory=memory, sent=row.sent)


def _ddp_memory(parameters: Iterable[ParameterSize], job: Job) -> dict[str, float]:
    memory = _nothing()
    for parameter in parameters:
        number_bytes = job.number_bytes(parameter)
        memory["parameters"] += parameter.numbers * number_bytes
        memory["optimizer state"] += parameter.state_numbers * number_bytes
        if parameter.learns and not parameter.has_sparse_gradient:
            memory["gradients"] += parameter.numbers * number_bytes
    return memory


def _fsdp_memory(parameters: list[ParameterSize], job: Job) -> dict[str, float]:
    memory = _nothing()
    gathered: dict[int | None, float] = {}
    for parameter in parameters:
        number_bytes, kept = job.number_bytes(parameter), _kept_numbers(parameter, job)
        memory["parameters"] += kept * number_bytes
        memory["optimizer state"] += parameter.state_numbers * number_bytes * kept / max(parameter.numbers, 1)
        memory["gradients"] += kept * number_bytes if parameter.learns else 0
        if parameter.is_cut:
            travelling = MIXED_BYTES.get(job.precision, number_bytes)
            copies = 2 if parameter.learns else 1  # the parameter, and its gradient before that is cut
            gathered[parameter.block] = gathered.get(parameter.block, 0.0) + copies * parameter.numbers * travelling
    if job.num_ranks > 1:
        in_blocks = [total for block, total in gathered.items() if block is not None]
        memory["gathered"] = gathered.get(None, 0.0) + max(in_blocks, default=0.0)
    return memory


def _kept_numbers(parameter: ParameterSize, job: Job) -> int:
    """Return how many numbers of a parameter a rank keeps: rows are dealt out, padded to the same for all."""
    if not parameter.is_cut or not parameter.rows:
        return parameter.numbers
    return math.ceil(parameter.rows / job.num_ranks) * (parameter.numbers // parameter.rows)


def _tables_memory(tables: Iterable[TableSize], job: Job) -> dict[str, float]:
    """Return a rank's share of the tables, which stay 32 bits wide (16 where they are) in any precision."""
    memory = _nothing()
    for table in tables:
        number_bytes = 2 if table.weight.number_bytes == 2 else 4
        memory["parameters"] += table.weight.numbers * number_bytes / job.num_ranks
        memory["optimizer state"] += table.weight.state_numbers * number_bytes / job.num_ranks
        memory["gradients"] += table.weight.numbers * number_bytes / job.num_ranks if table.keeps_gradient else 0
    return memory


def _ddp_sent(parameters: Iterable[ParameterSize], job: Job) -> dict[str, float]:
    averaged = [p for p in parameters if p.learns and not p.has_sparse_gradient]
    gradients = sum(p.numbers * job.number_bytes(p) for p in averaged)
    return {"dense gradients": 2 * job.share_sent * gradients}


def _fsdp_sent(parameters: list[ParameterSize], job: Job) -> dict[str, float]:
    """Return what is gathered, twice but for the last block, which is kept for backward, and what is scattered."""
    last = max((p.block for p in parameters if p.block is not None), default=None)
    gathered = scattered = averaged = 0.0
    for parameter in parameters:
        numbers = _kept_numbers(parameter, job) * job.num_ranks if parameter.is_cut else parameter.numbers
        number_bytes = job.number_bytes(parameter)
        if not parameter.is_cut:
            averaged += numbers * number_bytes if parameter.learns else 0
            continue
        times = 1 if last is not None and parameter.block == last else 2
        gathered += times * numbers * MIXED_BYTES.get(job.precision, number_bytes)
        scattered += numbers * number_bytes if parameter.learns else 0
    return {
        "gathered parameters": job.share_sent * gathered,
        "dense gradients": job.share_sent * (scattered + 2 * averaged),
    }


def _rows_sent(tables: list[TableSize], job: Job, sample: Sample) -> dict[str, float] | None:
    """Return what lookups send: an id's way there, its row's way back, its gradient's way there."""
    if sample.batch_size is None:
        return None
    ids = rows = gradients = 0.0
    for table in tables:
        told = sample.lookups.get(table.path)
        taken = sample.batch_size * len(table.features)
        num_ids = taken if told is None else sum(told.ids[feature] for feature in table.features)
        num_vectors = taken if told is None else sum(told.vectors[feature] for feature in table.features)
        ids += job.share_sent * num_ids * ID_BYTES
        rows += job.share_sent * num_vectors * table.dim * ROW_NUMBER_BYTES
        gradients += job.share_sent * num_vectors * table.dim * ROW_NUMBER_BYTES if table.weight.learns else 0
    return {"ids": ids, "rows": rows, "row gradients": gradients}


def _nothing() -> dict[str, float]:
    return {"parameters": 0.0, "gradients": 0.0, "optimizer state": 0.0}


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}
