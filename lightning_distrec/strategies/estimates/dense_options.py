"""Options of ddp_tuned and fsdp_tuned that change what they need."""

from contextlib import suppress
from dataclasses import dataclass, field

from torch import nn

from lightning_distrec.errors import DistRecError
from lightning_distrec.strategies.data_parallel.activations import (
    ActivationCheckpointing,
    checkpointed_layers,
    repeated_layers,
)
from lightning_distrec.strategies.data_parallel.gradient_exchange import CommDtype, PowerSGDOptions
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fully_sharded.shard_blocks import choose_blocks

MAX_MEMORY_SHARE = 0.8
"""Share of a rank's memory that is used; the rest is for libraries, allocators, buckets and
batches."""


@dataclass(frozen=True, kw_only=True)
class DenseOptions:
    """Their defaults, unless the job says otherwise."""

    comm_dtype: CommDtype = "fp32"
    powersgd: PowerSGDOptions | None = None
    ddp_checkpointing: ActivationCheckpointing = False
    fsdp: FSDPOptions = field(default_factory=FSDPOptions)

    def ddp_layers(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return path -> layer of those that may compute again under ddp_tuned. Raises ConfigError:
        as in training."""
        return checkpointed_layers(module, self.ddp_checkpointing, None)

    def fsdp_layers(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the same under fsdp_tuned."""
        if not self.fsdp.activation_checkpointing:
            return {}
        # Blocks come as modules, and options name paths; a module with several paths has its first
        # one here.
        paths = {id(submodule): path for path, submodule in module.named_modules()}
        blocks = choose_blocks(module, self.fsdp.wrap, self.fsdp.min_num_parameters)
        return checkpointed_layers(
            module, self.fsdp.activation_checkpointing, {paths[id(b)]: b for b in blocks}
        )


def watched_layers(module: nn.Module, options: DenseOptions) -> dict[str, nn.Module]:
    """Return path -> layer of all that may compute again: those that repeat, and those of the
    options."""
    watched = dict(repeated_layers(module))
    for layers in (options.ddp_layers, options.fsdp_layers):
        with suppress(DistRecError):  # `measure_module` says why there are none
            watched |= layers(module)
    return watched
