"""What `advise` takes a strategy to need of a rank is what its ranks hold."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_distrec.advice.parameter_sizes import Job
from lightning_distrec.advice.strategy_advice import advise
from lightning_distrec.pipeline.absent_tensors import AbsentTensor
from lightning_distrec.sharding.weights.shard_access import without_guards
from tests.support.advised_models import KINDS, batches
from tests.support.embedding_models import loader
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

NUM_RANKS, STEPS = 2, 3


def _bytes(tensors: Any) -> int:
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_sparse:
            local = local.coalesce().values()
        total += local.numel() * local.itemsize
    return total


class CountsBytes(pl.Callback):
    """Counts what this rank holds after a step, before the gradients are dropped."""

    def __init__(self) -> None:
        self.held = 0

    @without_guards  # shards are plain tensors
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        parameters = [p for p in pl_module.parameters() if not isinstance(p, AbsentTensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        states: list[Any] = []
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                states += [value for value in state.values() if isinstance(value, Tensor)]
        tables = getattr(trainer.strategy, "run_tables", None)
        for kernel, _ in tables.shards.kernels if tables else []:
            for table_states in kernel.split_optimizer_states():
                states += table_states
        states = [state for state in states if state.dim()]  # without counters of steps
        self.held = _bytes([*parameters, *pl_module.buffers(), *gradients, *states])


def _run(kind: str, optimizer: str, strategy: str) -> int:
    """Return the bytes that this rank holds."""
    pl.seed_everything(5)
    rank, num_ranks = rank_and_num_ranks()
    counts = CountsBytes()
    trainer = pl.Trainer(
        strategy=StrategyRegistry.get(strategy), devices=num_ranks, callbacks=[counts], **DEFAULTS
    )
    dealt = 0 if strategy == "pipeline_parallel" else rank
    trainer.fit(KINDS[kind](optimizer), loader(batches(dealt, STEPS)))
    return counts.held


CASES = [
    ("Wide", "AdamW", "ddp_tuned"),
    ("Wide", "amsgrad", "ddp_tuned"),
    ("Wide", "Adafactor", "ddp_tuned"),
    ("Wide", "RowWiseAdagrad", "ddp_tuned"),
    ("Wide", "momentum", "fsdp_tuned"),
    ("WithTable", "AdamW", "fsdp_tuned"),
    ("WithTable", "AdamW", "torchrec_sharded"),
    ("WithTable", "Adagrad", "torchrec_sharded"),
    ("WithTable", "RowWiseAdagrad", "torchrec_sharded"),
    ("WithBags", "RowWiseAdagrad", "torchrec_sharded"),
    ("Chained", "AdamW", "pipeline_parallel"),
]


def test_a_rank_holds_what_is_advised() -> None:
    counted = run_each_on_ranks({" ".join(case): (_run, *case) for case in CASES}, NUM_RANKS, 150)
    trainer = SimpleNamespace(
        callbacks=[], precision="32-true", accumulate_grad_batches=1, gradient_clip_val=None
    )
    job = Job(num_ranks=NUM_RANKS, num_nodes=1, memory_bytes=10**9, trainer=trainer)
    for kind, optimizer, strategy in CASES:
        name = f"{kind} {optimizer} {strategy}"
        need = advise(KINDS[kind](optimizer), job).needs[strategy]
        held = [of_rank[name] for of_rank in counted]
        # Of stages the fullest counts; tables are taken to be shared out evenly.
        expected = max(held) if strategy == "pipeline_parallel" else sum(held) / NUM_RANKS
        assert need.model_bytes == pytest.approx(expected, rel=0.01, abs=7000), name
