"""Sizes by which a strategy is advised: of a module's parameters, and of what a step keeps."""

import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from lightning_distrec.advice.dry_job import bytes_of_tables, dry_module
from lightning_distrec.advice.meta_copy import configured_optimizers, meta_copy
from lightning_distrec.errors import DistRecError
from lightning_distrec.optimizers.translation import (
    UNKNOWN_TENSORS,
    keeps_state_of_frozen,
    state_numbers,
)
from lightning_distrec.pipeline.chain import (
    StageOptions,
    refuse_optimizers,
    refuse_run,
    split_chain,
)
from lightning_distrec.sharding.tables import Table, find_tables
from lightning_distrec.strategies.data_parallel.gradient_exchange import sparse_weights
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fully_sharded.shard_blocks import (
    choose_blocks,
    choose_replicated,
    refuse_module,
)
from lightning_distrec.strategies.fully_sharded.shards import refuse_sharded
from lightning_distrec.strategies.tables.cluster_facts import TRUE_ITEMSIZE
from lightning_distrec.strategies.torchrec import TorchRecShardedStrategy
from lightning_distrec.units import describe_error, shortened

FSDP = "fsdp_tuned"
TORCHREC = "torchrec_sharded"
PIPELINE = "pipeline_parallel"


@dataclass(frozen=True, kw_only=True)
class Job:
    """The ranks that a module is to train on, and the settings of its Trainer."""

    num_ranks: int
    num_nodes: int
    memory_bytes: int
    """Memory of one rank."""
    trainer: Any
    """Has the `callbacks`, `precision`, `accumulate_grad_batches`, `gradient_clip_val` of one."""
    device_type: str = "cpu"

    @property
    def precision(self) -> str:
        """In full: "32-true", "bf16-mixed"."""
        return str(self.trainer.precision)


@dataclass(frozen=True, kw_only=True)
class ParameterSize:
    """Bytes of one parameter where a rank has all of it."""

    name: str
    parameters: int
    gradients: int
    optimizer_state: int
    is_table: bool
    """Whether torchrec_sharded would shard it as a table."""
    block: int | None
    """The block with which fsdp_tuned gathers it; None: it is gathered for a whole step."""
    is_sharded: bool
    """Whether fsdp_tuned shards it."""

    @property
    def total(self) -> int:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer_state


@dataclass(kw_only=True)
class ModuleSizes:
    """The sizes of a module, in bytes."""

    parameters: list[ParameterSize] = field(default_factory=list)
    """All parameters, tables included; each once."""
    buffers: int = 0
    tables: list[Table] = field(default_factory=list)
    updated_tables: float = 0.0
    """Tables with all that torchrec_sharded keeps for their updates, over all ranks."""
    fullest_stage: int = 0
    """Parameters, gradients and optimizer state of the fullest stage of pipeline_parallel."""
    refused: dict[str, str] = field(default_factory=dict)
    """Strategy -> why it would refuse the module."""
    notes: list[str] = field(default_factory=list)
    """What was assumed."""

    @property
    def layers(self) -> list[ParameterSize]:
        """The parameters that are no tables."""
        return [size for size in self.parameters if not size.is_table]

    @property
    def share_of_tables(self) -> float:
        """The share of parameters and optimizer state that belongs to tables."""
        total = tables = 0
        for size in self.parameters:
            num_bytes = size.parameters + size.optimizer_state
            total += num_bytes
            if size.is_table:
                tables += num_bytes
        return tables / total if total else 0.0


def sharded_bytes(sizes: Iterable[ParameterSize], num_ranks: int) -> float:
    """Return what a rank has of parameters, gradients and optimizer state under fsdp_tuned."""
    total = 0.0
    for size in sizes:
        total += size.total / num_ranks if size.is_sharded else size.total
    return total


