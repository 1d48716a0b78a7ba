"""nn.Embedding and nn.EmbeddingBag of an unchanged LightningModule, sharded, give the numbers of
one unsharded process."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import Case, case_of, check, concatenate
from tests.support.click_model import seeded
from tests.support.embedding_calls import DIM, KINDS, ROWS, UNEQUAL, Arguments, draw_batch
from tests.support.embedding_models import KeepsState, loader
from tests.support.parameters import slow_except
from tests.support.plain_loop import limit_of
from tests.support.ranks import run_on_warm_ranks
from tests.support.trainers import make_trainer

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
    cuts = {kind: CUTS[(place + shift) % 3] for place, kind in enumerate(KINDS)}
    # torch's own Adam takes no gradients of nn.Embedding(sparse=True), sharded or not.
    return {kind: cut for kind, cut in cuts.items() if optimizer != "Adam" or "sparse" not in kind}


class OneTable(KeepsState):
    """Users and items are rows of one table, looked up twice in a step; the table has two names."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.user = nn.Embedding(ROWS, DIM)
        self.item = self.user
        self.tags = nn.EmbeddingBag(ROWS, DIM, mode="mean")

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


def one_table(optimizer: str, num_ranks: int = 2, **strategy: Any) -> Case:
    return case_of(
        OneTable,
        optimizer,
        batch=_clicks,
        join=concatenate,
        num_ranks=num_ranks,
        strategy={"convert_embeddings": "all", **strategy},
        limit=limit_of(optimizer),
    )


def sparse_adam(cut: str, num_ranks: int = 2) -> Case:
    tables = {name: {"sharding_types": [cut], "min_partition": 4} for name in ("items", "tags")}
    strategy = {"convert_embeddings": "all", "tables": tables}
    fields = {"batch": _clicks, "join": concatenate, "strategy": strategy, "limit": 1e-5}
    return case_of(SparseModel, num_ranks=num_ranks, **fields)


EVERY = {
    f"every kind, {name}, {num_ranks} ranks": every_kind(
        name, mixed_cuts(name, num_ranks), num_ranks
    )
    for name, num_ranks in product(OPTIMIZERS, (2, 3))
}
SLOW = tuple(
    f"every kind, {name}" for name in ("SGD, 2 ranks", "Adagrad, 3 ranks", "Adam, 3 ranks")
)
CASES = EVERY | {
    **{f"unequal, {cut}": every_kind("Adagrad", dict.fromkeys(UNEQUAL, cut)) for cut in CUTS},
    **{f"one table, {name}": one_table(name) for name in OPTIMIZERS},
    "one table, three ranks": one_table("Adagrad", 3),
    "one table, sparse": one_table("Adagrad", embedding_update="sparse"),
    **{f"SparseAdam, {cut}": sparse_adam(cut) for cut in CUTS},
    "SparseAdam, three ranks": sparse_adam("row_wise", 3),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", slow_except(set(CASES) - set(SLOW), CASES))
def test_every_kind_of_call_has_the_weights_of_one_unsharded_process(name: str) -> None:
    check(CASES[name])


def _hook() -> list[str]:
    model = seeded(EveryKind, "SGD", ("matrix",))
    seen: list[str] = []
    table = model.tables["matrix"]
    table.register_forward_pre_hook(lambda *_: seen.append("before forward"))
    table.register_forward_hook(lambda *_: seen.append("forward"))
    table.register_full_backward_hook(lambda *_: seen.append("backward"))
    make_trainer({"convert_embeddings": "all"}).fit(
        model, loader([draw_batch(0, 0, 2, ("matrix",))])
    )
    return seen


def test_hooks_on_an_embedding_run_while_it_is_sharded() -> None:
    order = ["before forward", "forward", "backward"]
    assert run_on_warm_ranks(_hook, 2) == [order, order]
