"""What of a module takes memory and travels: its parameters, their optimizer state, its tables and its blocks."""

from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_distrec.errors import DistRecError
from lightning_distrec.optimizers.state_sizes import UNKNOWN_TENSORS, keeps_state_of_frozen, state_numbers
from lightning_distrec.optimizers.translation import translate
from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.sharding.tables import Table, find_tables
from lightning_distrec.strategies.estimates.meta_copy import meta_copy, optimizers_of
from lightning_distrec.strategies.fully_sharded.blocks import choose_blocks
from lightning_distrec.strategies.fully_sharded.refusals import refuse_module
from lightning_distrec.strategies.fully_sharded.replicated_parameters import kept_whole
from lightning_distrec.strategies.tables.refusals import why_not_in_backward
from lightning_distrec.units import shortened

MIN_NUM_PARAMETERS = 1_000_000
"""TunedFSDPStrategy's, from where on a part of a module is a block."""


@dataclass(frozen=True, kw_only=True)
class ParameterSize:
    """One parameter."""

    name: str
    rows: int
    """Its first dim; 0 for a single number."""
    numbers: int
    number_bytes: int
    state_numbers: int
    learns: bool
    has_sparse_gradient: bool
    block: int | None
    """The block that gathers it under fsdp_tuned, by its place in the module; None: it is gathered for a whole step."""
    is_cut: bool
    """Whether fsdp_tuned cuts it."""


@dataclass(frozen=True, kw_only=True)
class TableSize:
    """One table that torchrec_sharded would shard."""

    name: str
    path: str
    """Where the module that looks it up is."""
    weight: ParameterSize
    dim: int
    features: tuple[str, ...]
    keeps_gradient: bool
    """Whether a step keeps a gradient as large as the table."""