def gathered_bytes(sizes: Iterable[ParameterSize], num_ranks: int) -> float:
    """Return what a rank under fsdp_tuned gathers at once, with gradients: one block at a time."""
    if num_ranks == 1:
        return 0.0
    outside_bytes = 0.0
    block_bytes: Counter[int] = Counter()
    for size in sizes:
        gathered = size.parameters + size.gradients
        if not size.is_sharded:
            continue
        if size.block is None:
            outside_bytes += gathered
        else:
            block_bytes[size.block] += gathered
    return outside_bytes + max(block_bytes.values(), default=0)


def measure_module(module: LightningModule, job: Job) -> ModuleSizes:
    """Return the sizes of a module, which stays as it is: a copy without memory is configured."""
    sizes = ModuleSizes()
    # Nothing that is drawn later may change, so that advice changes no number of a fit.
    with torch.random.fork_rng(devices=[]):
        copied, optimizers = _copy_and_configure(module, sizes)
    sizes.buffers = sum(buffer.numel() * buffer.itemsize for buffer in copied.buffers())
    _measure_tables(module, copied, job, sizes)
    blocks = _find_blocks(copied, sizes)
    _measure_parameters(copied, optimizers, blocks, job, sizes)
    _measure_stages(copied, optimizers, job, sizes)
    return sizes


def _copy_and_configure(
    module: LightningModule, sizes: ModuleSizes
) -> tuple[LightningModule, list[Optimizer]]:
    """Return a copy on the meta device and its optimizers; the module where it has no copy."""
    copied = module
    problem = "the module cannot be copied and configured"
    try:
        copied = meta_copy(module)
        problem = "configure_optimizers failed on a copy of the module"
        return copied, configured_optimizers(copied)
    # Of any kind: the user's code runs here.
    except Exception as error:
        sizes.notes.append(
            f"{problem} without a Trainer ({describe_error(error)}): {UNKNOWN_TENSORS} tensors of "
            "optimizer state are assumed for each parameter, as of Adam"
        )
    trainable = [parameter for parameter in copied.parameters() if parameter.requires_grad]
    return copied, [Adam(trainable)] if trainable else []


def _measure_tables(
    module: LightningModule, copied: LightningModule, job: Job, sizes: ModuleSizes
) -> None:
    """Find the tables of the copy, and what torchrec_sharded keeps of them, by its defaults."""
    settings = TorchRecShardedStrategy().table_settings
    try:
        sizes.tables = find_tables(copied, settings.conversion).tables
        if sizes.tables:
            dry = dry_module(module, job.trainer, settings, torch.device(job.device_type))
            sizes.updated_tables = bytes_of_tables(dry)
    except DistRecError as error:
        sizes.refused[TORCHREC] = str(error)


def _find_blocks(copied: LightningModule, sizes: ModuleSizes) -> list[nn.Module]:
    """Return the blocks that fsdp_tuned gathers in turns, by its defaults."""
    options = FSDPOptions()
    try:
        refuse_module(copied)
        return choose_blocks(copied, options.wrap, options.min_num_parameters)
    except DistRecError as error:
        sizes.refused[FSDP] = str(error)
        return []


def _measure_parameters(
    copied: LightningModule,
    optimizers: list[Optimizer],
    blocks: list[nn.Module],
    job: Job,
    sizes: ModuleSizes,
) -> None:
    state_numel = _state_numel(optimizers, sizes)
    tables = {id(table.parameter) for table in sizes.tables}
    sparse = set(map(id, sparse_weights(copied)))
    replicated = choose_replicated(copied, blocks, copied.automatic_optimization)
    replicated_ids = set(map(id, replicated.values()))
    block_by_id: dict[int, int] = {}
    for number, block in enumerate(blocks):
        block_by_id |= dict.fromkeys(map(id, block.parameters()), number)
    for name, parameter in copied.named_parameters():
        key = id(parameter)
        itemsize = TRUE_ITEMSIZE.get(job.precision, parameter.itemsize)
        parameter_bytes = parameter.numel() * itemsize
        has_gradient = parameter.requires_grad and key not in sparse
        size = ParameterSize(
            name=name,
            parameters=parameter_bytes,
            gradients=parameter_bytes if has_gradient else 0,
            optimizer_state=state_numel.get(key, 0) * itemsize,
            is_table=key in tables,
            block=block_by_id.get(key),
            is_sharded=key not in replicated_ids,
        )
        sizes.parameters.append(size)
        if key in sparse:
            sizes.notes.append(f"the sparse gradient of {name} is left out")


