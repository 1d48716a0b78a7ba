"""Times steps of `pipeline_parallel` against one process and `ddp_tuned`, and its bubble against
the ideal.

OMP_NUM_THREADS=1 python -m tests.benchmarks.stages [PICTURE.svg]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_distrec import PipelineParallelStrategy, StageSchedule, TunedDDPStrategy
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import DEFAULTS

DIM, LENGTH, BATCH, BLOCKS, CHARACTERS, STEPS, SKIPPED = 128, 64, 32, 8, 96, 16, 4


class Blocks(pl.LightningModule):
    """A transformer of equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, DIM)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                DIM, 4, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(DIM, CHARACTERS)
        self.times: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.characters(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        loss = functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _data(rank: int, num_ranks: int) -> DataLoader[Any]:
    characters = torch.randint(
        CHARACTERS, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    batches = characters[:, rank::num_ranks].reshape(-1, LENGTH + 1)
    return DataLoader(TensorDataset(batches[:, :-1], batches[:, 1:]), batch_size=BATCH // num_ranks)


def measured(options: dict[str, Any] | None, picture: str) -> dict[str, Any]:
    """Return what a fit shows on one rank. options: of pipeline_parallel; None: ddp_tuned, or one
    process."""
    pl.seed_everything(3, verbose=False)
    model = Blocks()
    rank, num_ranks = rank_and_num_ranks()
    shown = StageSchedule(picture, step=STEPS - 2)
    strategy: Any = TunedDDPStrategy() if options is None else PipelineParallelStrategy(**options)
    data = _data(rank, num_ranks) if options is None else _data(0, 1)
    trainer = pl.Trainer(
        strategy=strategy, devices=num_ranks, callbacks=[shown] if options else [], **DEFAULTS
    )
    trainer.fit(model, data)
    held = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    steps = [
        b - a for a, b in zip(model.times[SKIPPED:-2], model.times[SKIPPED + 1 : -1], strict=True)
    ]
    return {
        "ms": 1000 * statistics.median(steps),
        "losses": model.losses,
        "mb": held / 1e6,
        "bubble": shown.bubble,
        "ideal": shown.ideal_bubble,
    }


CONTENDERS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one process": (1, None),
    "ddp_tuned": (2, None),
    "gpipe, 2 micro-batches": (2, {"microbatches": 2}),
    "gpipe, 4 micro-batches": (2, {"microbatches": 4}),
    "gpipe, 8 micro-batches": (2, {"microbatches": 8}),
    "1f1b, 4 micro-batches": (2, {"microbatches": 4, "schedule": "1f1b"}),
    "1f1b, 8 micro-batches": (2, {"microbatches": 8, "schedule": "1f1b"}),
    "interleaved, 4 micro-batches": (
        2,
        {"microbatches": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    ),
}


def main(picture: str = "") -> None:
    """Print a row for each contender: the lowest of its rounds, and the median and the highest."""
    rounds = 3
    fits_by_name: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, (num_ranks, options) in CONTENDERS.items():
                path = (
                    picture
                    if picture and name.startswith("1f1b, 4")
                    else str(Path(folder) / "schedule.svg")
                )
                fits_by_name[name].append(run_on_ranks(measured, num_ranks, options, path)[0])
    one_process_ms = min(fit["ms"] for fit in fits_by_name["one process"])
    columns = [
        "",
        "ms per step",
        "against one process",
        "idle",
        "ideal",
        "largest difference of a loss",
    ]
    print(f"| {' | '.join([*columns, 'weights of rank 0'])} |\n{'| --- ' * 7}|")
    for name, fits in fits_by_name.items():
        times = [fit["ms"] for fit in fits]
        reference = fits_by_name["one process"][0]["losses"]
        far = max(abs(a - b) for fit in fits for a, b in zip(fit["losses"], reference, strict=True))
        bubbles = [fit["bubble"] for fit in fits if fit["bubble"] is not None]
        idle = "|"
        if bubbles:
            idle = f"{statistics.median(bubbles):.1%} | {fits[0]['ideal']:.1%}"
        ms = f"{min(times):.0f} ({statistics.median(times):.0f}, {max(times):.0f})"
        print(
            f"| {name} | {ms} | {one_process_ms / min(times):.2f} | {idle} | {far:.1e} | "
            f"{fits[0]['mb']:.1f} MB |"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
