"""What copies in memory cost a training: how long it stands still for each, and how much longer its steps take.

python -m tests.benchmarks.in_memory [--rows 16777216] [--every 100] [--optimizer Adagrad] [--full] [--local]

Two ranks, each under torchrun in a network namespace of its own (needs root and `ip`), or on one node (--local). Each
holds 1 GiB: half of a table of 16 columns, of which Zipf(1.05) ids are looked up, 512 x 10 in a step, and its
optimizer's state. 200 steps without copies, then 400 with them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.checkpoint.in_memory.copying import NodeCopy
from lightning_distrec.strategies.checkpoints.in_memory import series, taking
from tests.benchmarks.incremental import Clicks, zipf_batches
from tests.support.ports import free_port
from tests.support.shared_memory import folder_in_memory
from tests.support.two_machines import two_machines

WARM, WITHOUT, WITH = 20, 200, 400
DIM, WIDTH = 16, 1024


class Wide(Clicks):
    """A table, and layers that take the time of a step."""

    def __init__(self, rows: int, optimizer: str) -> None:
        super().__init__(rows, DIM)
        layers = [nn.Linear(DIM, WIDTH), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01)


class Times(pl.Callback):
    """Takes the time of each step, with what a copy adds to it."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.stalls: list[float] = []
        self.writes: list[float] = []
        self.copied: list[int] = []
        self.last = 0.0
        self.take, self.write = taking.CopyToMemory._take, NodeCopy.write

    def setup(self, *_: Any, **__: Any) -> None:
        times = self

        def take(callback: Any, trainer: pl.Trainer) -> None:
            if trainer.global_step <= WARM + WITHOUT:
                callback._num_taken = trainer.global_step // callback._copies.every
                return
            began = time.perf_counter()
            before = callback._num_taken
            times.take(callback, trainer)
            if callback._num_taken != before:
                times.stalls.append(time.perf_counter() - began)

        def write(copy: Any, node: Any) -> None:
            began = time.perf_counter()
            times.write(copy, node)
            times.writes.append(time.perf_counter() - began)
            times.copied.append(sum(c.tensor.nbytes for t in copy.snapshot.tensors.values() for c in t.chunks))

        taking.CopyToMemory._take, NodeCopy.write = take, write

    def on_train_batch_start(self, *_: Any) -> None:
        now = time.perf_counter()
        if self.last:
            self.steps.append(now - self.last)
        self.last = now


def work(given: argparse.Namespace) -> None:
    """Train on one rank, and write what came of it."""
    torch.set_num_threads(1)
    if given.full:
        series.MAX_DIFFERENCES = 0
    times = Times()
    rank = int(os.environ["RANK"])
    trainer = pl.Trainer(
        strategy=TorchRecShardedStrategy(
            checkpoint={"in_memory": {"every": given.every, "folder": given.folder}},
        ),
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        default_root_dir=given.results,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[times],
    )
    batches = zipf_batches(given.rows, WARM + WITHOUT + WITH + given.every // 2, seed=rank)
    model = Wide(given.rows, given.optimizer)
    trainer.fit(model, DataLoader(batches, batch_size=None))
    found = {name: getattr(times, name) for name in ("steps", "stalls", "writes", "copied")}
    Path(given.results, f"{rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2**24)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--optimizer", default="Adagrad")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--full", action="store_true", help="Let each copy be full, as where all rows move.")
    parser.add_argument("--results", default="")
    parser.add_argument("--folder", default="")
    given = parser.parse_args()
    if given.results:
        work(given)
        return
    with ExitStack() as stack:
        results = stack.enter_context(tempfile.TemporaryDirectory())
        memory = stack.enter_context(folder_in_memory())
        machines = [] if given.local else stack.enter_context(two_machines())
        port = free_port()
        agents = []
        for number in range(1 if given.local else 2):
            folder = memory / str(number)
            folder.mkdir()
            command = [sys.executable, "-m", "torch.distributed.run"]
            if given.local:
                command += ["--nproc-per-node=2", f"--master-port={port}"]
            else:
                command += ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}", "--rdzv-id=job"]
                command += [f"--master-addr={machines[0].address}", f"--master-port={port}"]
                command += [f"--local-addr={machines[number].address}"]
            command += ["-m", "tests.benchmarks.in_memory", *sys.argv[1:]]
            command += ["--results", results, "--folder", str(folder)]
            if machines:
                command = machines[number].command(*command)
            environment = os.environ | {"OMP_NUM_THREADS": "1", "LIGHTNING_DISTREC_RUN_NAME": "copies"}
            agents.append(subprocess.Popen(command, env=environment))
        assert [agent.wait() for agent in agents] == [0] * len(agents)
        of_ranks = [json.loads(Path(results, f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, found in enumerate(of_ranks):
        steps, first = found["steps"], WARM + WITHOUT
        without = sum(steps[WARM:first]) / WITHOUT
        blocks = [steps[at : at + given.every] for at in range(first, first + WITH, given.every)]
        more = [100 * (sum(block) / len(block) / without - 1) for block in blocks]
        print(f"rank {rank}: step {without:.3f} s without copies")
        print("  stalls s", [round(value, 3) for value in found["stalls"]])
        print("  written in s", [round(value, 2) for value in found["writes"]])
        print("  bytes", found["copied"])
        print("  stall, % of the steps", [round(100 * s / without / given.every, 2) for s in found["stalls"]])
        print("  steps take longer by %", [round(value, 1) for value in more])
        print(f"  median step {statistics.median(steps[first:]):.3f} s with copies")


if __name__ == "__main__":
    main()