def _state_numel(optimizers: list[Optimizer], sizes: ModuleSizes) -> dict[int, int]:
    """Return parameter's id -> number of elements in its optimizer state."""
    numbers: dict[int, int] = {}
    unknown: list[str] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad and not keeps_state_of_frozen(optimizer):
                    continue
                numel = state_numbers(optimizer, group, parameter)
                if numel is None:
                    unknown.append(type(optimizer).__name__)
                    numel = UNKNOWN_TENSORS * parameter.numel()
                # Added up, since several optimizers may have a state for one parameter.
                numbers[id(parameter)] = numbers.get(id(parameter), 0) + numel
    if unknown:
        kinds = shortened(list(dict.fromkeys(unknown)), 3)
        sizes.notes.append(
            f"the state of {kinds} is unknown: {UNKNOWN_TENSORS} tensors are assumed for each "
            "parameter"
        )
    return numbers


def _measure_stages(
    copied: LightningModule, optimizers: list[Optimizer], job: Job, sizes: ModuleSizes
) -> None:
    """Measure the fullest stage where the ranks are one pipeline, by its defaults."""
    if job.num_ranks < 2:
        sizes.refused[PIPELINE] = "one rank is no pipeline: use at least 2"
        return
    try:
        refuse_run(job.trainer, copied)
        refuse_sharded(copied, PIPELINE)
        refuse_optimizers(optimizers, copied)
        layout = split_chain(copied, StageOptions(), job.num_ranks)
    except DistRecError as error:
        sizes.refused[PIPELINE] = str(error)
        return
    stage_bytes = [0] * layout.num_stages
    for size in sizes.parameters:
        stage_bytes[layout.stage_by_name[size.name]] += size.total
    sizes.fullest_stage = max(stage_bytes)


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """What one training step has shown."""

    activation_bytes: int | None = None
    """What a forward keeps for its backward, without parameters; None: not measured."""
    problem: str = "no batch was run"
    """Why it was not measured."""


def measure_step(module: LightningModule, batch: Any, precision: str) -> MeasuredStep:
    """Run training_step with this batch, and return what it keeps for its backward.

    The step runs on the module itself: its buffers may change.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return MeasuredStep(problem="the module is on the meta device")
    if not module.automatic_optimization:
        # It steps optimizers by itself, which only a Trainer sets up, or which would change the
        # weights here.
        return MeasuredStep(
            problem="with automatic_optimization=False, training_step steps optimizers itself: "
            "leave memory for what the forwards before one backward keep"
        )
    saved_bytes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:  # sparse tensors have no storage
            storage = tensor.untyped_storage()
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    autocast: Any = nullcontext()
    if precision.endswith("-mixed"):
        # For 16-mixed too, which Lightning does not run on a CPU: it takes the same bytes.
        autocast = torch.autocast(module.device.type, torch.bfloat16)
    # What is saved lives as long as the loss, so that storages have different addresses.
    saved_tensors = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    try:
        with saved_tensors, autocast, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # self.log without a Trainer
            loss = module.training_step(batch, 0)
    # Of any kind: the user's code runs here.
    except Exception as error:
        reason = describe_error(error)
        return MeasuredStep(problem=f"training_step failed on a batch without a Trainer ({reason})")
    del loss
    for tensor in [*module.parameters(), *module.buffers()]:
        saved_bytes.pop(tensor.untyped_storage().data_ptr(), None)
    return MeasuredStep(activation_bytes=sum(saved_bytes.values()))
