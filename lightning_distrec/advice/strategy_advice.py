"""Chooses a strategy for a module by its sizes, on ranks with a memory each, and says why.

The questions are those of docs/how_to/choose_strategy.md, in the same order.
"""

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule
from rich.console import Console

from lightning_distrec.advice.parameter_sizes import (
    FSDP,
    PIPELINE,
    TORCHREC,
    Job,
    MeasuredStep,
    ModuleSizes,
    gathered_bytes,
    measure_module,
    sharded_bytes,
)
from lightning_distrec.cluster.host_resources import HostNeeds
from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.units import format_bytes, quantity, text_table

DDP = "ddp_tuned"
TORCHREC_FSDP = "torchrec_sharded with dense: fsdp"

MAX_MEMORY_SHARE = 0.8
"""Share of a rank's memory that is used; the rest is for libraries, buckets and batches."""
MIN_TABLES_SHARE = 0.5
"""Share of the module's memory above which its tables decide."""
MIN_ROWS = Conversion().min_rows
"""Rows from which on a table is large."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one strategy needs of a rank's memory."""

    strategy: str
    model_bytes: float = 0.0
    """Parameters, gradients, optimizer state and buffers."""
    gathered_bytes: float = 0.0
    """What is gathered of sharded layers at once."""
    activation_bytes: float = 0.0
    refused: str = ""
    """Why the strategy refuses the module."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.model_bytes + self.gathered_bytes + self.activation_bytes


@dataclass(frozen=True)
class Link:
    """What ranks send over: the slowest links between them."""

    name: str
    bytes_per_second: float

    def in_words(self, sent: float) -> str:
        """Return how long a rank sends this number of bytes."""
        return f"{1000 * sent / self.bytes_per_second:,.3g} ms"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What each strategy needs, which one to take, and why."""

    job: Job
    sizes: ModuleSizes
    needs: dict[str, Need]
    """Of each strategy, by its name."""
    strategy: str
    reason: str
    notes: list[str] = field(default_factory=list)
    """What was assumed, and what was left out."""
    link: Link | None = None

    @property
    def gradient_bytes_sent(self) -> float:
        """What a rank of ddp_tuned sends in a step: a ring sends each gradient nearly twice."""
        gradients = sum(size.gradients for size in self.sizes.parameters)
        return 2 * (self.job.num_ranks - 1) / self.job.num_ranks * gradients


def advise(
    module: LightningModule, job: Job, step: MeasuredStep | None = None, link: Link | None = None
) -> Advice:
    """Return which strategy to take for this module, which stays as it is.

    step: None: no batch was run, and activations are left out.
    """
    step = step or MeasuredStep()
    sizes = measure_module(module, job)
    needs = needs_of(sizes, job, step.activation_bytes or 0)
    strategy, reason = _choose(sizes, needs, job)
    return Advice(
        job=job,
        sizes=sizes,
        needs=needs,
        strategy=strategy,
        reason=reason,
        notes=_notes(sizes, job, step),
        link=link,
    )


def needs_of(sizes: ModuleSizes, job: Job, activations: int) -> dict[str, Need]:
    """Return name of a strategy -> what it needs of a rank's memory."""
    every = sizes.parameters
    layers = sizes.layers
    num_ranks = job.num_ranks
    # Tables are shared out evenly: `plan` knows which rank gets which.
    tables_share = sizes.updated_tables / num_ranks
    model_and_gathered: dict[str, tuple[float, float]] = {
        DDP: (sum(size.total for size in every), 0.0),
        FSDP: (sharded_bytes(every, num_ranks), gathered_bytes(every, num_ranks)),
        PIPELINE: (sizes.fullest_stage, 0.0),
    }
    if sizes.tables or TORCHREC in sizes.refused:
        replicated = sum(size.total for size in layers)
        sharded = sharded_bytes(layers, num_ranks)
        model_and_gathered[TORCHREC] = (tables_share + replicated, 0.0)
        model_and_gathered[TORCHREC_FSDP] = (
            tables_share + sharded,
            gathered_bytes(layers, num_ranks),
        )
    refused = dict(sizes.refused)
    if TORCHREC in refused:
        refused[TORCHREC_FSDP] = refused[TORCHREC]
    elif FSDP in refused:
        refused[TORCHREC_FSDP] = refused[FSDP]
    needs = {}
    for strategy, (model, gathered) in model_and_gathered.items():
        if strategy in refused:
            needs[strategy] = Need(strategy=strategy, refused=refused[strategy])
            continue
        # A stage has its blocks' activations alone; those of other ranks are of whole batches.
        ranks_of_batch = num_ranks if strategy == PIPELINE else 1
        needs[strategy] = Need(
            strategy=strategy,
            model_bytes=model + sizes.buffers,
            gathered_bytes=gathered,
            activation_bytes=activations / ranks_of_batch,
        )
    return needs


