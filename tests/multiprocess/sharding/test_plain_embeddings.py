"""nn.Embedding and nn.EmbeddingBag of an unchanged LightningModule, sharded, give the numbers of
one unsharded process.

What is compared with is a plain torch loop over all ranks' batches, whose loss is the mean of the
ranks' losses.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.click_model import seeded
from tests.support.embedding_calls import DIM, KINDS, ROWS, UNEQUAL, Arguments, draw_batch
from tests.support.embedding_models import KeepsState, differences, loader, too_far, train_unsharded
from tests.support.parameters import slow_except
from tests.support.plain_loop import limit_of
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

CUTS = ("table_wise", "row_wise", "column_wise")
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
    "Adam": (torch.optim.Adam, {"lr": 0.001}),
}
STEPS = 5
FROZEN = ("frozen",)
NEVER_LOOKED_UP = ("no_ids",)


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


def _train_every_kind(
    optimizer: str, cuts: dict[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the trained state, and how each table was cut. cuts: kind -> how it is to be cut."""
    rank, num_ranks = rank_and_num_ranks()
    model = seeded(EveryKind, optimizer, tuple(cuts))
    actual: dict[str, str] = {}

    def look() -> None:
        plan = model.trainer.strategy.run_tables.shards.plan
        actual.update({
            name.removeprefix("tables."): sharding.sharding_type for name, sharding in plan.items()
        })

    model.on_train_start = look  # type: ignore[method-assign]
    tables = {
        f"tables.{kind}": {"sharding_types": [cut], "min_partition": 4}
        for kind, cut in cuts.items()
    }
    trainer = make_trainer({"convert_embeddings": "all", "tables": tables})
    trainer.fit(
        model, loader([draw_batch(step, rank, num_ranks, tuple(cuts)) for step in range(STEPS)])
    )
    return model.final_state, actual


def _train_every_kind_unsharded(
    optimizer: str, kinds: Sequence[str], num_ranks: int
) -> tuple[EveryKind, EveryKind]:
    """Return the model at the start and trained."""
    start = seeded(EveryKind, optimizer, kinds)
    batches = [
        [draw_batch(step, rank, num_ranks, kinds) for rank in range(num_ranks)]
        for step in range(STEPS)
    ]
    return start, train_unsharded(start, batches)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    slow_except([("SGD", 3), ("Adagrad", 2), ("Adam", 2)], product(OPTIMIZERS, [2, 3])),
)
def test_every_kind_of_call_has_the_weights_of_one_unsharded_process(
    name: str, num_ranks: int
) -> None:
    # torch's own Adam takes no gradients of nn.Embedding(sparse=True), sharded or not.
    kinds = tuple(kind for kind in KINDS if name != "Adam" or "sparse" not in kind)
    # Each kind is cut in another way for each optimizer, so that all pairs of them occur.
    cuts = {
        kind: CUTS[(list(KINDS).index(kind) + list(OPTIMIZERS).index(name) + num_ranks) % 3]
        for kind in kinds
    }
    state, actual = run_on_warm_ranks(_train_every_kind, num_ranks, name, cuts)[0]
    assert actual == cuts
    start, trained = _train_every_kind_unsharded(name, kinds, num_ranks)
    assert not too_far(state, trained.state_dict(), limit_of(name))
    for key, moved in differences(trained.state_dict(), start.state_dict()).items():
        kind = key.split(".")[1]
        stays = kind in NEVER_LOOKED_UP or (kind in FROZEN and key.startswith("tables"))
        assert (moved == 0) if stays else (moved > 1e-4), key
    for kind, table in start.tables.items():
        if table.padding_idx is not None:
            row = table.padding_idx
            assert torch.equal(state[f"tables.{kind}.weight"][row], table.weight[row]), kind


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


@pytest.fixture(scope="module")
def two_rank_results() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    calls: dict[str, tuple[Any, ...]] = {
        cut: (_train_every_kind, "Adagrad", dict.fromkeys(UNEQUAL, cut)) for cut in CUTS
    }
    return run_each_on_ranks(calls | {"hooks": (_hook,)}, 2)


@pytest.mark.parametrize("cut", CUTS)
def test_ranks_may_look_up_unequal_numbers_of_bags(
    two_rank_results: list[dict[str, Any]], cut: str
) -> None:
    state, _ = two_rank_results[0][cut]
    _, trained = _train_every_kind_unsharded("Adagrad", tuple(UNEQUAL), 2)
    assert not too_far(state, trained.state_dict(), limit_of("Adagrad"))


def test_hooks_on_an_embedding_run_while_it_is_sharded(
    two_rank_results: list[dict[str, Any]],
) -> None:
    assert [actual["hooks"] for actual in two_rank_results] == [
        ["before forward", "forward", "backward"]
    ] * 2


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


def _train_one_table(optimizer: str, strategy: dict[str, Any]) -> dict[str, Tensor]:
    rank, _ = rank_and_num_ranks()
    model = seeded(OneTable, optimizer)
    batches = [_clicks(step, rank) for step in range(STEPS)]
    make_trainer({"convert_embeddings": "all", **strategy}).fit(model, loader(batches))
    return model.final_state


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

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        scores = self.head(self.items(batch["item"]) * self.tags(batch["tags"])).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch["label"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        loss = self.loss(batch)
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


def _train_sparse(cut: str) -> dict[str, Tensor]:
    rank, _ = rank_and_num_ranks()
    model = seeded(SparseModel)
    tables = {name: {"sharding_types": [cut], "min_partition": 4} for name in ("items", "tags")}
    trainer = make_trainer({"convert_embeddings": "all", "tables": tables})
    trainer.fit(model, loader([_clicks(step, rank) for step in range(STEPS)]))
    return model.final_state


@pytest.fixture(scope="module", params=[2, 3])
def rank_results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two or three ranks trained."""
    calls: dict[str, tuple[Any, ...]] = {name: (_train_one_table, name, {}) for name in OPTIMIZERS}
    calls["Adagrad kept"] = (_train_one_table, "Adagrad", {"embedding_update": "sparse"})
    calls |= {cut: (_train_sparse, cut) for cut in CUTS}
    return run_each_on_ranks(calls, request.param)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Adagrad kept"])
def test_a_table_looked_up_twice_in_a_step_is_updated_once(
    rank_results: list[dict[str, Any]], name: str
) -> None:
    optimizer = name.split()[0]
    start = seeded(OneTable, optimizer)
    batches = [[_clicks(step, rank) for rank in range(len(rank_results))] for step in range(STEPS)]
    # The ranks' batches have one size: the mean of their losses is the loss of the joined batch.
    joined = [
        [{key: torch.cat([batch[key] for batch in step_values]) for key in step_values[0]}]
        for step_values in batches
    ]
    expected = train_unsharded(start, joined).state_dict()
    assert not too_far(rank_results[0][name], expected, limit_of(optimizer))


def test_sparse_adam_has_the_weights_of_one_unsharded_process(
    rank_results: list[dict[str, Any]],
) -> None:
    model = seeded(SparseModel)
    optimizers = model.configure_optimizers()
    for step in range(STEPS):
        model.zero_grad()
        torch.stack([
            model.loss(_clicks(step, rank)) for rank in range(len(rank_results))
        ]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for cut in CUTS:
        assert not too_far(rank_results[0][cut], model.state_dict(), 1e-5)
