"""What is timed: loops written by hand with torchrec alone, and Trainer.fit, over one model and one
list of batches.

Each contender takes turns: `turn()` trains over all batches once more and returns the milliseconds
of its steps.
"""

import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import lightning_distrec
from lightning_distrec import TorchRecShardedStrategy
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
from tests.support.click_model import NO_OUTPUT

CUT = "table_wise"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Turn:
    """The steps of one turn, of which those in the middle count."""

    first: int = 5
    """Steps until caches are warm."""
    counted: int = 25
    last: int = 3
    """Steps at the end, where prefetching has no further batch to fetch."""

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.first + self.counted + self.last

    def times(self, ticks: list[float]) -> list[float]:
        """Return the milliseconds of the steps that count. ticks: seconds at the beginning of every
        step."""
        assert len(ticks) == self.steps, (len(ticks), self)
        steps = [1000 * (final - initial) for initial, final in zip(ticks, ticks[1:], strict=False)]
        return steps[self.first : self.first + self.counted]


class Contender(Protocol):
    """One way to train the model. `losses`: those of all steps so far, on this rank."""

    clock: Callable[[], float]
    """Called when a step begins; returns seconds."""
    steps: Turn
    """Of each turn."""

    @property
    def losses(self) -> list[Tensor]: ...

    def turn(self) -> list[float]:
        """Collective. Train over all batches once more; returns the milliseconds of each step that
        counts."""


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
        module = NetWithLoss(net)
        apply_optimizer_in_backward(
            torch.optim.SGD, net.sparse_arch.parameters(), {"lr": LEARNING_RATE}
        )
        self.model = DistributedModelParallel(
            module,
            device=device,
            plan=_plan(module, batches.names, device.type),
            sharders=[EmbeddingBagCollectionSharder()],
        )
        _copy_rows(self.model, weights)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        self.batches, self.steps = batches, turn
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

    def __init__(
        self,
        num_rows: int,
        batches: Batches,
        turn: Turn,
        device: torch.device = CPU,
        dim: int = DIM,
    ) -> None:
        super().__init__(num_rows, batches, turn, device, dim)
        self.pins = device.type == "cuda"
        self.prefetching = TrainPipelineSparseDist(self.model, self.optimizer, device)

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


def _plan(module: nn.Module, names: list[str], device: str) -> ShardingPlan:
    constraints = {f"t_{name}": ParameterConstraints(sharding_types=[CUT]) for name in names}
    topology = Topology(dist.get_world_size(), device, local_world_size=_ranks_on_node())
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    return planner.collective_plan(module, [EmbeddingBagCollectionSharder()], dist.group.WORLD)


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
        trainer.fit(self.module, self.batches.loader(as_dict, self.steps.steps))
        return self.steps.times(clock.ticks)


class Clock(pl.Callback):
    """Notes when each step begins."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.ticks: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.ticks.append(self.clock())


def our_strategy(depth: int = 1, **options: Any) -> TorchRecShardedStrategy:
    """Return our strategy. depth: batches in flight, where there is such an option."""
    if "prefetch" in _options():
        options["prefetch"] = lightning_distrec.PrefetchOptions(depth=depth)
    return TorchRecShardedStrategy(sharding_types=[CUT], **options)


def _quantized_strategy() -> TorchRecShardedStrategy:
    return our_strategy(
        3, quantized_comms=lightning_distrec.QuantizedComms(forward="fp16", backward="bf16")
    )


def _options() -> set[str]:
    return set(inspect.signature(TorchRecShardedStrategy).parameters)


CONTENDERS: dict[str, Callable[[int, Batches, Turn], Contender]] = {
    "by hand": ByHand,
    "by hand, prefetched": ByHandPrefetched,
    "ours": partial(ByTrainer, strategy=our_strategy),
    "ours, prefetched": partial(ByTrainer, strategy=partial(our_strategy, 3)),
    "ours, logged": partial(ByTrainer, strategy=our_strategy, logged=True),
    "ours, prefetched, logged": partial(ByTrainer, strategy=partial(our_strategy, 3), logged=True),
    "ours, prefetched, quantized": partial(ByTrainer, strategy=_quantized_strategy),
    "DDP": partial(ByTrainer, strategy=lambda: "ddp"),
}


def missing_option(contender: str) -> str:
    """Return the option of the strategy that a contender needs and that there is not, or ""."""
    needed = {"prefetched": "prefetch", "quantized": "quantized_comms"}
    words = contender.split(", ") if contender.startswith("ours") else []
    return next(
        (needed[word] for word in words if word in needed and needed[word] not in _options()), ""
    )
