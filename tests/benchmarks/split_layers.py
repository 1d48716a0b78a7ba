"""Times steps with `tensor_parallel` against one process and `fsdp_tuned` without it.

python -m tests.benchmarks.split_layers
"""

import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_distrec import TunedFSDPStrategy
from tests.multiprocess.test_gloo_bytes import _received_bytes
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import DEFAULTS

DIM, HEADS, LENGTH, BATCH, BLOCKS, CHARACTERS, STEPS, SKIPPED, ROUNDS = 128, 4, 64, 32, 8, 96, 16, 4, 3


class Block(nn.Module):
    """Of a transformer, with a layer each for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, hidden: Tensor) -> Tensor:
        size, length, _ = hidden.shape
        normed = self.before(hidden)
        layers = (self.query, self.key, self.value)
        heads = [layer(normed).view(size, length, HEADS, DIM // HEADS).transpose(1, 2) for layer in layers]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(size, length, DIM))
        return hidden + self.mlp(self.between(hidden))


class Blocks(pl.LightningModule):
    """A transformer of equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, CHARACTERS)
        self.times: list[float] = []
        self.losses: list[float] = []
        self.received: list[int] = []

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
        self.received.append(_received_bytes())

    def train_dataloader(self) -> Any:
        dealt = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        drawn = torch.randint(CHARACTERS, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        mine = drawn[:, dealt["rank"] :: dealt["num_replicas"]].reshape(-1, LENGTH + 1)
        return DataLoader(TensorDataset(mine[:, :-1], mine[:, 1:]), batch_size=BATCH // dealt["num_replicas"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


MLPS = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
ATTENTION = {f"blocks.*.{name}": "colwise" for name in ("query", "key", "value")} | {"blocks.*.out": "rowwise"}
CONTENDERS: dict[str, Any] = {
    "one process": None,
    "`fsdp_tuned`": {},
    "`tensor_parallel`, MLPs": {"size": 2, "plan": MLPS},
    "`tensor_parallel`, MLPs and attention": {"size": 2, "plan": MLPS | ATTENTION},
}


def _run(contender: str) -> dict[str, Any]:
    pl.seed_everything(3)
    model, options = Blocks(), CONTENDERS[contender]
    num_ranks = 1 if options is None else rank_and_num_ranks()[1]
    strategy: Any = "auto"
    if options is not None:
        strategy = TunedFSDPStrategy(wrap=["Block"], tensor_parallel=options or None)
    trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **(DEFAULTS | {"limit_val_batches": 0}))
    trainer.fit(model)
    steps = [b - a for a, b in zip(model.times[SKIPPED:], model.times[SKIPPED + 1 :], strict=False)]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    received = (model.received[-1] - model.received[SKIPPED]) / (STEPS - 1 - SKIPPED)
    return {
        **{"ms": 1000 * statistics.median(steps), "losses": model.losses, "received": received / 1e6},
        **{"first": model.times[1] - model.times[0], "weights": sum(p.nbytes for p in local) / 1e6},
    }


def _all() -> list[dict[str, dict[str, Any]]]:
    return [{name: _run(name) for name, options in CONTENDERS.items() if options is not None} for _ in range(ROUNDS)]


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    alone = [_run("one process") for _ in range(ROUNDS)]
    rounds = run_on_ranks(_all, 2)[0]
    runs = {"one process": alone} | {name: [of_round[name] for of_round in rounds] for name in rounds[0]}
    print("| | ms per step | against one process | received | weights of a rank | largest difference of a loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    base = min(run["ms"] for run in alone)
    for name, of_name in runs.items():
        low, middle, high = sorted(run["ms"] for run in of_name)
        differs = max(abs(a - b) for a, b in zip(of_name[0]["losses"], alone[0]["losses"], strict=True))
        print(
            f"| {name} | {low:.0f} ({middle:.0f}, {high:.0f}) | {base / low:.2f} | {of_name[0]['received']:.1f} MB | "
            f"{of_name[0]['weights']:.1f} MB | {differs:.1e} |"
        )


if __name__ == "__main__":
    main()
