"""Measures what a rank pays as their number grows: real ranks of one machine, of a job so small
that little else is seen.

    python -m tests.benchmarks.ranks [--ranks 2 8 16 ...] [--steps 40] [--quick] [--write]

8 tables of 2,000 x 16, 8 examples a rank, over gloo, under torchrec_sharded and Lightning's ddp,
and in TorchRec's own loop, written by hand: sockets, threads and memory of a rank, its requests to
the store and seconds until the first step, and a step's wall and processor time; and without a
model the processor time of messages. By hand tables are sharded table_wise, as ours are: TorchRec's
planner replicates them on 64 ranks. Ranks share the machine's cores, so a step's wall time grows with their number;
its processor time is what one rank pays. Ranks are forked from one process, and share its
libraries' memory: they count a part of it each. 64 ranks take 19 GiB.
"""

import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from lightning_distrec._compat.torch import default_store
from lightning_distrec.cluster.consensus import job_consensus
from tests.benchmarks.performance_contenders import CPU, shard_by_hand
from tests.benchmarks.report import start, table
from tests.benchmarks.turns import join_ranks
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_ddp_trainer, make_trainer

TABLES, ROWS, DIM, EXAMPLES = 8, 2_000, 16, 8
KEYS = [f"t{number}" for number in range(TABLES)]
LEARNING_RATE = 0.01
WARM_UP_STEPS = 10
OURS, DDP, HAND = "torchrec_sharded", "Lightning's ddp", "TorchRec by hand"
HEADER = [
    *("ranks", "strategy", "sockets", "threads", "MiB (PSS)"),
    *("store requests", "start, s", "step, ms", "processor time of a step, ms"),
]
MESSAGE_HEADER = ["ranks", "control message, ms", "minimum of all ranks, ms", "all-gather, ms"]
MESSAGES = 200
DATA_SEGMENTS_SENT = 156
"""Where struct tcp_info has them. Source: linux/tcp.h."""


@dataclass(frozen=True)
class Measured:
    """What one rank has measured of itself."""

    sockets: int
    threads: int
    mib: float
    """Its memory, of which shared pages count by their share."""
    store_requests: int
    """Until training begins."""
    start_seconds: float
    step_ms: float
    processor_ms: float


