"""How long each block takes, measured with the first batch before the chain is split."""

import time
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError
from lightning_distrec.pipeline.peek import unchanged
from lightning_distrec.strategies.estimates.first_batch import first_batch, moved
from lightning_distrec.strategies.stages.chain import find_chain
from lightning_distrec.strategies.stages.logged_values import LoggedValues

ROUNDS = 4
"""The first one warms up."""


def measure_blocks(
    trainer: Trainer, module: LightningModule, path: str, device: torch.device, consensus: Consensus
) -> list[int] | None:
    """Collective. Return the nanoseconds that each block's forward takes on rank 0; None: the run does not train.

    What training_step does before the chain counts with the first block, and what it does after it with the last one.
    Raises ConfigError on every rank: there is no batch to look at, or training_step fails here.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return None
    with unchanged(include_cuda=device.type == "cuda"):
        batch, why = first_batch(trainer)
        action = lambda: _measured(trainer, module, path, batch, why, device) if consensus.rank == 0 else []  # noqa: E731
        of_ranks = consensus.all_gather(consensus.all_or_none("setup", action))
    shown = ", ".join(f"{each / 1e6:.2g}" for each in of_ranks[0])
    rank_zero_info(f"pipeline_parallel: the forwards of blocks take {shown} ms.")
    return list(of_ranks[0])


def _measured(
    trainer: Trainer, module: LightningModule, path: str, batch: Any, why: str, device: torch.device
) -> list[int]:
    if why:
        raise ConfigError(f"split='time': {why}, so that no block can be timed. Set split='parameters'.")
    blocks = find_chain(module, path).blocks
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    log = LoggedValues(module)
    was_training = module.training
    try:
        module.to(device).train()
        batch = moved(trainer, module, batch, device)
        rounds = []
        for _ in range(ROUNDS):
            with torch.no_grad(), log.recorded(), log.metrics_unchanged():
                rounds.append(_one_round(lambda: _step(module, batch), blocks, device))
    except Exception as error:  # of the user's step; training meets it again
        raise ConfigError(
            f"split='time': training_step cannot run before training ({type(error).__name__}: {error}). Set "
            "split='parameters'."
        ) from error
    finally:
        module.train(was_training)
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
    return [min(times) for times in zip(*rounds[1:], strict=True)]


def _step(module: LightningModule, batch: Any) -> Any:
    takes_number = len(signature(module.training_step).parameters) > 1
    return module.training_step(batch, 0) if takes_number else module.training_step(batch)


def _one_round(step: Callable[[], Any], blocks: list[nn.Module], device: torch.device) -> list[int]:
    """Return the nanoseconds from block to block: each ends where the next one begins."""

    def now(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        moments.append(time.perf_counter_ns())

    moments: list[int] = []
    handles = [block.register_forward_pre_hook(now) for block in blocks[1:]]
    try:
        now()
        step()
        now()
    finally:
        for handle in handles:
            handle.remove()
    return [end - begin for begin, end in zip(moments[:-1], moments[1:], strict=True)]
