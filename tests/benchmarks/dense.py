"""Step times of `ddp_tuned` against Lightning's `ddp`, in turns on the same ranks.

    python -m tests.benchmarks.dense [ROUNDS] [LINK]     LINK: Mbit/s of a link between two
    machines, needs root

Prints a table in Markdown. Two gloo ranks of one thread each; every round makes a new Trainer for
each contender, in another order; the first steps of each do not count.
"""

import io
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_distrec import TunedDDPStrategy
from tests.support.ranks import run_on_ranks
from tests.support.trainers import DEFAULTS
from tests.support.two_machines import two_machines

STEPS, UNCOUNTED = 30, 8
STEPS_ON_LINK, UNCOUNTED_ON_LINK = 16, 4
"""Fewer, where a step may take half a second."""
WIDTH, BATCH = 256, 32
CONTENDERS: dict[str, dict[str, Any]] = {"ddp_tuned": {}, "ddp_tuned, bf16": {"comm_dtype": "bf16"}}


class Regression(pl.LightningModule):
    """Any network, trained on noise."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Transformer(nn.Module):
    """Four blocks over sequences of eight."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.blocks(inputs.unsqueeze(1).expand(-1, 8, -1))


def _many_small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), *(nn.Linear(16, 16) for _ in range(200)))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 1024), *(nn.Linear(1024, 1024) for _ in range(4)))


MODULES = {
    "200 small layers": _many_small,
    "MLP, 4.5 M parameters": _mlp,
    "transformer, 2.1 M parameters": Transformer,
}


class Clock(Callback):
    """Notes when each step began."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.at.append(time.perf_counter())


def _turn(module: str, strategy: Any, on_link: bool) -> float:
    """Return the median milliseconds of a step."""
    steps, uncounted = (STEPS_ON_LINK, UNCOUNTED_ON_LINK) if on_link else (STEPS, UNCOUNTED)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(steps * BATCH, WIDTH))
    clock = Clock()
    with redirect_stdout(io.StringIO()):
        ranks = {"devices": 1, "num_nodes": 2} if on_link else {"devices": 2}
        trainer = pl.Trainer(strategy=strategy, callbacks=[clock], **ranks, **DEFAULTS)
        trainer.fit(Regression(MODULES[module]()), DataLoader(data, batch_size=BATCH))
    return statistics.median(
        1e3 * (b - a) for a, b in zip(clock.at[uncounted:], clock.at[uncounted + 1 :], strict=False)
    )


def measure(rounds: int, on_link: bool = False) -> dict[str, dict[str, list[float]]]:
    """Collective. Return module -> contender -> milliseconds of a step, of each round."""
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    names = ["ddp", *CONTENDERS]
    times: dict[str, dict[str, list[float]]] = {
        module: {name: [] for name in names} for module in MODULES
    }
    for module in MODULES:
        for number in range(rounds):
            for name in random.Random(number).sample(names, len(names)):
                strategy = "ddp" if name == "ddp" else TunedDDPStrategy(**CONTENDERS[name])
                times[module][name].append(_turn(module, strategy, on_link))
    return times


def report(times: dict[str, dict[str, list[float]]]) -> str:
    """Return a table: the median step of each contender, and its ratio to `ddp` in the same
    round."""
    lines = ["| | ddp | " + " | ".join(CONTENDERS) + " |", "|---|---|" + "---|" * len(CONTENDERS)]
    for module, per_name in times.items():
        cells = [f"{statistics.median(per_name['ddp']):.2f} ms"]
        for name in CONTENDERS:
            ratios = [
                distrec / stock
                for distrec, stock in zip(per_name[name], per_name["ddp"], strict=True)
            ]
            cells.append(
                f"**{statistics.median(ratios):.3f}** ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        lines.append(f"| {module} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _on_link(rounds: int, mbit_per_second: int) -> dict[str, dict[str, list[float]]]:
    with two_machines(mbit_per_second) as machines, tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, machine in enumerate(machines):
            job = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": str(rank)}
            meet = {
                "MASTER_ADDR": machines[0].address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": machine.device,
            }
            environment = os.environ | job | meet | {"TEST_NUM_RANKS": "2", "OMP_NUM_THREADS": "1"}
            command = machine.command(
                sys.executable, "-m", "tests.benchmarks.dense", "--rank", str(rounds), folder
            )
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        for rank in ranks:
            if rank.wait(1800):
                raise RuntimeError("a rank failed")
        return torch.load(Path(folder) / "times.pt")


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--rank"]:
        torch.set_num_threads(1)
        times = measure(int(sys.argv[2]), on_link=True)
        if os.environ["RANK"] == "0":
            torch.save(times, Path(sys.argv[3]) / "times.pt")
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    if len(sys.argv) > 2:
        times = _on_link(rounds, int(sys.argv[2]))
    else:
        times = run_on_ranks(measure, 2, rounds, timeout_seconds=1800)[0]
    print(report(times))


if __name__ == "__main__":
    from tests.benchmarks import dense

    dense.main()
