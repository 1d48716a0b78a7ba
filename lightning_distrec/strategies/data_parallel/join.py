"""Ranks whose batches have ended join the others' steps without changing anything.

The numbers are those of torch's DistributedDataParallel.join(divide_by_initial_world_size=False). That answers the
others' collectives outside of the loop; here the rank runs Lightning's loop on, so that all ranks reach optimizers,
schedulers, checkpoints and evaluations. It skips the module's own step: in training it returns a loss whose gradients
are zero, and the other ranks' losses are scaled up, since DDP divides by the number of all ranks.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.sparse_weights import sparse_weights
from lightning_distrec.pipeline.joined_batches import JoinedLoader

LOADERS = {
    "training_step": "train_dataloader",
    "validation_step": "val_dataloaders",
    "test_step": "test_dataloaders",
}
"""Step -> attribute of the Trainer that has its dataloaders."""


class Joining:
    """Runs the steps of one run, on this `rank`."""

    def __init__(self, module: LightningModule, rank: int) -> None:
        self._module = module
        self._rank = rank
        self._has_batch: list[bool] = []
        """For each rank, whether it has a batch in this step; empty where all ranks have equally many."""
        self._is_inside = False

    def step(self, name: str, model: nn.Module, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Collective. Return what `run`, the module's own step, returns; without a batch, what changes nothing.

        model: the module in DDP. Raises ConfigError: a step draws from several dataloaders.
        """
        self._has_batch = self._next(name, args)
        is_training = name == "training_step"
        if not self._has_batch:
            return run()
        if self._has_batch[self._rank]:
            self._is_inside = True
            try:
                output = run()
            finally:
                self._is_inside = False
        else:
            output = _run_in_ddp(model, self._module, _zero_loss if is_training else _nothing)
        if is_training and not self._has_batch[0]:
            self._broadcast_buffers(model)
        return output

    @property
    def weight(self) -> float:
        """The factor of a loss that makes the gradients the mean over the ranks that have a batch."""
        return len(self._has_batch) / sum(self._has_batch) if self._has_batch else 1.0

    def refuse_inside(self, what: str) -> None:
        """Raise ConfigError where the module's own step runs a collective: ranks without a batch do not."""
        if self._is_inside:
            raise ConfigError(
                f"uneven_inputs='join': {what} in a step needs all ranks, and those whose batches have ended do not "
                "run it. Log with on_step=False, on_epoch=True, run collectives at the end of the epoch, or set "
                "uneven_inputs='stop'."
            )

    def _next(self, name: str, args: tuple[Any, ...]) -> list[bool]:
        loaders = _flat(getattr(self._module.trainer, LOADERS[name]))
        index = 0
        if len(loaders) > 1 and any(isinstance(loader, JoinedLoader) for loader in loaders):
            if (
                name == "training_step"
                or "dataloader_idx" not in inspect.signature(getattr(self._module, name)).parameters
            ):
                raise ConfigError(
                    f"uneven_inputs='join': a step draws from {len(loaders)} dataloaders, whose batches end at "
                    "different steps. Use one dataloader, or uneven_inputs='stop'."
                )
            index = args[-1]
        loader = loaders[index]
        return loader.own_batches.popleft() if isinstance(loader, JoinedLoader) else []

    @torch.no_grad()
    def _broadcast_buffers(self, model: nn.Module) -> None:
        """Collective. Give all ranks the buffers of the first rank with a batch: DDP broadcasts rank 0's next."""
        if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
            for buffer in model.module.buffers():
                dist.broadcast(buffer, self._has_batch.index(True))


class NoJoining:
    """In the place of a Joining: all ranks have equally many batches."""

    weight = 1.0

    def step(self, name: str, model: nn.Module, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run the module's own step."""
        return run()

    def refuse_inside(self, what: str) -> None:
        """Refuse nothing: every rank runs every step."""


def check_joining(graph: Mapping[str, bool]) -> None:
    """Raise ConfigError: DDP must find the layers that a step uses, and a rank without a batch uses none."""
    for name, value in graph.items():
        if value:
            raise ConfigError(
                f"uneven_inputs='join' and {name}=True: a rank whose batches have ended runs no layer, so DDP cannot "
                f"find out which are used. Leave {name} out, or set uneven_inputs='stop'."
            )


def refuse_target(activation_checkpointing: object) -> None:
    """Raise ConfigError: ranks decide together after the first step, and a rank without a batch does not run it."""
    if isinstance(activation_checkpointing, str):
        raise ConfigError(
            f"uneven_inputs='join' and activation_checkpointing={activation_checkpointing!r}: what activations take is "
            "measured in a step that all ranks run. Name the layers, or set uneven_inputs='stop'."
        )


def refuse_to_join(trainer: Trainer, module: LightningModule) -> None:
    """Raise ConfigError where ranks without a batch cannot join the others' steps."""
    if trainer.state.fn == TrainerFn.FITTING:
        if not module.automatic_optimization:
            raise ConfigError(
                "uneven_inputs='join': with automatic_optimization=False the module's own step runs the optimizers, "
                "and a rank whose batches have ended does not run it. Use automatic optimization, or set "
                "uneven_inputs='stop'."
            )
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise ConfigError(
                "uneven_inputs='join': training_step(dataloader_iter) draws the batches itself. Take `batch`, or set "
                "uneven_inputs='stop'."
            )
    for path, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm) or (isinstance(child, Metric) and child.dist_sync_on_step):
            raise ConfigError(
                f"uneven_inputs='join': '{path}' ({type(child).__name__}) runs a collective in every step, and ranks "
                "whose batches have ended do not run it. Replace it (nn.BatchNorm, dist_sync_on_step=False), or set "
                "uneven_inputs='stop'."
            )


def _run_in_ddp(model: nn.Module, module: LightningModule, run: Callable[[LightningModule], Any]) -> Any:
    """Run something in the place of the module's forward, inside of DDP's, which prepares backward."""
    # As Lightning's _ForwardRedirection: DDP calls module.forward, so that is replaced on the instance.
    original = module.forward

    def instead(_: Tensor) -> Any:
        return run(module)

    module.forward = instead  # type: ignore[method-assign]
    try:
        return model(torch.zeros((), device=module.device))
    finally:
        module.forward = original  # type: ignore[method-assign]


def _nothing(module: LightningModule) -> None:
    return None


def _zero_loss(module: LightningModule) -> Tensor:
    """Return a loss of 0 whose gradients are zero, for every parameter."""
    sparse = sparse_weights(module)
    parameters = [p for p in module.parameters() if p.requires_grad]
    return _NoGradients.apply([p in sparse for p in parameters], *parameters)


class _NoGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, are_sparse: list[bool], *parameters: Tensor) -> Tensor:
        ctx.are_sparse = are_sparse
        ctx.likes = [(p.shape, p.dtype, p.device) for p in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        zeros = [_zeros(is_sparse, *like) for is_sparse, like in zip(ctx.are_sparse, ctx.likes, strict=True)]
        return None, *zeros


def _zeros(is_sparse: bool, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not is_sparse:
        return torch.zeros(shape, dtype=dtype, device=device)
    none = torch.zeros(1, 0, dtype=torch.int64, device=device)
    values = torch.zeros(0, *shape[1:], dtype=dtype, device=device)
    return torch.sparse_coo_tensor(none, values, shape, check_invariants=False)


def _flat(loaders: Any) -> list[Any]:
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