class Clock(pl.Callback):
    """Measures the steps after the first ones."""

    def __init__(self) -> None:
        self.began, self.inherited_sockets = time.perf_counter(), count_sockets()
        self.start_seconds = 0.0
        self.store_requests = 0
        self.times: tuple[float, float] = (0.0, 0.0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the time of the set-up."""
        self.note_start()

    def note_start(self) -> None:
        """Note what the set-up took, at its end."""
        self.start_seconds = time.perf_counter() - self.began
        self.store_requests = count_store_requests()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int
    ) -> None:
        """Begin after the first steps."""
        if index == WARM_UP_STEPS:
            self.times = time.perf_counter(), time.process_time()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure while all groups are open."""
        self.measure(trainer.global_step - WARM_UP_STEPS)

    def measure(self, num_steps: int) -> None:
        """Note what so many steps took, and what this process has open."""
        wall = time.perf_counter() - self.times[0]
        processor = time.process_time() - self.times[1]
        self.measured = Measured(
            count_sockets() - self.inherited_sockets,
            len(os.listdir("/proc/self/task")),
            _proportional_mib(),
            self.store_requests,
            self.start_seconds,
            wall / num_steps * 1e3,
            processor / num_steps * 1e3,
        )


def _proportional_mib() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise KeyError("Pss")


def count_sockets() -> int:
    """Return how many sockets this process has open."""
    return len(_socket_descriptors())


def _socket_descriptors() -> list[int]:
    descriptors = []
    for descriptor in Path("/proc/self/fd").iterdir():
        # The one that lists the folder is gone.
        if descriptor.is_symlink() and os.readlink(descriptor).startswith("socket:"):
            descriptors.append(int(descriptor.name))
    return descriptors


def count_store_requests() -> int:
    """Return how many requests this rank has sent to the store: each is one segment of TCP."""
    store: Any = default_store()
    while not hasattr(store, "port"):
        store = store.underlying_store
    for descriptor in _socket_descriptors():
        with socket.socket(fileno=os.dup(descriptor)) as connection, suppress(OSError):
            if connection.getpeername()[1] == store.port:
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                return int(struct.unpack_from("I", information, DATA_SEGMENTS_SENT)[0])
    raise LookupError(f"no connection to port {store.port}")


class SmallCollection(pl.LightningModule):
    """The same tables in one of torchrec's collections."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"table_{key}", feature_names=[key], num_embeddings=ROWS, embedding_dim=DIM
            )
            for key in KEYS
        ]
        self.tables = EmbeddingBagCollection(tables)
        self.top = nn.Linear(TABLES * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Return the loss, twice, as torchrec's pipeline expects it."""
        loss = self.top(self.tables(features).values()).square().mean()
        return loss, loss.detach()

    def training_step(self, features: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        return self(features)[0]

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def draw_batches(num_batches: int) -> list[KeyedJaggedTensor]:
    """Return batches of EXAMPLES, of two ids for each table."""
    lengths = torch.full((TABLES * EXAMPLES,), 2)
    all_ids = torch.randint(0, ROWS, (num_batches, TABLES * EXAMPLES * 2))
    return [KeyedJaggedTensor(KEYS, ids, lengths=lengths) for ids in all_ids]


def train(strategy: str, num_steps: int) -> Measured:
    """Return what a rank measures in a fit, or in torchrec's TrainPipelineSparseDist."""
    torch.manual_seed(1)
    clock, num_steps = Clock(), WARM_UP_STEPS + num_steps
    batches = draw_batches(num_steps)
    if strategy == HAND:
        train_by_hand(batches, clock)
        return clock.measured
    make: Callable[..., pl.Trainer] = make_ddp_trainer if strategy == DDP else make_trainer
    trainer = make(callbacks=[clock], max_steps=num_steps)
    trainer.fit(SmallCollection(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return clock.measured


def train_by_hand(batches: list[KeyedJaggedTensor], clock: Clock) -> None:
    """Train over the batches as torchrec's examples do, each table on one rank of its planner's
    choice."""
    join_ranks()
    net = SmallCollection()
    whole = ParameterConstraints(sharding_types=["table_wise"])
    constraints = {f"table_{key}": whole for key in KEYS}
    model, optimizer = shard_by_hand(net, net.tables, LEARNING_RATE, constraints=constraints)
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
    iterator = iter(batches)
    clock.note_start()
    for index in range(len(batches)):
        if index == WARM_UP_STEPS:
            clock.times = time.perf_counter(), time.process_time()
        pipeline.progress(iterator)
    clock.measure(len(batches) - WARM_UP_STEPS)


def send_messages(num_messages: int) -> tuple[float, ...]:
    """Return a rank's processor milliseconds of a control message with its numbers of ids, of a
    minimum alone, and of an all-gather of a few bytes."""
    join_ranks()
    job, numbers = job_consensus(120.0), tuple(range(10))
    sizes = [[1]] * rank_and_num_ranks()[1]
    return (
        _processor_ms(
            num_messages, lambda: job.steps.start_min_and_exchange(numbers, sizes).wait()
        ),
        _processor_ms(num_messages, lambda: job.steps.start_all_reduce_min(*numbers).wait()),
        _processor_ms(num_messages, lambda: job.general.all_gather(numbers[:3])),
    )


def _processor_ms(num_messages: int, send: Callable[[], Any]) -> float:
    for _ in range(WARM_UP_STEPS):
        send()
    began = time.process_time()
    for _ in range(num_messages):
        send()
    return (time.process_time() - began) / num_messages * 1e3


def largest(per_rank: list[tuple[Any, ...]]) -> list[Any]:
    """Return each number of the rank that has most of it."""
    return [max(numbers) for numbers in zip(*per_rank, strict=True)]


def main() -> int:
    """Measure, print, and write the results; returns the exit status."""
    report = start(
        "ranks",
        __doc__,
        ranks={"nargs": "*", "type": int, "default": [2, 4, 8, 16, 32]},
        steps={"type": int, "default": 40, "help": "measured steps"},
    )
    numbers, steps = report.options.ranks, report.options.steps
    if report.options.quick:
        numbers, steps = [2], 5
    lines, message_lines = [], []
    for num_ranks in numbers:
        call = (run_on_ranks, send_messages, num_ranks, MESSAGES)
        messages = report.attempt(f"messages of {num_ranks}", *call, timeout_seconds=600)
        if messages is not None:
            cells = [f"{milliseconds:.2f}" for milliseconds in largest(messages)]
            message_lines.append([str(num_ranks), *cells])
        for strategy in (OURS, HAND, DDP):
            call = (run_on_ranks, train, num_ranks, strategy, steps)
            per_rank = report.attempt(f"{num_ranks}, {strategy}", *call, timeout_seconds=600)
            if per_rank is None:
                continue
            sockets, threads, mib, requests, *times = largest(map(astuple, per_rank))
            counts = [sockets, threads, f"{mib:.0f}", requests]
            lines.append([num_ranks, strategy, *counts, *(f"{number:.1f}" for number in times)])
    report.sections += [table(HEADER, lines, 2), table(MESSAGE_HEADER, message_lines)]
    return report.finish()


if __name__ == "__main__":
    # By its full name, so that what ranks return is not a class of `__main__`.
    from tests.benchmarks import ranks

    sys.exit(ranks.main())
