"""Times the blocks of a chain by forwards of the first batch, in set-up under split="time"."""

from contextlib import closing
from functools import partial
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_distrec._compat.lightning import train_dataloaders
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError
from lightning_distrec.prefetch.peek import first_batches, loaders_in, peek_obstacle, unchanged
from lightning_distrec.strategies.estimates.block_profile import time_steps
from lightning_distrec.strategies.stages.chain import find_chain
from lightning_distrec.strategies.stages.step_effects import LoggedValues


def measure_blocks(
    trainer: Trainer, module: LightningModule, path: str, device: torch.device, consensus: Consensus
) -> list[int] | None:
    """Collective. Return the nanoseconds that each block's forward takes on rank 0; None: the run does not train.

    What training_step does before the chain counts with the first block, and what it does after it with the last one.
    Raises ConfigError on every rank: there is no batch to look at, or training_step fails here.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return None

    def measure() -> list[int]:
        batch = _first_batch(trainer)  # on all ranks, whose loaders stay alike
        return _measure_on_batch(trainer, module, path, batch, device) if consensus.rank == 0 else []

    # Training begins with the same draws on all ranks, and rank 0 alone draws in the forward.
    with unchanged(include_cuda=device.type == "cuda"):
        times = list(consensus.all_gather(consensus.all_or_none("setup", measure))[0])
    milliseconds = ", ".join(f"{nanoseconds / 1e6:.2g}" for nanoseconds in times)
    rank_zero_info(f"pipeline_parallel: the forwards of blocks take {milliseconds} ms.")
    return times


def _first_batch(trainer: Trainer) -> Any:
    """Return the first batch of the first loader that can be looked at. Raises ConfigError: there is none."""
    obstacle = "there are no batches to train on"
    for loader in loaders_in(train_dataloaders(trainer)):
        if reason := peek_obstacle(loader):
            obstacle = reason
            continue
        with closing(first_batches(loader, 1)) as batches:
            for batch in batches:
                return batch
    raise ConfigError(f"split='time': {obstacle}, so that no block can be timed. Set split='parameters'.")


def _measure_on_batch(
    trainer: Trainer, module: LightningModule, path: str, batch: Any, device: torch.device
) -> list[int]:
    chain = find_chain(module, path)
    blocks = dict(zip(chain.paths, chain.blocks, strict=True))
    # Running statistics and counters: the forward writes them, and training must begin with the earlier values.
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    log = LoggedValues(module)
    was_training = module.training
    try:
        # In training mode, as dropout and the like belong to the time of a block.
        module.to(device).train()
        batch = _move_batch(trainer, module, batch, device)
        arguments = (batch, 0) if len(signature(module.training_step).parameters) > 1 else (batch,)
        with torch.no_grad(), log.recorded(), log.metrics_unchanged():
            steps = time_steps(module, blocks, partial(module.training_step, *arguments), learns=False)
    except Exception as error:  # of the user's step; training meets it again
        raise ConfigError(
            f"split='time': training_step cannot run before training ({type(error).__name__}: {error}). Set "
            "split='parameters'."
        ) from error
    finally:
        module.train(was_training)
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
    times = steps.chain_times(chain.paths)
    if times is None:
        raise ConfigError(
            f"split='time': training_step does not call every block of '{chain.path}'. Set split='parameters'."
        )
    return times.forward_nanoseconds


def _move_batch(trainer: Trainer, module: LightningModule, batch: Any, device: torch.device) -> Any:
    """Return the batch on the device, passed through the user's hooks as the Trainer does."""
    data = getattr(trainer, "datamodule", None)
    hooks = data if data is not None and is_overridden("on_before_batch_transfer", data) else module
    batch = hooks.on_before_batch_transfer(batch, 0)
    return trainer.strategy.batch_to_device(batch, device, 0)
