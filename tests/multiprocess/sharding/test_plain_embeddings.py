"""nn.Embedding and nn.EmbeddingBag of an unchanged LightningModule, sharded, give the numbers of
one unsharded process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import Case, case_of, check, concatenate
from tests.support.embedding_calls import DIM, KINDS, ROWS, UNEQUAL, Arguments, draw_batch
from tests.support.embedding_models import KeepsState
from tests.support.parameters import slow_except
from tests.support.plain_loop import limit_of

CUTS = ("table_wise", "row_wise", "column_wise")
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
    "Adam": (torch.optim.Adam, {"lr": 0.001}),
}


class EveryKind(KeepsState):
    """One embedding for each kind; each is read by a layer of its own."""

    def __init__(self, optimizer: str, kinds: Sequence[str]) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.tables = nn.ModuleDict({kind: (KINDS | UNEQUAL)[kind][0]() for kind in kinds})
        self.heads = nn.ModuleDict({
            kind: nn.Linear(table.embedding_dim, 2, bias=False)
            for kind, table in self.tables.items()
        })

    def training_step(self, batch: dict[str, Arguments], batch_idx: int) -> Tensor:
        losses = []
        for kind, table in self.tables.items():
            arguments = batch[kind]
            if "keyword" in kind:
                rows = table(**arguments)
            elif "offsets" in arguments:
                rows = table(*arguments.values())
            else:
                rows = table(
                    arguments["input"], **{k: v for k, v in arguments.items() if k != "input"}
                )
            losses.append((self.heads[kind](rows) - 1).pow(2).sum() / 20)
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.optimizer]
        return kind(self.parameters(), **options)


def batch_of(num_ranks: int, kinds: Sequence[str], step: int, rank: int) -> dict[str, Arguments]:
    return draw_batch(step, rank, num_ranks, kinds)


def every_kind(optimizer: str, cuts: dict[str, str], num_ranks: int = 2) -> Case:
    """Return a case of embeddings of so many kinds. cuts: kind -> how it is to be cut."""
    tables = {
        f"tables.{kind}": {"sharding_types": [cut], "min_partition": 4}
        for kind, cut in cuts.items()
    }
    return case_of(
        EveryKind,
        optimizer,
        tuple(cuts),
        batch=partial(batch_of, num_ranks, tuple(cuts)),
        num_ranks=num_ranks,
        steps=5,
        strategy={"convert_embeddings": "all", "tables": tables},
        limit=limit_of(optimizer),
        loss_limit=1e-4,
        rests=("tables.frozen.", "no_ids."),
    )


def mixed_cuts(optimizer: str, num_ranks: int) -> dict[str, str]:
    """Return kind -> cut, another one for each optimizer, so that all pairs of them occur."""
    shift = list(OPTIMIZERS).index(optimizer) + num_ranks
    cuts = {kind: CUTS[(place + shift) % 3] for place, kind in enumerate(KINDS | UNEQUAL)}
    # torch's own Adam takes no gradients of nn.Embedding(sparse=True), sharded or not.
    return {kind: cut for kind, cut in cuts.items() if optimizer != "Adam" or "sparse" not in kind}


class OneTable(KeepsState):
    """Users and items are rows of one table, looked up twice in a step; the table has two names,
    and hooks that note when it is called."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.user = nn.Embedding(ROWS, DIM)
        self.item = self.user
        self.tags = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.calls: list[int] = []
        self.user.register_forward_pre_hook(lambda *_: self.calls.append(0))
        self.user.register_forward_hook(lambda *_: self.calls.append(1))
        self.user.register_full_backward_hook(lambda *_: self.calls.append(2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tags = self.tags(batch["tags"]) * self.tags(batch["other_tags"])
        scores = (self.user(batch["user"]) * self.item(batch["item"]) + tags).sum(-1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch["label"])

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.optimizer]
        return kind(self.parameters(), **options)


def _clicks(step: int, rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    batch = {name: torch.randint(0, ROWS, (8,), generator=draw) for name in ("user", "item")}
    batch |= {
        name: torch.randint(0, ROWS, (8, 3), generator=draw) for name in ("tags", "other_tags")
    }
    return batch | {"label": torch.randint(0, 2, (8,), generator=draw).float()}


class SparseModel(KeepsState):
    """As users of SparseAdam write it: an optimizer for the embeddings, one for the rest, stepped
    by hand.

    `items` is also what a method of nn.ModuleDict is called, in which torchrec puts its tables.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.items = nn.Embedding(ROWS, DIM, sparse=True, padding_idx=0)
        self.tags = nn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=True)
        self.head = nn.Linear(DIM, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        scores = self.head(self.items(batch["item"]) * self.tags(batch["tags"])).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, batch["label"])
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        tables = [p for n, p in self.named_parameters() if not n.startswith("head")]
        return [
            torch.optim.SparseAdam(tables, lr=0.001),
            torch.optim.SGD(self.head.parameters(), lr=0.1),
        ]


def calls(model: OneTable) -> Tensor:
    return torch.tensor(model.calls)


ALL = {"convert_embeddings": "all"}
BY_ROWS = ALL | {"sharding_types": ["row_wise"]}
CLICKS: dict[str, Any] = {"batch": _clicks, "join": concatenate, "limit": 1e-5}
QUICK = {
    "every kind, Adagrad": every_kind("Adagrad", mixed_cuts("Adagrad", 2)),
    "one table": case_of(OneTable, "Adagrad", num_ranks=3, strategy=ALL, same=calls, **CLICKS),
    "SparseAdam": case_of(SparseModel, strategy=BY_ROWS, **CLICKS),
}
CASES = QUICK | {
    "every kind, SGD, three ranks": every_kind("SGD", mixed_cuts("SGD", 3), 3),
    "every kind, Adam": every_kind("Adam", mixed_cuts("Adam", 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", slow_except(list(QUICK), CASES))
def test_every_kind_of_call_has_the_weights_of_one_unsharded_process(name: str) -> None:
    check(CASES[name])
