"""Chooses a strategy for a module on a number of ranks with a memory each, and says why."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, TypeVar

from lightning.pytorch import LightningModule
from rich.console import Console

from lightning_distrec.advice.dry_job import planned_share
from lightning_distrec.advice.stages_estimate import PIPELINE, estimate_stages
from lightning_distrec.cluster.host_resources import HostNeeds
from lightning_distrec.errors import DistRecError, InfeasiblePlanError
from lightning_distrec.option_values import as_options
from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.strategies.data_parallel.gradient_exchange import PowerSGDOptions
from lightning_distrec.strategies.estimates.dense_options import MAX_MEMORY_SHARE, DenseOptions
from lightning_distrec.strategies.estimates.estimate import (
    DDP,
    FSDP,
    TORCHREC,
    TORCHREC_FSDP,
    Estimate,
    TablesShare,
    estimate_strategies,
)
from lightning_distrec.strategies.estimates.module_sizes import (
    Job,
    ModuleSizes,
    TableSize,
    measure_module,
)
from lightning_distrec.strategies.estimates.step_profile import StepProfile
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.stages.chain import StageOptions
from lightning_distrec.strategies.tables.set_up_inputs import TableSettings
from lightning_distrec.strategies.torchrec import TorchRecShardedStrategy
from lightning_distrec.units import format_bytes, quantity, text_table

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ChosenOptions:
    """Those of one strategy; the others have their defaults."""

    dense: DenseOptions = field(default_factory=DenseOptions)
    stages: StageOptions = field(default_factory=StageOptions)
    note: str = ""
    """Whose options these are."""


def read_options(strategy: Any) -> ChosenOptions:
    """Return the options in `trainer.strategy` of a parsed YAML: a name, or an object with
    class_path and init_args.

    Raises ConfigError: a value cannot be.
    """
    # A Namespace of jsonargparse: no strategy is constructed, so that its options are only checked
    # where read.
    kind = str(getattr(strategy, "class_path", "")).rpartition(".")[2]
    arguments = dict(vars(getattr(strategy, "init_args", None) or SimpleNamespace()))
    note = f"options of {kind} are those of the YAML"
    if kind == "TunedDDPStrategy":
        powersgd = arguments.get("powersgd")
        dense = DenseOptions(
            comm_dtype=arguments.get("comm_dtype", "fp32"),
            powersgd=None
            if powersgd is None
            else as_options("powersgd", PowerSGDOptions, _plain(powersgd)),
            ddp_checkpointing=arguments.get("activation_checkpointing", False),
        )
        return ChosenOptions(dense=dense, note=note)
    if kind == "TunedFSDPStrategy":
        return ChosenOptions(dense=DenseOptions(fsdp=_made(FSDPOptions, arguments)), note=note)
    if kind == "PipelineParallelStrategy":
        # YAML gives lists, or null; StageOptions has tuples.
        ends = {name: tuple(arguments.get(name) or ()) for name in ("first_stage", "last_stage")}
        return ChosenOptions(stages=_made(StageOptions, arguments | ends), note=note)
    return ChosenOptions()


def _plain(value: Any) -> Any:
    # What jsonargparse has parsed to a dataclass is a Namespace, whose fields are its attributes.
    return value if isinstance(value, (Mapping, PowerSGDOptions)) else vars(value)


def _made(options: type[T], arguments: Mapping[str, Any]) -> T:
    names = [option.name for option in fields(options)]  # type: ignore[arg-type]
    return options(**{name: arguments[name] for name in names if name in arguments})


MIN_TABLES_SHARE = 0.5
"""Share of the module's memory above which its tables decide."""


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
    estimates: list[Estimate]
    strategy: str
    reason: str
    notes: list[str]
    """What was assumed, and what was left out."""
    link: Link | None = None
    compressed: dict[str, float] = field(default_factory=dict)
    """Option of ddp_tuned -> bytes that a rank then sends per step, in place of those of its
    estimate."""

    def fits(self, estimate: Estimate) -> bool:
        """Return whether a strategy leaves enough of a rank's memory free."""
        return not estimate.refused and estimate.total <= MAX_MEMORY_SHARE * self.job.memory_bytes


