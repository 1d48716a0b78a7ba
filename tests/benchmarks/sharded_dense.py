"""Step time and memory of `fsdp_tuned` against a hand-written loop over fully_shard, in turns on
the same ranks.

    python -m tests.benchmarks.sharded_dense [ROUNDS]

Prints a table in Markdown. Two gloo ranks of one thread each; every round builds each contender
anew, in another order; the first steps of each do not count. Memory: most bytes in parameters,
gradients, optimizer state and gathered blocks.
"""

import gc
import io
import logging
import random
import statistics
import sys
import time
import warnings
from contextlib import redirect_stdout
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_distrec import TunedFSDPStrategy
from lightning_distrec.strategies.fully_sharded.shard_blocks import choose_blocks
from tests.benchmarks.dense import BATCH, MODULES, STEPS, UNCOUNTED, WIDTH, Clock, Regression
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import DEFAULTS

LEAST = 100_000
"""min_num_parameters: the modules are small."""


class Adaptive(Regression):
    """With an optimizer that has state."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def _data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(STEPS * BATCH, WIDTH)), batch_size=BATCH)


def _ours(net: nn.Module) -> list[float]:
    clock = Clock()
    with redirect_stdout(io.StringIO()):
        strategy = TunedFSDPStrategy(min_num_parameters=LEAST)
        trainer = pl.Trainer(strategy=strategy, devices=2, callbacks=[clock], **DEFAULTS)
        trainer.fit(Adaptive(net), _data())
    return clock.at


def _by_hand(net: nn.Module) -> list[float]:
    blocks = choose_blocks(net, "auto", LEAST)
    for block in blocks:
        fully_shard(block, reshard_after_forward=block is not blocks[-1])
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    position = []
    for (inputs,) in _data():
        position.append(time.perf_counter())
        loss = net(inputs).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return position


CONTENDERS = {"fsdp_tuned": _ours, "by hand": _by_hand}


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Collective. Return module -> contender -> milliseconds of a step, of each round."""
    _be_quiet()
    rank, num_ranks = rank_and_num_ranks()
    times: dict[str, dict[str, list[float]]] = {
        module: {name: [] for name in CONTENDERS} for module in MODULES
    }
    with redirect_stdout(io.StringIO()):
        _ours(nn.Linear(WIDTH, WIDTH))  # makes the process group
    for module in MODULES:
        for number in range(rounds):
            for name in random.Random(number).sample(list(CONTENDERS), len(CONTENDERS)):
                torch.manual_seed(1)
                position = CONTENDERS[name](MODULES[module]())
                steps = [
                    1e3 * (b - a)
                    for a, b in zip(position[UNCOUNTED:], position[UNCOUNTED + 1 :], strict=False)
                ]
                times[module][name].append(statistics.median(steps))
                gc.collect()
    return times


def _be_quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


class _Weighed(pl.Callback):
    """The most bytes of tensors that this process has in a step, activations included, after each
    block's forward."""

    def __init__(self, net: nn.Module) -> None:
        self.most = 0
        for block in [*choose_blocks(net, "auto", LEAST), net]:
            block.register_forward_hook(self._weigh)

    def _weigh(self, *_: Any) -> None:
        gc.collect()
        seen: dict[int, int] = {}
        for item in gc.get_objects():
            if isinstance(item, Tensor) and not item.is_meta:
                local = item.to_local() if isinstance(item, DTensor) else item
                storage = local.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        self.most = max(self.most, sum(seen.values()))

    on_train_batch_end = on_before_optimizer_step = _weigh
    on_after_backward = _weigh


def weigh() -> dict[str, tuple[float, float]]:
    """Collective. Return module -> most bytes of a rank, and (parameters + gradients + state) /
    ranks + a block."""
    _be_quiet()
    actual = {}
    for module in MODULES:
        net = MODULES[module]()
        sizes = [p.nbytes for p in net.parameters()]
        blocks = [
            sum(p.nbytes for p in block.parameters()) for block in choose_blocks(net, "auto", LEAST)
        ]
        tail = sum(sizes) - sum(blocks)
        weighed = _Weighed(net)
        with redirect_stdout(io.StringIO()):
            trainer = pl.Trainer(
                strategy=TunedFSDPStrategy(min_num_parameters=LEAST),
                devices=2,
                callbacks=[weighed],
                **DEFAULTS,
            )
            gc.collect()
            trainer.fit(
                Adaptive(net),
                DataLoader(TensorDataset(torch.randn(4 * BATCH, WIDTH)), batch_size=BATCH),
            )
        actual[module] = (
            weighed.most,
            4 * sum(sizes) / dist.get_world_size() + max([*blocks, tail]),
        )
        del trainer, net, weighed
    return actual


def report(
    times: dict[str, dict[str, list[float]]], bytes_of: dict[str, tuple[float, float]]
) -> str:
    """Return a table: medians, ratios in the same round, and memory."""
    lines = [
        "| | by hand | fsdp_tuned | memory of a rank | share + block |",
        "|---|---|---|---|---|",
    ]
    for module, per_name in times.items():
        ratios = [
            distrec / hand
            for distrec, hand in zip(per_name["fsdp_tuned"], per_name["by hand"], strict=True)
        ]
        local, share = bytes_of[module]
        lines.append(
            f"| {module} | {statistics.median(per_name['by hand']):.2f} ms | "
            f"**{statistics.median(ratios):.3f}** "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {local / 1e6:.1f} MB | {share / 1e6:.1f} "
            "MB |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    bytes_of = run_on_ranks(weigh, 2, timeout_seconds=600)[0]
    print(report(run_on_ranks(measure, 2, rounds, timeout_seconds=1800)[0], bytes_of))


if __name__ == "__main__":
    from tests.benchmarks import sharded_dense

    sharded_dense.main()
