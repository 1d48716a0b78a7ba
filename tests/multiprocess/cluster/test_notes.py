"""What is said of lookups and layers names our options, and only where it matters."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_distrec import TunedDDPStrategy
from lightning_distrec.errors import OptimizerError
from tests.support.dense_runs import fit
from tests.support.embedding_models import KeepsState, loader
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer


class Scores(KeepsState):
    """One nn.Embedding. skips: whether every other step returns no loss."""

    def __init__(self, skips: bool = False, optimizer: str = "SGD") -> None:
        super().__init__()
        self.skips, self.optimizer = skips, optimizer
        self.item = nn.Embedding(40, 8)
        self.out = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.out(self.item(batch)).pow(2).mean()
        return None if self.skips and batch_idx % 2 == 0 else loss

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)


def _ids(step: int, size: int = 4) -> Tensor:
    return torch.randint(0, 40, (size,), generator=torch.Generator().manual_seed(step))


def _notes(unequal: bool) -> list[str]:
    """Return what is said of unequal numbers of ids."""
    from lightning_distrec.strategies.data_parallel.losses import LossWeight

    messages: list[str] = []
    made = LossWeight.__init__

    def listen(self: LossWeight, reduction: Any, ranks: Any, notify: Any) -> None:
        made(self, reduction, ranks, messages.append)

    LossWeight.__init__ = listen  # type: ignore[method-assign]
    try:
        batches = [
            _ids(step, 4 + 2 * (unequal and step == 3 and rank_and_num_ranks()[0]))
            for step in range(5)
        ]
        make_trainer({"convert_embeddings": "all"}).fit(Scores(), loader(batches))
    finally:
        LossWeight.__init__ = made  # type: ignore[method-assign]
    return messages


def test_unequal_numbers_of_ids_are_noted_once_and_equal_ones_never() -> None:
    for per_rank_notes in run_each_on_ranks(
        {"equal": (_notes, False), "unequal": (_notes, True)}, 2
    ):
        assert per_rank_notes["equal"] == []
        (note,) = per_rank_notes["unequal"]
        assert "ranks look up unequal numbers of ids (4 to 6)" in note


def _unused() -> str:
    try:
        fit("Unused", TunedDDPStrategy())
    # DDP's, or that of replicas which differ by then
    except (RuntimeError, OptimizerError) as error:
        return str(error)
    return "nothing was raised"


def test_the_error_about_unused_layers_names_our_strategy() -> None:
    for message in run_on_warm_ranks(_unused, 2):
        assert "find_unused_parameters=True" in message
        assert " DDPStrategy" not in message