def advise(
    module: LightningModule,
    job: Job,
    settings: Any,
    device_type: str,
    profile: StepProfile | None = None,
    table_settings: TableSettings | None = None,
    options: ChosenOptions | None = None,
    link: Link | None = None,
) -> Advice:
    """Return which strategy to take for this module, which stays as it is; no memory beyond its own
    is needed.

    settings: the Trainer, or an object with its `callbacks`, `accumulate_grad_batches` and
    `gradient_clip_val`.
    profile: None: no batch was run. table_settings, options: of torchrec_sharded and of others;
    None: the defaults.
    """
    profile, options = profile or StepProfile(), options or ChosenOptions()
    conversion = Conversion()
    sizes = measure_module(module, conversion, options.dense)
    planned = None
    if sizes.tables:
        table_settings = table_settings or TorchRecShardedStrategy().table_settings
        try:
            planned = planned_share(module, job, settings, device_type, table_settings, profile)
        except InfeasiblePlanError as error:
            planned = TablesShare(refused=str(error).split(". ")[0])
        except DistRecError as error:
            sizes.refused[TORCHREC] = str(error)
    estimates = estimate_strategies(sizes, job, profile, planned, options.dense)
    stages, stages_notes = estimate_stages(module, sizes, job, settings, profile, options.stages)
    estimates.append(stages)
    recomputing = _recompute_under_ddp(module, sizes, job, profile, options.dense)
    strategy, reason = _choose(sizes, estimates, recomputing, job, conversion.min_rows)
    compressed = {}
    if link is not None and options.dense.powersgd is None and options.dense.comm_dtype == "fp32":
        for option, change in COMPRESSIONS.items():
            (replicated, *_) = estimate_strategies(
                sizes, job, profile, planned, replace(options.dense, **change)
            )
            compressed[option] = replicated.sent_total or 0.0
    start = planned.start if planned is not None else ""
    notes = [
        *_notes(sizes, job, profile),
        *filter(None, [start]),
        *stages_notes,
        *filter(None, [options.note]),
    ]
    return Advice(
        job=job,
        estimates=estimates,
        strategy=strategy,
        reason=reason,
        notes=notes,
        link=link,
        compressed=compressed,
    )


COMPRESSIONS: dict[str, dict[str, Any]] = {
    "comm_dtype: bf16": {"comm_dtype": "bf16"},
    "powersgd: {matrix_rank: 4}": {"powersgd": PowerSGDOptions(matrix_rank=4)},
}


def _recompute_under_ddp(
    module: LightningModule,
    sizes: ModuleSizes,
    job: Job,
    profile: StepProfile,
    options: DenseOptions,
) -> str:
    """Return the option with which ddp_tuned fits, and its memory, in words; "" where it is not
    known to suffice."""
    if options.ddp_checkpointing or profile.saved is None:
        return ""
    changed = replace(options, ddp_checkpointing=True)
    try:
        changed_sizes = replace(sizes, recomputed={DDP: list(changed.ddp_layers(module))})
    except DistRecError:  # no layer repeats
        return ""
    total = estimate_strategies(changed_sizes, job, profile, None, changed)[0].total
    fits = total <= MAX_MEMORY_SHARE * job.memory_bytes
    return f"with activation_checkpointing: true it needs {format_bytes(total)}" if fits else ""