def fits(need: Need, job: Job) -> bool:
    """Return whether a strategy leaves enough of a rank's memory free."""
    return not need.refused and need.total <= MAX_MEMORY_SHARE * job.memory_bytes


def _fits_recomputed(need: Need, job: Job) -> bool:
    """Return whether all but activations fits."""
    remaining = need.total - need.activation_bytes
    usable = MAX_MEMORY_SHARE * job.memory_bytes
    return not need.refused and need.activation_bytes > 0 and remaining <= usable


def _choose(sizes: ModuleSizes, needs: dict[str, Need], job: Job) -> tuple[str, str]:
    """Return the strategy to take, and the reason as a clause that follows "because"."""
    # Large tables first: DDP would reduce the gradient of every row and FSDP gather every row,
    # while lookups send those in use.
    if TORCHREC not in sizes.refused and sizes.share_of_tables > MIN_TABLES_SHARE:
        reason = _describe_tables(sizes)
        if reason:
            return _choose_for_tables(needs, job, reason)
    memory = f"{MAX_MEMORY_SHARE:.0%} of a rank's {format_bytes(job.memory_bytes)}"
    ddp = needs[DDP]
    fsdp = needs[FSDP]
    stages = needs[PIPELINE]
    # What fits is replicated: that sends no more than FSDP does, and no layer waits for its
    # parameters.
    replicated = f"the replicated module needs {format_bytes(ddp.total)}"
    if fits(ddp, job):
        return DDP, f"{replicated}, which is within {memory}"
    replicated += f", more than {memory}"
    # Recomputing takes time of a rank alone, while FSDP's gathers take the links'.
    if _fits_recomputed(ddp, job):
        return DDP, f"{replicated}; {_recompute(ddp)}"
    if fsdp.refused:
        sharded = f", but fsdp_tuned refuses it: {fsdp.refused}"
    else:
        ranks = quantity(job.num_ranks, "rank")
        sharded = f"; sharded over {ranks} it needs {format_bytes(fsdp.total)}"
    if fits(fsdp, job):
        return FSDP, replicated + sharded
    # Last, since ranks of a pipeline idle, and since it takes a chain of blocks.
    if fits(stages, job):
        fullest = f"; the fullest stage needs {format_bytes(stages.total)}"
        return PIPELINE, replicated + sharded + fullest
    if fsdp.refused:
        return DDP, replicated + sharded
    remedy = "use more ranks"
    if _fits_recomputed(fsdp, job):
        remedy = _recompute(fsdp)
    elif not any(size.is_sharded for size in sizes.parameters):
        remedy = (
            "none of its layers is a block that fsdp_tuned shards; name classes of layers, as in "
            "wrap=['Linear']"
        )
    return FSDP, f"{replicated}{sharded}, which is too much as well: {remedy}"


def _choose_for_tables(needs: dict[str, Need], job: Job, reason: str) -> tuple[str, str]:
    """Return the same where tables decide. reason: why they do."""
    memory = f"{MAX_MEMORY_SHARE:.0%} of a rank's {format_bytes(job.memory_bytes)}"
    tables = needs[TORCHREC]
    hybrid = needs[TORCHREC_FSDP]
    if fits(tables, job):
        return TORCHREC, reason
    if fits(hybrid, job):
        return TORCHREC_FSDP, (
            f"{reason}; with the other layers replicated, a rank needs "
            f"{format_bytes(tables.total)}, more than {memory}, and with them sharded too, "
            f"{format_bytes(hybrid.total)}"
        )
    return TORCHREC, (
        f"{reason}, although a rank needs {format_bytes(tables.total)}, more than {memory}: use "
        "more ranks; `lightning-distrec plan` says how many"
    )


def _recompute(need: Need) -> str:
    return (
        f"activations are {format_bytes(need.activation_bytes)} of it: compute them again in "
        "backward (activation_checkpointing)"
    )


def _describe_tables(sizes: ModuleSizes) -> str:
    """Return why tables decide; "" where none of them is large."""
    large = [table for table in sizes.tables if table.parameter.shape[0] >= MIN_ROWS]
    if not large:
        return ""
    name = f"{large[0].full_name} of {large[0].parameter.shape[0]:,} rows"
    memory = f"{sizes.share_of_tables:.0%} of the memory of parameters and optimizer state"
    sharded = "which is sharded over the ranks"
    if len(sizes.tables) == 1:
        return f"table {name} takes {memory}, {sharded}"
    return f"{quantity(len(sizes.tables), 'table')}, including {name}, take {memory}, {sharded}"


