"""The sizes of a module, and the job that it is to train in."""

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_distrec._compat.torch import copy_in_backward
from lightning_distrec.errors import DistRecError
from lightning_distrec.optimizers.translation import (
    UNKNOWN_TENSORS,
    keeps_state_of_frozen,
    state_numbers,
)
from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.sharding.tables import Table, find_tables
from lightning_distrec.strategies.estimates.dense_options import DenseOptions
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fully_sharded.shard_blocks import (
    choose_blocks,
    choose_replicated,
    refuse_module,
)
from lightning_distrec.units import describe_error, shortened


@dataclass(frozen=True, kw_only=True)
class ParameterSize:
    """The size of one parameter."""

    name: str
    rows: int
    """Its first dim; 0 for a scalar."""
    numel: int
    itemsize: int
    state_numel: int
    """Elements of its optimizer state."""
    requires_grad: bool
    has_sparse_gradient: bool
    block: int | None
    """The block that gathers it under fsdp_tuned, by its position in the module; None: gathered for
    a whole step."""
    is_sharded: bool
    """Whether fsdp_tuned shards it."""


@dataclass(frozen=True, kw_only=True)
class TableSize:
    """The size of one table that torchrec_sharded would shard."""

    name: str
    path: str
    """Path of the module that looks it up."""
    weight: ParameterSize


@dataclass(kw_only=True)
class ModuleSizes:
    """The sizes of a module."""

    parameters: list[ParameterSize] = field(default_factory=list)
    """All parameters, tables included; each once."""
    tables: list[TableSize] = field(default_factory=list)
    buffer_bytes: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Strategy -> why it would refuse the module."""
    recomputed: dict[str, list[str]] = field(default_factory=dict)
    """Strategy -> the paths of the layers that may compute their activations again."""
    notes: list[str] = field(default_factory=list)
    """What was assumed."""

    @property
    def dense_parameters(self) -> list[ParameterSize]:
        """The parameters that are no tables, which torchrec_sharded trains as under DDP or FSDP."""
        tables = {table.weight.name for table in self.tables}
        return [parameter for parameter in self.parameters if parameter.name not in tables]


def measure_module(
    module: LightningModule, conversion: Conversion, options: DenseOptions | None = None
) -> ModuleSizes:
    """Return the sizes of a module, which stays as it is: they are measured on a configured copy
    without memory."""
    options = options or DenseOptions()
    sizes = ModuleSizes()
    # What configure_model draws must not change what is drawn later, so that advice changes no
    # number of a fit.
    with torch.random.fork_rng(devices=[]):
        measured, optimizers = _copy_and_configure(module, sizes)
    sizes.buffer_bytes = sum(buffer.numel() * buffer.itemsize for buffer in measured.buffers())
    _measure_parameters(measured, optimizers, options.fsdp, sizes)
    for strategy, find in (("ddp_tuned", options.ddp_layers), ("fsdp_tuned", options.fsdp_layers)):
        try:
            sizes.recomputed[strategy] = list(find(measured))
        except DistRecError as error:
            # The first reason stays: what FSDP2 cannot shard need not have layers to recompute.
            sizes.refused.setdefault(strategy, str(error))
    try:
        tables = find_tables(measured, conversion).tables
    except DistRecError as error:
        sizes.refused["torchrec_sharded"] = str(error)
        return sizes
    # By identity, because a weight that is shared has several names and is listed under its first
    # one alone.
    weights = {id(p): size for p, size in zip(measured.parameters(), sizes.parameters, strict=True)}
    sizes.tables = [
        TableSize(name=table.full_name, path=table.collection, weight=weights[id(table.parameter)])
        for table in tables
    ]
    return sizes


def _copy_and_configure(
    module: LightningModule, sizes: ModuleSizes
) -> tuple[LightningModule, list[Optimizer] | None]:
    """Return a copy on the meta device, or the module where it cannot be copied; and the optimizers
    where known."""
    try:
        copied = meta_copy(module)
    except Exception as error:
        # The module itself is only read: its configure_model and configure_optimizers may change
        # it.
        sizes.notes.append(
            "the module cannot be copied and configured without a Trainer "
            f"({describe_error(error)}): it was measured "
            f"as it is, with {UNKNOWN_TENSORS} tensors of optimizer state for each parameter"
        )
        return module, None
    try:
        return copied, configured_optimizers(copied)
    except Exception as error:
        sizes.notes.append(
            "configure_optimizers failed on a copy of the module without a Trainer "
            f"({describe_error(error)}): "
            f"{UNKNOWN_TENSORS} tensors of optimizer state are assumed for each parameter"
        )
        return copied, None


def _measure_parameters(
    measured: LightningModule,
    optimizers: list[Optimizer] | None,
    options: FSDPOptions,
    sizes: ModuleSizes,
) -> None:
    state_numel = _state_numel(optimizers, measured, sizes)
    sparse = {
        id(submodule.weight)
        for submodule in measured.modules()
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse
    }
    blocks: list[nn.Module] = []
    try:
        refuse_module(measured)
        blocks = choose_blocks(measured, options.wrap, options.min_num_parameters)
    except DistRecError as error:
        sizes.refused["fsdp_tuned"] = str(error)
    block_of = {
        id(parameter): i for i, block in enumerate(blocks) for parameter in block.parameters()
    }
    replicated = choose_replicated(measured, blocks, measured.automatic_optimization)
    replicated_ids = {id(parameter) for parameter in replicated.values()}
    sizes.parameters = [
        ParameterSize(
            name=name,
            rows=parameter.shape[0] if parameter.dim() else 0,
            numel=parameter.numel(),
            itemsize=parameter.itemsize,
            state_numel=state_numel.get(id(parameter), 0),
            requires_grad=parameter.requires_grad,
            has_sparse_gradient=id(parameter) in sparse,
            block=block_of.get(id(parameter)),
            is_sharded=id(parameter) not in replicated_ids,
        )
        for name, parameter in measured.named_parameters()
    ]


def _state_numel(
    optimizers: list[Optimizer] | None, measured: nn.Module, sizes: ModuleSizes
) -> dict[int, int]:
    """Return parameter's id -> number of elements in its optimizer state."""
    if optimizers is None:
        return {
            id(p): UNKNOWN_TENSORS * p.numel() for p in measured.parameters() if p.requires_grad
        }
    state_numel: dict[int, int] = {}
    # A set that keeps its order, for the message.
    unknown: dict[str, None] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad and not keeps_state_of_frozen(optimizer):
                    continue
                numel = state_numbers(optimizer, group, parameter)
                if numel is None:
                    unknown[type(optimizer).__name__] = None
                    numel = UNKNOWN_TENSORS * parameter.numel()
                # Added up, since several optimizers may have a state for one parameter.
                state_numel[id(parameter)] = state_numel.get(id(parameter), 0) + numel
    if unknown:
        kinds = shortened(list(unknown), 3)
        sizes.notes.append(
            f"the state of {kinds} is unknown: {UNKNOWN_TENSORS} tensors are "
            "assumed for each parameter"
        )
    return state_numel


