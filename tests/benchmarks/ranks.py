"""What a rank pays as their number grows: real ranks of one machine, of a job so small that little
else is seen.

    python -m tests.benchmarks.ranks [2 8 16 ...] [--steps 40] [--write]

8 tables of 2,000 x 16, 8 examples a rank, over gloo, under torchrec_sharded and Lightning's ddp,
and in TorchRec's own loop, written by hand: sockets, threads and memory of a rank, seconds until
the first step, and a step's wall and processor time; and without a model the processor time of the
messages of a step. Ranks share the machine's cores, so a step's wall time grows with their number;
its processor time is what one rank pays. Ranks are forked from one process, and share its
libraries' memory: they count a part of it each. 64 ranks take 19 GiB. --write puts the table into
docs/scale.md.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the ranks

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # noqa: E402
from torchrec.distributed import DistributedModelParallel  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: E402
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # noqa: E402
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402

from lightning_distrec._compat.torch import default_store  # noqa: E402
from lightning_distrec.cluster.consensus import job_consensus  # noqa: E402
from tests.benchmarks.page import table  # noqa: E402
from tests.support.ranks import rank_and_num_ranks, run_on_ranks  # noqa: E402
from tests.support.trainers import make_ddp_trainer, make_trainer  # noqa: E402

PAGES = (
    Path(__file__).resolve().parents[2] / "docs" / "scale.md",
    Path(__file__).with_name("scale_page.md"),
)
"""The page, and the words from which tests.benchmarks.scale writes it."""
BEGIN, END = "<!-- ranks: begin -->", "<!-- ranks: end -->"
TABLES, ROWS, DIM, EXAMPLES = 8, 2_000, 16, 8
KEYS = [f"t{number}" for number in range(TABLES)]
WARM_UP_STEPS = 10
DATA_SEGMENTS_SENT = 156
"""The place of tcpi_data_segs_out in struct tcp_info. Source: linux/tcp.h."""
OURS, DDP, HAND = "torchrec_sharded", "Lightning's ddp", "TorchRec by hand"
HEADINGS = [
    "ranks",
    "strategy",
    "sockets",
    "threads",
    "requests to the store",
    "MiB (PSS)",
    "start, s",
    "step, ms",
    "processor time of a step, ms",
]
MESSAGE_HEADINGS = ["ranks", "control message, ms", "minimum of all ranks, ms"]
MESSAGES = 200


@dataclass(frozen=True)
class Measured:
    """What one rank has measured of itself."""

    sockets: int
    threads: int
    requests: int
    """Messages that it has sent to the store of rank 0 until training begins."""
    mib: float
    """Its memory, of which shared pages count by their share."""
    start_seconds: float
    step_ms: float
    processor_ms: float


class Small(pl.LightningModule):
    """Tables of which a lookup costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(TABLES))
        self.top = nn.Linear(TABLES * DIM, 1)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of ids, (examples, tables, 2)."""
        bags = [embedding(ids[:, number]) for number, embedding in enumerate(self.tables)]
        return self.top(torch.cat(bags, 1)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(pl.Callback):
    """Measures the steps after the first ones."""

    def __init__(self) -> None:
        self.began, self.inherited_sockets = time.perf_counter(), count_sockets()
        self.start_seconds, self.requests = 0.0, 0
        self.times: tuple[float, float] = (0.0, 0.0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the time of the set-up."""
        self.note_start()

    def note_start(self) -> None:
        """Note what the set-up took, at its end."""
        self.start_seconds = time.perf_counter() - self.began
        self.requests = count_store_requests()

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
        wall, processor = (
            now - time_before
            for now, time_before in zip(
                (time.perf_counter(), time.process_time()), self.times, strict=True
            )
        )
        pss = next(
            line
            for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
            if line.startswith("Pss:")
        )
        self.measured = Measured(
            count_sockets() - self.inherited_sockets,
            len(os.listdir("/proc/self/task")),
            self.requests,
            int(pss.split()[1]) / 1024,
            self.start_seconds,
            wall / num_steps * 1e3,
            processor / num_steps * 1e3,
        )


def list_sockets() -> list[int]:
    """Return the descriptors of the sockets that this process has open."""
    descriptors = []
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        # The one that lists the folder is gone.
        if os.path.islink(path) and os.readlink(path).startswith("socket:"):
            descriptors.append(int(descriptor))
    return descriptors


def count_sockets() -> int:
    """Return how many sockets this process has open."""
    return len(list_sockets())


def count_store_requests() -> int:
    """Return how many segments with data this process has sent to the store: one for each
    request."""
    store: Any = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    count = 0
    for descriptor in list_sockets():
        with socket.socket(fileno=os.dup(descriptor)) as connection, suppress(OSError):
            if connection.type == socket.SOCK_STREAM and connection.getpeername()[1] == store.port:
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
                count += int.from_bytes(
                    information[DATA_SEGMENTS_SENT : DATA_SEGMENTS_SENT + 4], sys.byteorder
                )
    return count


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
        return torch.optim.SGD(self.parameters(), lr=0.01)


