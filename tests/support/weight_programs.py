"""Programs that compute a loss from an embedding's weight: operations drawn from a seed, over one
weight used often."""

import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

ROWS, COLUMNS, STEPS = 37, 8, 3
Operation = Callable[["WeightProgram", Tensor, Tensor, dict[str, Tensor]], Tensor]


def _index_add(model: "WeightProgram", a: Tensor, b: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return torch.zeros(ROWS, COLUMNS).index_add_(0, model.order, a) + 0.5 * b


def _add_in_place(model: "WeightProgram", a: Tensor, b: Tensor, batch: dict[str, Tensor]) -> Tensor:
    total = a.clone()
    total.add_(b, alpha=0.3)
    total *= 0.5
    return total


def _set_rows(model: "WeightProgram", a: Tensor, b: Tensor, batch: dict[str, Tensor]) -> Tensor:
    rows = a * 1.0
    rows[3:6] = b[:3] * 0.1
    return rows


def _sum_in_place(model: "WeightProgram", a: Tensor, b: Tensor, batch: dict[str, Tensor]) -> Tensor:
    total = torch.zeros(ROWS, COLUMNS)
    total += a
    return total.add_(b, alpha=0.2)


def _stack(model: "WeightProgram", a: Tensor, b: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return torch.stack([a, b[model.order]]).mean(0)


ELEMENTWISE: dict[str, Operation] = {
    "tanh": lambda model, a, b, batch: a.tanh(),
    "scaled": lambda model, a, b, batch: 0.7 * a - 0.1,
    "square": lambda model, a, b, batch: a.square() * 0.3,
    "add": lambda model, a, b, batch: a + b,
    "multiply": lambda model, a, b, batch: a * b + a,
    "where": lambda model, a, b, batch: torch.where(a > 0, a, b),
    "detached": lambda model, a, b, batch: a.detach() * b,
    "dense layer's": lambda model, a, b, batch: a * model.scale + model.offset,
    "of a number": lambda model, a, b, batch: a * model.factor,
}
"""What is exact on shards."""
MIXED: dict[str, Operation] = {
    "permuted": lambda model, a, b, batch: a[model.order] + b,
    "embedding": lambda model, a, b, batch: nn.functional.embedding(model.order, a) * 0.5,
    "graph": lambda model, a, b, batch: model.graph @ a,
    "batch's": lambda model, a, b, batch: a * batch["noise"] + b,
    "normalized": lambda model, a, b, batch: nn.functional.normalize(a, dim=1),
    "centered": lambda model, a, b, batch: a - b.mean(0),
    "index_add": _index_add,
    "in place": _add_in_place,
    "rows": _set_rows,
    "into zeros": _sum_in_place,
    "stacked": _stack,
}
"""What takes the full weight."""
TERMS: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "mean of squares": lambda a, batch: a.square().mean(),
    "norm": lambda a, batch: 0.1 * a.norm(),
    "rank's norm": lambda a, batch: a.norm(3) * batch["number"],
    "largest": lambda a, batch: 0.1 * a.max() - 0.1 * a.min(),
    "mean": lambda a, batch: a.mean().tanh(),
    "spread": lambda a, batch: 0.1 * a.std(),
}
FULL_TERMS: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "rows": lambda a, batch: a[batch["ids"]].sin().sum(1).mean(),
    "scores": lambda a, batch: (a[batch["ids"]] @ a.T).logsumexp(1).mean() * 0.1,
    "sums of rows": lambda a, batch: a.sum(1).abs().mean(),
}


class WeightProgram(pl.LightningModule):
    """Computes its loss by operations that are drawn from `seed`. is_gathered: also those that take
    the full weight."""

    def __init__(self, seed: int, is_gathered: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, COLUMNS)
        self.scale, self.offset = (
            nn.Parameter(torch.rand(COLUMNS)),
            nn.Parameter(torch.rand(ROWS, COLUMNS) * 0.1),
        )
        self.factor = nn.Parameter(torch.tensor(0.8))
        self.register_buffer("order", torch.randperm(ROWS))
        self.register_buffer("graph", torch.rand(ROWS, ROWS) / ROWS)
        draw = random.Random(seed)
        operations = ELEMENTWISE | MIXED if is_gathered else ELEMENTWISE
        terms = TERMS | FULL_TERMS if is_gathered else TERMS
        # Of each the operation and how many values back its arguments are, from the weight itself
        # on.
        self.steps = [
            (draw.choice(list(operations)), draw.random(), draw.random())
            for _ in range(draw.randint(1, 6))
        ]
        self.terms = [(draw.choice(list(terms)), draw.random()) for _ in range(draw.randint(1, 3))]
        self.looks_up, self.optimizer = draw.random() < 0.5, draw.choice(["SGD", "Adam", "Adagrad"])
        self.writes = draw.choice(
            ["", "decay", "clamp", "row"] if is_gathered else ["", "decay", "clamp"]
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        values, operations = [self.table.weight], ELEMENTWISE | MIXED
        for name, first, second in self.steps:
            # Read again now and then, as users do.
            values[0] = self.table.weight
            a, b = (values[int(draw**2 * len(values))] for draw in (first, second))
            values.append(operations[name](self, a, b, batch))
        loss = sum(
            (TERMS | FULL_TERMS)[name](values[-1 - int(draw**2 * len(values))], batch)
            for name, draw in self.terms
        )
        loss = (
            loss
            + 0.05 * values[-1].square().mean()
            + 0.01 * (self.scale.sum() + self.offset.sum() + self.factor)
        )
        if self.looks_up:
            loss = loss + self.table(batch["ids"]).cos().mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Write to the weight between steps."""
        with torch.no_grad():
            if self.writes == "decay":
                self.table.weight.mul_(0.9)
            elif self.writes == "clamp":
                self.table.weight.data.clamp_(-1.5, 1.5)
            elif self.writes == "row":
                self.table.weight[5] = 0.1
                self.table.weight.data[7:9].mul_(0.5)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.3)
        kind = getattr(torch.optim, self.optimizer)
        return kind(self.parameters(), lr=0.02, eps=1e-2)


def program_batch(step: int, rank: int) -> dict[str, Tensor]:
    """Return one rank's batch of one step."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {
        "ids": torch.randint(0, ROWS, (6,), generator=draw),
        "noise": torch.rand(ROWS, 1, generator=draw),
        "number": torch.rand((), generator=draw),
    }


class MixesBatch(WeightProgram):
    """Multiplies its weight by a part of the batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self.table.weight * batch["noise"]).sum()