def _notes(sizes: ModuleSizes, job: Job, step: MeasuredStep) -> list[str]:
    notes = list(sizes.notes)
    if step.activation_bytes is None:
        notes.append(f"activations are left out: {step.problem}")
    else:
        notes.append(
            "activations are what the forward of one batch saves for backward; stages have equal "
            "shares of it"
        )
        if job.precision in ("16-true", "bf16-true", "64-true"):
            notes.append(f"activations were measured in 32 bits, not in {job.precision}")
    if sizes.tables:
        notes.append(
            "tables are shared out evenly, as torchrec_sharded updates them by its defaults; "
            "`lightning-distrec plan` places them, and counts what is exchanged"
        )
    return notes


def print_advice(advice: Advice, console: Console) -> None:
    """Print what each strategy needs, what was assumed, and which strategy to take."""
    job = advice.job
    needs = advice.needs.values()
    ranks = f"{quantity(job.num_ranks, 'rank')} on {quantity(job.num_nodes, 'node')}"
    memory = f"{format_bytes(job.memory_bytes)} each, precision {job.precision}"
    text = text_table(
        ("strategy", "model", "gathered", "activations", "total", ""),
        ["strategy", ""],
        title=f"{ranks}, {memory}: memory per rank",
        caption=f"Estimated, not measured: {'; '.join(advice.notes)}.",
    )
    for need in needs:
        mark = ">" if need.strategy == advice.strategy else " "
        name = f"{mark} {need.strategy}"
        if need.refused:
            text.add_row(name, "", "", "", "", "refused")
            continue
        parts = (need.model_bytes, need.gathered_bytes, need.activation_bytes, need.total)
        text.add_row(name, *map(format_bytes, parts), _fit(need, job))
    console.print(text)
    for need in needs:
        if need.refused:
            console.print(f"{need.strategy} refuses the module: {need.refused}")
    for part, size in _module_bytes(advice.sizes).items():
        words = ", ".join(f"{format_bytes(value)} of {name}" for name, value in size.items())
        console.print(f"{part.capitalize()}: {words}.")
    if job.num_ranks > 1:
        console.print(_host_needs(job).in_words())
    console.print(f"strategy: {advice.strategy}, because {advice.reason}.")
    if advice.link is not None and advice.strategy == DDP:
        milliseconds = advice.link.in_words(advice.gradient_bytes_sent)
        console.print(
            f"Gradients over {advice.link.name}, while backward computes: {milliseconds}; half of "
            "it with comm_dtype: bf16. Compress them where a step waits for them; that changes the "
            "numbers."
        )


def _fit(need: Need, job: Job) -> str:
    if need.total > job.memory_bytes:
        return "DOES NOT FIT"
    return "fits" if fits(need, job) else f"tight, above {MAX_MEMORY_SHARE:.0%}"


def _host_needs(job: Job) -> HostNeeds:
    # Of gloo: NCCL takes fewer sockets.
    return HostNeeds(job.num_ranks, job.num_ranks // job.num_nodes)


def _module_bytes(sizes: ModuleSizes) -> dict[str, dict[str, int]]:
    """Return tables and other layers -> what they have where they are not sharded."""
    parts_bytes = {}
    tables = [size for size in sizes.parameters if size.is_table]
    for part, parameters in (("tables", tables), ("other layers", sizes.layers)):
        parts_bytes[part] = {
            "parameters": sum(size.parameters for size in parameters),
            "gradients": sum(size.gradients for size in parameters),
            "optimizer state": sum(size.optimizer_state for size in parameters),
        }
    return parts_bytes


def as_json(advice: Advice) -> dict[str, Any]:
    """Return all of an advice as plain values."""
    job = advice.job
    strategies = []
    for need in advice.needs.values():
        strategies.append({
            "strategy": need.strategy,
            "refused": need.refused or None,
            "model_bytes": round(need.model_bytes),
            "gathered_bytes": round(need.gathered_bytes),
            "activation_bytes": round(need.activation_bytes),
            "total_bytes": round(need.total),
            "fits": fits(need, job),
        })
    return {
        "strategy": advice.strategy,
        "reason": advice.reason,
        "num_ranks": job.num_ranks,
        "num_nodes": job.num_nodes,
        "memory_bytes_per_rank": job.memory_bytes,
        "precision": job.precision,
        **_host_needs(job).as_json(),
        "module_bytes": _module_bytes(advice.sizes),
        "strategies": strategies,
        "bytes_per_second": None if advice.link is None else advice.link.bytes_per_second,
        "gradient_bytes_sent": round(advice.gradient_bytes_sent),
        "assumed": advice.notes,
    }