def _choose(
    sizes: ModuleSizes, estimates: list[Estimate], recomputing: str, job: Job, min_rows: int
) -> tuple[str, str]:
    """Return the strategy to take, and the reason as a clause that follows "because".

    recomputing: how ddp_tuned fits where layers compute their activations again; "": it does not,
    or is not known to.
    """
    candidates = {estimate.strategy: estimate for estimate in estimates}
    usable = MAX_MEMORY_SHARE * job.memory_bytes
    memory = f"{MAX_MEMORY_SHARE:.0%} of a rank's {format_bytes(job.memory_bytes)}"
    large = [table for table in sizes.tables if table.weight.rows >= min_rows]
    share = _share_of_tables(sizes)
    # Large tables first: DDP would reduce the gradient of every row and FSDP gather every row,
    # while lookups send those in use.
    torchrec, ddp, fsdp = candidates.get(TORCHREC), candidates[DDP], candidates[FSDP]
    # Tables that no plan fits are torchrec_sharded's as well: it needs more ranks, and others need
    # even more.
    if (
        torchrec is not None
        and TORCHREC not in sizes.refused
        and large
        and share > MIN_TABLES_SHARE
    ):
        tables_reason = _describe_tables(sizes.tables, large[0], share)
        if torchrec.refused:
            return TORCHREC, f"{tables_reason}, although {torchrec.refused}: use more ranks"
        if torchrec.total <= usable:
            return TORCHREC, tables_reason
        hybrid = candidates[TORCHREC_FSDP]
        if hybrid.total <= usable and not fsdp.refused:
            return TORCHREC_FSDP, (
                f"{tables_reason}; with the other layers replicated, a rank needs "
                f"{format_bytes(torchrec.total)}, more "
                f"than {memory}, and with them sharded too, {format_bytes(hybrid.total)}"
            )
        return TORCHREC, (
            f"{tables_reason}, although a rank needs more than {memory}: use more ranks"
        )
    # What fits is replicated: that sends no more than FSDP does, and no layer waits for its
    # parameters.
    if ddp.total <= usable:
        return DDP, (
            f"the replicated module needs {format_bytes(ddp.total)}, which is within {memory}"
        )
    replicated = f"the replicated module needs {format_bytes(ddp.total)}, more than {memory}"
    # Recomputing takes time of a rank alone, while FSDP's gathers take the links'.
    if recomputing and not ddp.refused:
        return DDP, f"{replicated}; {recomputing}"
    if fsdp.refused:
        sharded = f", but fsdp_tuned refuses it: {fsdp.refused}"
    else:
        sharded = (
            f"; sharded over {quantity(job.num_ranks, 'rank')} it needs {format_bytes(fsdp.total)}"
        )
        if fsdp.total <= usable:
            return FSDP, replicated + sharded
    # Last, since ranks of a pipeline idle, and since it takes a module that is mainly a chain of
    # blocks.
    stages = candidates[PIPELINE]
    if not stages.refused and stages.total <= usable:
        return PIPELINE, (
            f"{replicated}{sharded}; the fullest stage needs {format_bytes(stages.total)}"
        )
    if fsdp.refused:
        return DDP, f"{replicated}{sharded}{_without_activations(ddp, usable)}"
    remedy = _without_activations(fsdp, usable).removeprefix("; ") or "use more ranks"
    if not any(parameter.is_sharded for parameter in sizes.parameters):
        remedy = (
            "none of its layers is a block that fsdp_tuned shards; name classes of layers, "
            "as in wrap=['Linear']"
        )
    return FSDP, f"{replicated}{sharded}, which is too much as well: {remedy}"


def _without_activations(estimate: Estimate, usable: float) -> str:
    """Return what to do where only activations are too much; "" where other things are too."""
    activations = estimate.memory.get("activations", 0.0)
    # Recomputing helps where all else fits; otherwise the advice would not be enough.
    if not activations or estimate.total - activations > usable:
        return ""
    return (
        f"; activations are {format_bytes(activations)} of it: compute them again in backward "
        "(activation_checkpointing: true)"
    )


def _describe_tables(tables: list[TableSize], large: TableSize, share: float) -> str:
    memory = f"{share:.0%} of the memory of parameters and optimizer state"
    if len(tables) == 1:
        return (
            f"table {large.name} of {large.weight.rows:,} rows takes {memory}, which is "
            "sharded over the ranks"
        )
    return (
        f"{quantity(len(tables), 'table')}, including {large.name} of {large.weight.rows:,} rows, "
        f"take {memory}, which "
        "is sharded over the ranks"
    )


def _share_of_tables(sizes: ModuleSizes) -> float:
    """Return which share of parameters and optimizer state belongs to tables."""
    tables = {table.weight.name for table in sizes.tables}
    total = sum((p.numel + p.state_numel) * p.itemsize for p in sizes.parameters)
    table_bytes = sum(
        (p.numel + p.state_numel) * p.itemsize for p in sizes.parameters if p.name in tables
    )
    return table_bytes / total if total else 0.0


def _notes(sizes: ModuleSizes, job: Job, profile: StepProfile) -> list[str]:
    notes = [*sizes.notes, *profile.notes]
    if profile.activation_bytes is None and not profile.notes:
        notes.append("activations are left out: no batch was run")
    elif profile.activation_bytes is not None:
        notes.append(
            "activations are what the forward of one batch saves for backward; in stages, and "
            "where layers compute "
            "again, what remains of it"
        )
        if job.precision.endswith("-true") and job.precision != "32-true":
            notes.append(f"activations were measured in 32 bits, not in {job.precision}")
    sparse = [parameter.name for parameter in sizes.parameters if parameter.has_sparse_gradient]
    if sparse:
        notes.append(
            f"the sparse gradient of {sparse[0]} is left out of memory, and of what ddp_tuned sends"
        )
    if sizes.tables:
        notes.append(
            "tables are planned, with the defaults of torchrec_sharded: memory is the fullest "
            "rank's, bytes are those "
            "of the rank that sends the most"
        )
        samples = None if profile.batch_size is None else quantity(profile.batch_size, "sample")
        if samples is None:
            notes.append("what lookups send is unknown without a batch")
        elif any(table.path in profile.lookups for table in sizes.tables):
            notes.append(f"lookups are those of one batch of {samples}")
        else:
            notes.append(f"{samples} are assumed to look up one id of every feature each")
    return notes