TRUE_ITEMSIZE = {"16-true": 2, "bf16-true": 2, "64-true": 8}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Ranks, nodes, memory and precision."""

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


def dense_bytes(
    module: nn.Module,
    tables: Iterable[Table],
    optimizers: Iterable[Optimizer],
    precision: str,
    shares: int,
) -> int:
    """Return bytes of parameters, gradients, optimizer state and buffers that are not of `tables`.

    shares: number of ranks that share them, 1 where they are replicated. An unknown optimizer
    counts as Adam.
    """
    table_ids = {id(table.parameter) for table in tables}
    dense = {id(p): p for p in module.parameters() if id(p) not in table_ids}
    itemsize = {key: TRUE_ITEMSIZE.get(precision, p.itemsize) for key, p in dense.items()}
    total = sum(
        p.numel() * itemsize[key] * (2 if p.requires_grad else 1) for key, p in dense.items()
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in dense and parameter.requires_grad:
                    numbers = state_numbers(optimizer, group, parameter)
                    numbers = UNKNOWN_TENSORS * parameter.numel() if numbers is None else numbers
                    total += numbers * itemsize[id(parameter)]
    return total // shares + sum(buffer.numel() * buffer.itemsize for buffer in module.buffers())


def meta_copy(module: LightningModule) -> LightningModule:
    """Return a copy of the module on the meta device, without its Trainer, after `configure_model`.

    Raises whatever the module's `__deepcopy__` and `configure_model` raise, which may need a
    Trainer.
    """
    memo: dict[int, Any] = {}
    with suppress(RuntimeError):  # the module is attached to no Trainer
        # deepcopy returns what the memo has for an object: None for the Trainer, which has loops
        # and loaders.
        memo[id(module.trainer)] = None
    for parameter in module.parameters():
        # deepcopy takes these for copies, and so allocates nothing; shared weights stay shared.
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
        copy_in_backward(parameter, memo[id(parameter)])
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(module, memo)
    if is_overridden("configure_model", copied):
        with torch.device("meta"):
            copied.configure_model()
    return copied


def configured_optimizers(module: LightningModule) -> list[Optimizer]:
    """Return the optimizers that `configure_optimizers` makes. Raises what it raises: it may need a
    Trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers are made and dropped without a step
        # Once each: with several schedulers an optimizer may be listed more than once.
        return list(dict.fromkeys(_optimizers_in(module.configure_optimizers())))


def _optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in what configure_optimizers returns: one, a list, lists of both kinds,
    or dicts."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from _optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for entry in configured:
            yield from _optimizers_in(entry)
