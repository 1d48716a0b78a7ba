"""What cannot have the numbers of one process when a module is split into stages: refused before the first step."""

from collections.abc import Sequence

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer

from lightning_distrec.errors import OptimizerError, UnsupportedError
from lightning_distrec.optimizers.zero_partition import KNOWN, updates_by_parameter
from lightning_distrec.strategies.data_parallel.gradient_exchange import sparse_weights

PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")


def refuse_run(trainer: Trainer, module: LightningModule) -> None:
    """Raise UnsupportedError: the module, or a setting of the Trainer, cannot be exact in stages."""
    if not module.automatic_optimization:
        raise UnsupportedError(
            "automatic_optimization=False: stages run backward in the order of their schedule, within training_step. "
            "Return the loss from training_step, or use strategy='fsdp_tuned'."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UnsupportedError(
            "training_step(dataloader_iter): a rank runs it more than once for a batch, and would draw others. Take a "
            "batch: training_step(self, batch, batch_idx)."
        )
    if str(trainer.precision) not in PRECISIONS:
        raise UnsupportedError(
            f"Trainer(precision={trainer.precision!r}): pipeline_parallel supports {', '.join(map(repr, PRECISIONS))}. "
            "Backward runs before the loss is scaled: use 'bf16-mixed'."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise UnsupportedError(
                f"{type(callback).__name__} averages all weights on every rank, and a rank has those of its stage. "
                "Remove it, or use strategy='fsdp_tuned'."
            )
    sparse = list(sparse_weights(module).values())
    if sparse:
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which micro-batches do not add up. Set sparse=False for it, or use "
            "strategy='torchrec_sharded'."
        )


def refuse_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise OptimizerError: an optimizer needs more than each parameter's own gradient, or holds others' parameters."""
    current = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not updates_by_parameter(optimizer):
            raise OptimizerError(
                f"pipeline_parallel: {kind} is not known to update each parameter from its own gradient alone, and a "
                f"rank has those of its stage. Use one of {', '.join(known.__name__ for known in KNOWN)}."
            )
        for i, group in enumerate(optimizer.param_groups):
            if stale := [tuple(p.shape) for p in group["params"] if id(p) not in current]:
                raise OptimizerError(
                    f"configure_optimizers gave {kind}, param group {i}, a parameter of shape {stale[0]} that is not "
                    "in the module. Take parameters from self.parameters() in configure_optimizers, not from a list "
                    "that was made before."
                )
