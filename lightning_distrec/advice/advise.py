"""Which strategy suits a module, on so many ranks with so much memory, and why."""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.strategies.estimates.estimate import (
    DDP,
    FSDP,
    TORCHREC,
    TORCHREC_FSDP,
    Estimate,
    Job,
    estimate_strategies,
)
from lightning_distrec.strategies.estimates.module_sizes import ModuleSizes, TableSize, measure_module
from lightning_distrec.strategies.estimates.step_profile import StepProfile
from lightning_distrec.units import format_bytes, quantity

FULL_SHARE = 0.8
"""Share of a rank's memory that a strategy may take before another is advised; the rest is for what is not reckoned."""
MOST_OF_MEMORY = 0.5
"""Share of the module's memory from where on its tables decide."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What each strategy needs, which one to take, and why."""

    job: Job
    rows: list[Estimate]
    chosen: str
    reason: str
    said: list[str]
    """What was assumed, and what was left out."""

    def fits(self, row: Estimate) -> bool:
        """Whether it leaves enough of a rank's memory free."""
        return not row.refused and row.total <= FULL_SHARE * self.job.memory_bytes


def advise(
    module: LightningModule, job: Job, settings: Any, device_type: str, profile: StepProfile | None = None
) -> Advice:
    """Return what to take for this module, which is left as it is, and needs no memory beyond its own.

    settings: the Trainer, or what has its `callbacks`, `accumulate_grad_batches` and `gradient_clip_val`.
    profile: of a training step; None: no batch was looked at.
    """
    profile = profile or StepProfile()
    conversion = Conversion()
    sizes = measure_module(module, settings, device_type, conversion)
    rows = estimate_strategies(sizes, job, profile)
    chosen, reason = _choose(sizes, rows, job, conversion.min_rows)
    return Advice(job=job, rows=rows, chosen=chosen, reason=reason, said=_said(sizes, job, profile))


def _choose(sizes: ModuleSizes, rows: list[Estimate], job: Job, min_rows: int) -> tuple[str, str]:
    by_name = {row.strategy: row for row in rows}
    usable = FULL_SHARE * job.memory_bytes
    memory = f"{FULL_SHARE:.0%} of a rank's {format_bytes(job.memory_bytes)}"
    large = [table for table in sizes.tables if table.weight.rows >= min_rows]
    share = _share_of_tables(sizes)
    torchrec, ddp, fsdp = by_name.get(TORCHREC), by_name[DDP], by_name[FSDP]
    if torchrec is not None and not torchrec.refused and large and share > MOST_OF_MEMORY:
        why = _in_words(sizes.tables, large[0], share)
        if torchrec.total <= usable:
            return TORCHREC, why
        hybrid = by_name[TORCHREC_FSDP]
        if hybrid.total <= usable and not fsdp.refused:
            return TORCHREC_FSDP, (
                f"{why}; with the other layers on every rank that makes {format_bytes(torchrec.total)}, more than "
                f"{memory}, and {format_bytes(hybrid.total)} with those cut too"
            )
        return TORCHREC, f"{why}, although it needs more than {memory}: use more ranks"
    if ddp.total <= usable:
        return DDP, f"all of the module, {format_bytes(ddp.total)}, is within {memory}"
    whole = f"the whole module, {format_bytes(ddp.total)}, takes more than {memory}"
    if fsdp.refused:
        return DDP, f"{whole}, but fsdp_tuned refuses it: {fsdp.refused}"
    does_not = "" if fsdp.total <= usable else ", which is more than that too: use more ranks"
    return FSDP, f"{whole}; cut over {quantity(job.num_ranks, 'rank')} it takes {format_bytes(fsdp.total)}{does_not}"


def _in_words(tables: list[TableSize], large: TableSize, share: float) -> str:
    of_what = f"{share:.0%} of the parameters and their optimizer state, and every rank keeps a part of"
    if len(tables) == 1:
        return f"table {large.name} of {large.weight.rows:,} rows takes {of_what} it"
    return (
        f"{quantity(len(tables), 'table')}, {large.name} of {large.weight.rows:,} rows among them, take {of_what} them"
    )


def _share_of_tables(sizes: ModuleSizes) -> float:
    """Return which share of parameters and optimizer state belongs to tables."""
    tables = {table.weight.name for table in sizes.tables}
    total = sum((p.numel + p.state_numel) * p.itemsize for p in sizes.parameters)
    ours = sum((p.numel + p.state_numel) * p.itemsize for p in sizes.parameters if p.name in tables)
    return ours / total if total else 0.0


def _said(sizes: ModuleSizes, job: Job, profile: StepProfile) -> list[str]:
    said = [*sizes.notes, *profile.notes]
    if profile.activation_bytes is None and not profile.notes:
        said.append("activations are left out: no batch was looked at")
    elif profile.activation_bytes is not None:
        said.append(
            "activations are what a forward with one batch keeps for its backward, the same under each strategy"
        )
        if job.precision.endswith("-true") and job.precision != "32-true":
            said.append(f"activations were measured in 32 bits, not in {job.precision}")
    sparse = [parameter.name for parameter in sizes.parameters if parameter.has_sparse_gradient]
    if sparse:
        said.append(f"the sparse gradient of {sparse[0]} is left out of memory, and of what ddp_tuned sends")
    if sizes.tables:
        said.append("tables are shared out evenly; a plan may give one rank more")
        said.append(_said_of_rows(sizes.tables, profile))
    return said


def _said_of_rows(tables: list[TableSize], profile: StepProfile) -> str:
    travel = "each row travels once; pooled tables that are cut by rows send as many times more as there are ranks"
    if profile.batch_size is None:
        return "what lookups send is not known without a batch"
    if any(table.path in profile.lookups for table in tables):
        return f"lookups are those of one batch of {quantity(profile.batch_size, 'sample')}; {travel}"
    return f"{quantity(profile.batch_size, 'sample')} are taken to look up one id of every feature each; {travel}"