MEMORY_COLUMNS = (
    "parameters",
    "gradients",
    "optimizer state",
    "gathered",
    "exchange",
    "activations",
    "recomputed",
)


def print_advice(advice: Advice, console: Console) -> None:
    """Print what each strategy needs, what was assumed, and which strategy to take."""
    job = advice.job
    ranks = f"{quantity(job.num_ranks, 'rank')} on {quantity(job.num_nodes, 'node')}"
    uses = [
        use
        for use in MEMORY_COLUMNS
        if use != "recomputed" or any(use in e.memory for e in advice.estimates)
    ]
    text = text_table(
        ("strategy", *uses, "total", "", "sent per step"),
        ["strategy", ""],
        title=f"{ranks}, {format_bytes(job.memory_bytes)} each, precision {job.precision}: memory "
        "per rank",
        caption="Estimated, not measured: " + "; ".join(advice.notes) + "."
        if advice.notes
        else None,
    )
    for estimate in advice.estimates:
        name = (
            f"> {estimate.strategy}"
            if estimate.strategy == advice.strategy
            else f"  {estimate.strategy}"
        )
        if estimate.refused:
            text.add_row(name, *([""] * (len(uses) + 1)), "refused", "")
            continue
        memory = [
            format_bytes(estimate.memory[use]) if use in estimate.memory else "-" for use in uses
        ]
        sent = "-" if estimate.sent_total is None else format_bytes(estimate.sent_total)
        sent += (
            f", {advice.link.in_words(estimate.sent_total)}"
            if advice.link and estimate.sent_total
            else ""
        )
        text.add_row(name, *memory, format_bytes(estimate.total), _fit(advice, estimate), sent)
    console.print(text)
    for estimate in advice.estimates:
        if estimate.refused:
            console.print(f"{estimate.strategy} refuses the module: {estimate.refused}")
    if job.num_ranks > 1:
        console.print(_host_needs(job).in_words())
    console.print(f"strategy: {advice.strategy}, because {advice.reason}.")
    if advice.link is not None and advice.compressed and advice.strategy == DDP:
        times = ", ".join(
            f"{advice.link.in_words(sent)} with {option}"
            for option, sent in advice.compressed.items()
        )
        console.print(
            f"Gradients over {advice.link.name}, while backward computes: {times}. Compress them "
            "where a step waits "
            "for them; that changes the numbers."
        )


def _host_needs(job: Job) -> HostNeeds:
    # Of gloo: NCCL takes fewer sockets.
    return HostNeeds(job.num_ranks, job.num_ranks // job.num_nodes)


def _fit(advice: Advice, estimate: Estimate) -> str:
    if estimate.total > advice.job.memory_bytes:
        return "DOES NOT FIT"
    return "fits" if advice.fits(estimate) else f"tight, above {MAX_MEMORY_SHARE:.0%}"


def as_json(advice: Advice) -> dict[str, Any]:
    """Return all of an advice as plain values."""
    job = advice.job
    return {
        "strategy": advice.strategy,
        "reason": advice.reason,
        "num_ranks": job.num_ranks,
        "num_nodes": job.num_nodes,
        "memory_bytes_per_rank": job.memory_bytes,
        "precision": job.precision,
        **_host_needs(job).as_json(),
        "strategies": [
            {
                "strategy": estimate.strategy,
                "refused": estimate.refused or None,
                "memory_bytes": {use: round(number) for use, number in estimate.memory.items()},
                "total_bytes": round(estimate.total),
                "fits": advice.fits(estimate),
                # `and` keeps None: unknown is not the same as nothing.
                "sent_bytes_per_step": estimate.sent
                and {kind: round(number) for kind, number in estimate.sent.items()},
                "idle_share": estimate.idle and round(estimate.idle, 4),
            }
            for estimate in advice.estimates
        ],
        "bytes_per_second": advice.link and advice.link.bytes_per_second,
        "compressed_bytes_per_step": {
            option: round(sent) for option, sent in advice.compressed.items()
        },
        "assumed": advice.notes,
    }
