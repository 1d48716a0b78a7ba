"""A recommender whose ids are computed in its steps, run in the ways that a Trainer runs
modules."""

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.embedding_models import whole_state
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

STEPS, ONE_RUN = 8, 20
"""Of an epoch; of a run of one epoch, whose first steps are recorded."""
FIELDS, ROWS, DIM, LENGTH = 4, 60, 8, 12
LOOKUPS = 3
"""That each step makes."""
Batch = dict[str, Tensor]


class Fields(pl.LightningModule):
    """Adds offsets to fields, cuts off the last of a history, and takes the category of an item."""

    def __init__(self, manual: bool = False, compiler: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = not manual
        self.offsets = torch.arange(FIELDS) * ROWS
        self.register_buffer("category_of", torch.randint(0, ROWS, (ROWS,)))
        self.fields, self.items = nn.Embedding(FIELDS * ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.dense = nn.Sequential(nn.Linear((FIELDS + 2) * DIM, 32), nn.ReLU(), nn.Linear(32, 1))
        self.score = (
            torch.compile(self._score, backend=compiler, dynamic=True) if compiler else self._score
        )
        self.losses: list[float] = []

    def _score(self, rows: Tensor, history: Tensor, category: Tensor) -> Tensor:
        return self.dense(
            torch.cat([rows.flatten(1), history.mean(1), category], 1).tanh()
        ).squeeze(1)

    def forward(self, batch: Batch) -> Tensor:
        history = self.items((batch["history"] * 7 % ROWS)[:, :-1])
        rows = self.fields(batch["fields"] + self.offsets.to(self.device))
        return self.score(rows, history, self.items(self.category_of[batch["fields"][:, 0]]))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("score", self(batch).mean(), on_epoch=True, sync_dist=True, batch_size=1)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.SGD(self.parameters(), 0.1)
        tables = [*self.fields.parameters(), *self.items.parameters()]
        return torch.optim.SGD(tables, 0.1), torch.optim.Adam(self.dense.parameters(), 0.01)

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


def loader(first: int, steps: int = STEPS) -> DataLoader:
    """Return this rank's batches."""
    draws = torch.Generator().manual_seed(100 * first + rank_and_num_ranks()[0])

    def batch() -> Batch:
        return {
            "fields": torch.randint(0, ROWS, (6, FIELDS), generator=draws),
            "history": torch.randint(0, ROWS, (6, LENGTH), generator=draws),
            "length": torch.randint(1, LENGTH + 1, (6,), generator=draws),
            "label": torch.randint(0, 2, (6,), generator=draws).float(),
        }

    return DataLoader([batch() for _ in range(steps)], batch_size=None)  # type: ignore[arg-type]


@dataclass
class Ran:
    """What one rank has found."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    outcomes: dict[str, Any] = field(default_factory=dict)
    """Kind of step -> what the last run logged or predicted."""
    ahead: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Kind of step -> lookups ahead in its last epoch or run, and all of them."""


class Counts(pl.Callback):
    """Counts lookups of the last epoch or run of each kind of step."""

    def __init__(self, ran: Ran) -> None:
        self.ran = ran
        self.counted: dict[str, tuple[int, int]] = {}

    def note(self, trainer: pl.Trainer, *_: Any) -> None:
        for kind, count in trainer.strategy.lookups_ahead.items():  # type: ignore[attr-defined]
            ahead, lookups = self.counted.get(kind, (0, 0))
            if count.lookups > lookups:
                self.ran.ahead[kind] = count.ahead - ahead, count.lookups - lookups
                self.counted[kind] = count.ahead, count.lookups

    on_train_epoch_end = on_validation_end = on_test_end = on_predict_end = note


def run(
    depth: int,
    strategy: dict[str, Any] | None = None,
    evaluates: bool = False,
    manual: bool = False,
    compiler: str = "",
) -> Ran:
    """Fit two epochs. evaluates: validate after each; then test and predict."""
    ran, model = Ran(), Fields(manual, compiler)
    options = {"convert_embeddings": "all", "prefetch": {"depth": depth}} | (strategy or {})
    trainer = make_trainer(options, max_epochs=2, callbacks=[Counts(ran)])
    trainer.fit(model, loader(1), loader(2) if evaluates else None)
    ran.losses, ran.state = model.losses, model.final_state
    if evaluates:
        ran.outcomes["validated"] = float(trainer.callback_metrics["score"])
        trainer.test(model, [loader(3, ONE_RUN)], verbose=False)
        ran.outcomes["tested"] = float(trainer.callback_metrics["score"])
        ran.outcomes["predicted"] = torch.cat(trainer.predict(model, loader(4, ONE_RUN)))  # type: ignore[arg-type]
    return ran


def run_at_both_depths(options: dict[str, Any]) -> tuple[Ran, Ran]:
    """Return what is found without and with look-ahead. options: of `run`."""
    return run(1, **options), run(3, **options)