@dataclass(kw_only=True)
class ModuleSizes:
    """A module's parts, by size."""

    parameters: list[ParameterSize] = field(default_factory=list)
    """All, those of tables too; each once."""
    tables: list[TableSize] = field(default_factory=list)
    buffer_bytes: int = 0
    num_blocks: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Strategy -> why it would refuse the module."""
    said: list[str] = field(default_factory=list)
    """What was assumed."""

    @property
    def in_no_table(self) -> list[ParameterSize]:
        """The parameters that torchrec_sharded trains as under DDP."""
        tables = {table.weight.name for table in self.tables}
        return [parameter for parameter in self.parameters if parameter.name not in tables]


def measure_module(module: LightningModule, settings: Any, device_type: str, conversion: Conversion) -> ModuleSizes:
    """Return the sizes of a module, which is left as it is: a copy without memory is configured and looked at.

    settings: the Trainer, or what has its `callbacks`, `accumulate_grad_batches` and `gradient_clip_val`.
    """
    with torch.random.fork_rng(devices=[]):  # what configure_model draws must not change what is drawn later
        return _measure(module, settings, device_type, conversion)


def _measure(module: LightningModule, settings: Any, device_type: str, conversion: Conversion) -> ModuleSizes:
    sizes = ModuleSizes()
    try:
        there = meta_copy(module)
    except Exception as error:
        # The module itself is only looked at: its configure_model and configure_optimizers may change it.
        there, optimizers = module, None
        sizes.said.append(
            f"the module cannot be copied and configured without a Trainer ({_line(error)}): it was looked at as it "
            f"is, and {UNKNOWN_TENSORS} tensors of state are taken for each parameter"
        )
    else:
        optimizers = _made_optimizers(there, sizes)
    sizes.buffer_bytes = sum(buffer.numel() * buffer.itemsize for buffer in there.buffers())
    _look_at_parameters(there, optimizers, sizes)
    _look_at_tables(there, optimizers, settings, device_type, conversion, sizes)
    return sizes


def _made_optimizers(there: LightningModule, sizes: ModuleSizes) -> list[Optimizer] | None:
    try:
        return optimizers_of(there)
    except Exception as error:
        sizes.said.append(
            f"configure_optimizers failed on a copy of the module without a Trainer ({_line(error)}): "
            f"{UNKNOWN_TENSORS} tensors of state are taken for each parameter"
        )
        return None


def _look_at_parameters(there: LightningModule, optimizers: list[Optimizer] | None, sizes: ModuleSizes) -> None:
    states = _states(optimizers, there, sizes)
    sparse = {
        id(part.weight) for part in there.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }
    blocks: list[nn.Module] = []
    try:
        refuse_module(there)
        blocks = choose_blocks(there, "auto", MIN_NUM_PARAMETERS)
    except DistRecError as error:
        sizes.refused["fsdp_tuned"] = str(error)
    places = {id(parameter): place for place, block in enumerate(blocks) for parameter in block.parameters()}
    whole = {id(parameter) for parameter in kept_whole(there, blocks, there.automatic_optimization).values()}
    sizes.num_blocks = len(blocks)
    for name, parameter in there.named_parameters():
        size = ParameterSize(
            name=name,
            rows=parameter.shape[0] if parameter.dim() else 0,
            numbers=parameter.numel(),
            number_bytes=parameter.itemsize,
            state_numbers=states.get(id(parameter), 0),
            learns=parameter.requires_grad,
            has_sparse_gradient=id(parameter) in sparse,
            block=places.get(id(parameter)),
            is_cut=id(parameter) not in whole,
        )
        sizes.parameters.append(size)


def _states(optimizers: list[Optimizer] | None, there: nn.Module, sizes: ModuleSizes) -> dict[int, int]:
    """Return parameter's id -> how many numbers the optimizers keep beside it."""
    if optimizers is None:
        return {id(p): UNKNOWN_TENSORS * p.numel() for p in there.parameters() if p.requires_grad}
    states: dict[int, int] = {}
    unknown: dict[str, None] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad and not keeps_state_of_frozen(optimizer):
                    continue
                numbers = state_numbers(optimizer, group, parameter)
                if numbers is None:
                    unknown[type(optimizer).__name__] = None
                    numbers = UNKNOWN_TENSORS * parameter.numel()
                states[id(parameter)] = states.get(id(parameter), 0) + numbers
    if unknown:
        kinds = shortened(list(unknown), 3)
        sizes.said.append(f"{kinds} is not known: {UNKNOWN_TENSORS} tensors of state are taken for each parameter")
    return states


def _look_at_tables(
    there: LightningModule,
    optimizers: list[Optimizer] | None,
    settings: Any,
    device_type: str,
    conversion: Conversion,
    sizes: ModuleSizes,
) -> None:
    try:
        tables = find_tables(there, conversion).tables
        kept = _kept_gradients(there, tables, optimizers, settings, device_type)
    except DistRecError as error:
        sizes.refused["torchrec_sharded"] = str(error)
        return
    by_id = {id(p): size for (_, p), size in zip(there.named_parameters(), sizes.parameters, strict=True)}
    for table in tables:
        weight: Tensor = table.parameter
        sizes.tables.append(
            TableSize(
                name=table.full_name,
                path=table.collection,
                weight=by_id[id(weight)],
                dim=table.config.embedding_dim,
                features=tuple(table.config.feature_names),
                keeps_gradient=kept[table.full_name],
            )
        )


def _kept_gradients(
    there: LightningModule,
    tables: list[Table],
    optimizers: list[Optimizer] | None,
    settings: Any,
    device_type: str,
) -> dict[str, bool]:
    if optimizers is None:
        return {table.full_name: table.parameter.requires_grad for table in tables}
    updates = translate(
        {table.full_name: table.parameter for table in tables},
        {table.full_name: "auto" for table in tables},
        optimizers,
        device_type,
        why_not_in_backward(settings, there, None),  # type: ignore[arg-type]  # only loss scaling is asked for
        {table.full_name for table in tables if table.plain is not None},
    )
    return {name: update.kind == "dense" for name, update in updates.items()}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