def draw_batches(num_batches: int) -> list[KeyedJaggedTensor]:
    """Return batches of EXAMPLES, of two ids for each table."""
    lengths, ids = (
        torch.full((TABLES * EXAMPLES,), 2),
        torch.randint(0, ROWS, (num_batches, TABLES * EXAMPLES * 2)),
    )
    return [KeyedJaggedTensor(KEYS, values, lengths=lengths) for values in ids]


def train(strategy: str, num_steps: int) -> Measured:
    """Return what a rank measures in a fit."""
    torch.manual_seed(1)
    clock = Clock()
    options = {"callbacks": [clock], "max_steps": WARM_UP_STEPS + num_steps}
    make = make_ddp_trainer if strategy == DDP else make_trainer
    batches = draw_batches(WARM_UP_STEPS + num_steps)
    make(**options).fit(SmallCollection(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return clock.measured


def train_by_hand(num_steps: int) -> Measured:
    """Return what a rank measures in torchrec's TrainPipelineSparseDist, planned by torchrec's
    planner."""
    torch.manual_seed(1)
    clock, (rank, num_ranks) = Clock(), rank_and_num_ranks()
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    net, device, sharder = SmallCollection(), torch.device("cpu"), EmbeddingBagCollectionSharder()
    apply_optimizer_in_backward(torch.optim.SGD, net.tables.parameters(), {"lr": 0.01})
    planner = EmbeddingShardingPlanner(
        topology=Topology(num_ranks, "cpu", local_world_size=num_ranks)
    )
    plan = planner.collective_plan(net, [sharder], dist.group.WORLD)  # type: ignore[list-item]
    model = DistributedModelParallel(net, device=device, plan=plan, sharders=[sharder])  # type: ignore[list-item]
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    pipeline = TrainPipelineSparseDist(
        model, CombinedOptimizer([model.fused_optimizer, dense]), device
    )
    batches = iter(draw_batches(WARM_UP_STEPS + num_steps))
    clock.note_start()
    for index in range(WARM_UP_STEPS + num_steps):
        if index == WARM_UP_STEPS:
            clock.times = time.perf_counter(), time.process_time()
        pipeline.progress(batches)
    clock.measure(num_steps)
    return clock.measured


def send_messages(num_messages: int) -> tuple[float, float]:
    """Return a rank's processor milliseconds of a control message with its numbers of ids, and of a
    minimum alone."""
    rank, num_ranks = rank_and_num_ranks()
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    consensus, milliseconds = job_consensus(120.0).steps, []
    sends: list[Callable[[], Any]] = [
        lambda: consensus.start_min_and_exchange(tuple(range(10)), [[1]] * num_ranks).wait(),
        lambda: consensus.start_all_reduce_min(*range(10)).wait(),
    ]
    for send in sends:
        for number in range(WARM_UP_STEPS + num_messages):
            if number == WARM_UP_STEPS:
                began = time.process_time()
            send()
        milliseconds.append((time.process_time() - began) / num_messages * 1e3)
    return milliseconds[0], milliseconds[1]


def main() -> None:
    """Measure, print, and write the section where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "ranks", nargs="*", type=int, default=[2, 4, 8, 16, 32], help="numbers of ranks"
    )
    parser.add_argument("--steps", type=int, default=40, help="measured steps")
    parser.add_argument("--write", action="store_true", help="put the table into docs/scale.md")
    options = parser.parse_args()
    rows, message_rows = [], []
    for num_ranks in options.ranks:
        messages = run_on_ranks(send_messages, num_ranks, MESSAGES, timeout_seconds=600)
        message_rows.append([
            str(num_ranks),
            *(f"{max(values):.2f}" for values in zip(*messages, strict=True)),
        ])
        for strategy in (OURS, HAND, DDP):
            run = partial(train, strategy) if strategy != HAND else train_by_hand
            measured = run_on_ranks(run, num_ranks, options.steps, timeout_seconds=600)
            columns = (max(values) for values in zip(*map(astuple, measured), strict=True))
            sockets, threads, requests, *others = columns
            numbers = [
                f"{number:.{digits}f}" for number, digits in zip(others, (0, 1, 1, 1), strict=True)
            ]
            rows.append([
                str(num_ranks),
                strategy,
                str(sockets),
                str(threads),
                str(requests),
                *numbers,
            ])
            print(" | ".join(rows[-1]), flush=True)
    text = f"{table(HEADINGS, rows)}\n\n{table(MESSAGE_HEADINGS, message_rows)}"
    print(text)
    if options.write:
        for page in PAGES:
            head, _, section = page.read_text().partition(BEGIN)
            page.write_text(f"{head}{BEGIN}\n{text}\n{END}{section.partition(END)[2]}")


if __name__ == "__main__":
    main()
