"""What is timed: loops written by hand with torchrec alone, and Trainer.fit, over one model and one
list of batches.

Each contender takes turns: `turn()` trains over all batches once more and returns the milliseconds
of its steps.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_distrec import PrefetchOptions, QuantizedComms, TorchRecShardedStrategy
from tests.benchmarks.performance_model import (
    DIM,
    LEARNING_RATE,
    Batch,
    Batches,
    LitDLRM,
    NetWithLoss,
    as_dict,
    make_net,
)
from tests.benchmarks.turns import Clock, Contender, Turn
from tests.support.click_model import NO_OUTPUT

CUT = "table_wise"
CPU = torch.device("cpu")


def shard_by_hand(
    module: nn.Module,
    tables: nn.Module,
    learning_rate: float,
    device: torch.device = CPU,
    constraints: dict[str, ParameterConstraints] | None = None,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Collective. Return the module as torchrec shards it by its own planner, and SGD over all of
    it.

    tables: the part of the module whose rows are updated in backward.
    """
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": learning_rate})
    topology = Topology(dist.get_world_size(), device.type, local_world_size=_ranks_on_node())
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    model = DistributedModelParallel(module, device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        partial(torch.optim.SGD, lr=learning_rate),
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


class ByHand:
    """The model in torchrec's DistributedModelParallel, planned by its planner, its loop written
    out."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self,
        num_rows: int,
        batches: Batches,
        turn: Turn,
        device: torch.device = CPU,
        dim: int = DIM,
    ) -> None:
        net = make_net(num_rows, len(batches.names), dim)
        weights = {name: weight.detach() for name, weight in net.state_dict().items()}
        as_planned = ParameterConstraints(sharding_types=[CUT])
        constraints = {f"t_{name}": as_planned for name in batches.names}
        self.model, self.optimizer = shard_by_hand(
            NetWithLoss(net), net.sparse_arch, LEARNING_RATE, device, constraints
        )
        _copy_rows(self.model, weights)
        self.batches, self.steps, self.device = batches, turn, device
        self.losses: list[Tensor] = []

    def turn(self) -> list[float]:
        """Collective. Train over all batches once more, one after the other."""
        ticks = []
        for batch in self.batches.loader(Batch, self.steps.steps):
            ticks.append(self.clock())
            self.optimizer.zero_grad()
            loss, detached = self.model(batch)
            loss.backward()
            self.optimizer.step()
            self.losses.append(detached)
        return self.steps.times(ticks)


class ByHandPrefetched(ByHand):
    """The same, its loop being torchrec's TrainPipelineSparseDist."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pins = self.device.type == "cuda"
        self.prefetching = TrainPipelineSparseDist(self.model, self.optimizer, self.device)

    def turn(self) -> list[float]:
        """Collective. Train over all batches once more, up to three of them in flight."""
        ticks, batches = [], iter(self.batches.loader(Batch, self.steps.steps, self.pins))
        while True:
            ticks.append(self.clock())
            try:
                self.losses.append(self.prefetching.progress(batches))
            except StopIteration:
                return self.steps.times(ticks[:-1])


def _ranks_on_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _copy_rows(model: DistributedModelParallel, weights: dict[str, Tensor]) -> None:
    """Copy this rank's tables, all of them whole: torchrec draws new rows when it shards."""
    for name, value in model.state_dict().items():
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                shard.tensor.copy_(weights[name.removeprefix("net.")])


class ByTrainer:
    """Trainer.fit over an unchanged LightningModule, one fit for each turn.

    strategy: makes the strategy of a fit.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self,
        num_rows: int,
        batches: Batches,
        turn: Turn,
        strategy: Callable[[], Any],
        logged: bool = False,
        device: torch.device = CPU,
        dim: int = DIM,
    ) -> None:
        self.module = LitDLRM(num_rows, logged, len(batches.names), dim)
        self.accelerator = "cpu" if device.type == "cpu" else "gpu"
        self.batches, self.steps, self.strategy = batches, turn, strategy

    @property
    def losses(self) -> list[Tensor]:
        return self.module.losses

    def turn(self, *callbacks: pl.Callback) -> list[float]:
        """Collective. Fit over all batches once more."""
        clock = Clock(self.clock)
        trainer = pl.Trainer(
            strategy=self.strategy(),
            accelerator=self.accelerator,
            devices=_ranks_on_node(),
            num_nodes=dist.get_world_size() // _ranks_on_node(),
            max_epochs=1,
            use_distributed_sampler=False,
            callbacks=[clock, *callbacks],
            **NO_OUTPUT,
        )
        self.run(trainer, self.batches.loader(as_dict, self.steps.steps))
        return self.steps.times(clock.ticks)

    def run(self, trainer: pl.Trainer, loader: DataLoader) -> None:
        """Collective. Take the steps."""
        trainer.fit(self.module, loader)


def our_strategy(depth: int = 1, **options: Any) -> TorchRecShardedStrategy:
    """Return our strategy. depth: batches in flight."""
    prefetch = PrefetchOptions(depth=depth)
    return TorchRecShardedStrategy(sharding_types=[CUT], prefetch=prefetch, **options)


PREFETCHED = partial(our_strategy, 3)
QUANTIZED = partial(PREFETCHED, quantized_comms=QuantizedComms(forward="fp16", backward="bf16"))
CONTENDERS: dict[str, Callable[[int, Batches, Turn], Contender]] = {
    "by hand": ByHand,
    "by hand, prefetched": ByHandPrefetched,
    "ours": partial(ByTrainer, strategy=our_strategy),
    "ours, prefetched": partial(ByTrainer, strategy=PREFETCHED),
    "ours, prefetched, logged": partial(ByTrainer, strategy=PREFETCHED, logged=True),
    "ours, prefetched, quantized": partial(ByTrainer, strategy=QUANTIZED),
    "DDP": partial(ByTrainer, strategy=lambda: "ddp"),
}
