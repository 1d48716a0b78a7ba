"""Ranks without a batch of their own take part in the others' steps, and change nothing.

As torch's DistributedDataParallel.join(divide_by_initial_world_size=False) does, but for Lightning's loop: where that
answers collectives until all are through, here such a rank goes through the loop's steps, so that optimizers,
schedulers, checkpoints and evaluations are reached by all ranks. The module's own step is left out: in training a loss
takes its place whose gradients are zero, and the others' losses weigh as much more as DDP divides by too many ranks.
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
"""A step -> where the Trainer has its loaders."""


class Joining:
    """Runs the steps of one run. rank: this one."""

    def __init__(self, module: LightningModule, rank: int) -> None:
        self._module = module
        self._rank = rank
        self._whose: list[bool] = []
        self._is_inside = False

    def step(self, name: str, model: nn.Module, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Collective. Return what `run`, the module's own step, does where this rank has a batch.

        model: the module in DDP. Raises ConfigError: several loaders are drawn from at once.
        """
        self._whose = self._next(name, args)
        is_training = name == "training_step"
        if not self._whose:  # all have as many
            return run()
        if self._whose[self._rank]:
            self._is_inside = True
            try:
                output = run()
            finally:
                self._is_inside = False
        else:
            output = _through(model, self._module, _without_effect if is_training else _nothing)
        if is_training and not self._whose[0]:
            self._hand_buffers_on(model)
        return output

    @property
    def weight(self) -> float:
        """What a loss is multiplied by, so that the gradients are the mean over the ranks that have a batch."""
        return len(self._whose) / sum(self._whose) if self._whose else 1.0

    def refuse_inside(self, what: str) -> None:
        """Raise ConfigError where the module's own step talks to other ranks, of which some may not run it."""
        if self._is_inside:
            raise ConfigError(
                f"uneven_inputs='join': {what} in a step needs all ranks, and those whose batches are over do not run "
                "it. Log with on_step=False, on_epoch=True, talk to other ranks at the end of the epoch, or set "
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
                    f"uneven_inputs='join': {len(loaders)} dataloaders are drawn from at once, whose batches end at "
                    "different places. Use one, or uneven_inputs='stop'."
                )
            index = args[-1]
        loader = loaders[index]
        return loader.own_batches.popleft() if isinstance(loader, JoinedLoader) else []

    @torch.no_grad()
    def _hand_buffers_on(self, model: nn.Module) -> None:
        """Collective. Give all ranks the buffers of the first that has a batch: DDP goes on with those of rank 0."""
        if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
            for buffer in model.module.buffers():
                dist.broadcast(buffer, self._whose.index(True))


class NoJoining:
    """In the place of a Joining: all ranks have equally many batches."""

    weight = 1.0

    def step(self, name: str, model: nn.Module, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Run the module's own step."""
        return run()

    def refuse_inside(self, what: str) -> None:
        """Refuse nothing: every rank runs every step."""


def check_joining(graph: Mapping[str, bool]) -> None:
    """Raise ConfigError: DDP is told to look which layers a step uses, and a rank without a batch uses none."""
    for name, value in graph.items():
        if value:
            raise ConfigError(
                f"uneven_inputs='join' and {name}=True: a rank whose batches are over runs no layer, so that it cannot "
                f"tell which are used. Leave {name} out, or set uneven_inputs='stop'."
            )


def refuse_to_join(trainer: Trainer, module: LightningModule) -> None:
    """Raise ConfigError where ranks without a batch cannot do what the others' steps need of them."""
    if trainer.state.fn == TrainerFn.FITTING:
        if not module.automatic_optimization:
            raise ConfigError(
                "uneven_inputs='join': with automatic_optimization=False the module's own step runs the optimizers, "
                "and a rank whose batches are over does not run it. Use automatic optimization, or set "
                "uneven_inputs='stop'."
            )
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise ConfigError(
                "uneven_inputs='join': training_step(dataloader_iter) draws the batches itself. Take `batch`, or set "
                "uneven_inputs='stop'."
            )
    for path, part in module.named_modules():
        together = isinstance(part, nn.SyncBatchNorm) or (isinstance(part, Metric) and part.dist_sync_on_step)
        if together:
            raise ConfigError(
                f"uneven_inputs='join': '{path}' ({type(part).__name__}) talks to all ranks in every step, and those "
                "whose batches are over do not run it. Replace it (nn.BatchNorm, dist_sync_on_step=False), or set "
                "uneven_inputs='stop'."
            )


def _through(model: nn.Module, module: LightningModule, run: Callable[[LightningModule], Any]) -> Any:
    """Run something in the place of the module's forward, inside of DDP's, which prepares backward."""
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


def _without_effect(module: LightningModule) -> Tensor:
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
