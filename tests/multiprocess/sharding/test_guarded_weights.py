"""Whoever holds the weight of a sharded table sees the table, whatever the module whose code reads
it is called."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from lightning_distrec.errors import ShardedWeightError
from tests.support.cases import Case, case_of, check, check_refused
from tests.support.click_model import seeded
from tests.support.embedding_models import TwoTower, loader, pairs, too_far, whole_state
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

Result = dict[str, Any]


def _fit(model: pl.LightningModule, steps: int = 2, **strategy: Any) -> pl.Trainer:
    rank, _ = rank_and_num_ranks()
    # By name: where its source reads the weight, a table that is not named stays on every rank.
    names = [
        name
        for name, child in model.named_children()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag))
    ]
    trainer = make_trainer({"convert_embeddings": names, "sharding_types": ["row_wise"]} | strategy)
    trainer.fit(model, loader([pairs(step, rank) for step in range(steps)]))
    return trainer


# -- code with any module's name

NAMES = (
    "lightning_distrec.callbacks.contributed",
    "torchrec.extension",
    "torch.optim.extension",
    "recipes.job",
)
READS = (
    "def read(weight):\n    return len(weight), *weight.shape, weight.numel(), weight.T.shape[1]\n"
)


class Watched(TwoTower):
    """Its weights are read in a hook, and in hooks around the update, by code that is named as a
    library's."""

    def __init__(self) -> None:
        super().__init__(num_items=71)
        self.seen: list[tuple[str, Any]] = []

    def read(self, *_: Any) -> None:
        for name in NAMES:
            names: dict[str, Any] = {"__name__": name}
            exec(READS, names)  # noqa: S102
            with pytest.raises(ShardedWeightError, match=r"\(T\)"), torch.no_grad():
                self.seen.append((name, names["read"](self.item_embedding.weight)))
            weight = self.get_parameter("item_embedding.weight")
            exec(READS.replace(", weight.T.shape[1]", ""), names)  # noqa: S102
            self.seen.append((name, names["read"](weight.detach())))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.read)
        optimizer.register_step_post_hook(self.read)
        return optimizer

    on_train_batch_end = read


def _watched() -> list[tuple[str, Any]]:
    model = seeded(Watched)
    _fit(model, steps=1)
    return model.seen


def test_weights_are_whole_for_code_of_any_name_and_in_hooks_of_optimizers() -> None:
    expected = [(name, (71, 71, 16, 71 * 16)) for name in NAMES] * 3
    assert run_on_warm_ranks(_watched, 2) == [expected, expected]


# -- weights that are drawn again


class Collections(pl.LightningModule):
    """Has tables of all kinds, which a hook draws again."""

    def __init__(self) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(name=n, embedding_dim=8, num_embeddings=51, feature_names=[f"f{n}"])
            for n in ("a", "b")
        ]
        bags[1].init_fn = nn.init.xavier_normal_
        rows = [EmbeddingConfig(name="c", embedding_dim=8, num_embeddings=40, feature_names=["c"])]
        self.bags, self.rows = EmbeddingBagCollection(tables=bags), EmbeddingCollection(tables=rows)
        self.plain, self.pooled = nn.Embedding(33, 8), nn.EmbeddingBag(34, 8, mode="sum")
        # torch draws their numbers otherwise than as many of float32.
        self.first, self.second = nn.Embedding(5, 20).half(), nn.Embedding(5, 20).half()
        self.scale = nn.Parameter(torch.ones(()))
        self.drawn: Result = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids = batch[0] % 33
        lengths = torch.ones(2 * len(ids), dtype=torch.long)
        bags = self.bags(
            KeyedJaggedTensor(["fa", "fb"], torch.cat([ids, ids]), lengths=lengths)
        ).values()
        rows = self.rows(KeyedJaggedTensor(["c"], ids, lengths=lengths[: len(ids)]))["c"].values()
        others = self.plain(ids) + self.pooled(ids.unsqueeze(1))
        halves = self.first(ids % 5) + self.second(ids % 5)
        return self.scale * (bags.mean() + rows.mean() + others.mean() + halves.float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def tables(self) -> list[Any]:
        return [self.plain, self.pooled, self.bags.embedding_bags["a"]]

    def draw(self, names: list[str], state_of: Callable[[Any], Any] = whole_state) -> None:
        for name in names:
            DRAWS[name](self)
            self.drawn[name] = copy.deepcopy(state_of(self)), torch.rand(2)

    def on_fit_start(self) -> None:
        torch.manual_seed(3)
        self.draw(list(DRAWS)[::2])
        self.drawn["device"] = [self.bags.device, self.rows.device]

    def on_train_start(self) -> None:
        torch.manual_seed(4)
        self.draw(list(DRAWS)[1::2])


def _xavier(weight: nn.Parameter) -> None:
    nn.init.xavier_normal_(weight.data)


def _kaiming(weight: nn.Parameter) -> None:
    nn.init.kaiming_uniform_(weight)


def _truncated(weight: nn.Parameter) -> None:
    nn.init.trunc_normal_(weight, std=0.9)


def _own(weight: nn.Parameter) -> None:
    weight.data.uniform_(-1 / weight.shape[0] ** 0.5, 1 / weight.shape[1] ** 0.5).mul_(2).clamp_(
        max=0.1
    )


def _noisy(weight: nn.Parameter) -> None:
    weight.data.add_(torch.randn_like(weight), alpha=0.1)
    with torch.no_grad():
        weight += 0.1 * torch.randn(weight.shape)


def _normal(weight: nn.Parameter) -> None:
    nn.init.normal_(weight, std=0.02)


DRAWS: dict[str, Callable[[Any], Any]] = {
    "collections": lambda model: (model.bags.reset_parameters(), model.rows.reset_parameters()),
    "plain": lambda model: (model.plain.reset_parameters(), model.pooled.reset_parameters()),
    "halves": lambda model: (model.first.reset_parameters(), model.second.reset_parameters()),
    "one table": lambda model: model.bags.embedding_bags["b"].reset_parameters(),
    **{
        init.__name__: lambda model, init=init: [init(module.weight) for module in model.tables()]
        for init in (_normal, _xavier, _kaiming, _truncated, _own, _noisy)
    },
}


def _draw_again() -> Result:
    model = seeded(Collections)
    of_all, by_columns = {"sharding_types": ["table_wise"]}, {"sharding_types": ["column_wise"]}
    _fit(model, steps=1, tables={"first": of_all, "second": of_all, "pooled": by_columns})
    return model.drawn


def test_tables_that_hooks_draw_again_are_those_of_one_process() -> None:
    actual = run_on_warm_ranks(_draw_again, 2)
    model = seeded(Collections)
    for seed, names in ((3, list(DRAWS)[::2]), (4, list(DRAWS)[1::2])):
        torch.manual_seed(seed)
        model.draw(names, nn.Module.state_dict)
    for name in DRAWS:
        state, numbers = model.drawn[name]
        assert too_far(actual[0][name][0], state, 0.0) == {}, name
        assert all(torch.equal(drawn[name][1], numbers) for drawn in actual), name
    assert actual[1]["device"] == [torch.device("cpu")] * 2


# -- tables that follow others


def _mixed(target: Any, online: Any) -> None:
    target.data = target.data * 0.9 + online.data * 0.1


UPDATES: dict[str, Callable[[Any, Any], Any]] = {
    "data": _mixed,
    "lerp": lambda target, online: target.lerp_(online, 0.1),
    "ema": lambda target, online: torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)(
        [target], [online], 1
    ),
}


class Followed(TwoTower):
    """Its target table follows that of the items, as in BYOL and DQN."""

    def __init__(self, update: str) -> None:
        super().__init__()
        self.update = update
        self.target = copy.deepcopy(self.item_embedding).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        distance = (self.item_embedding(batch[1]) - self.target(batch[1])).square().mean()
        return super().training_step(batch, batch_idx) + distance

    @torch.no_grad()
    def on_train_batch_start(self, *_: Any) -> None:
        UPDATES[self.update](self.target.weight, self.item_embedding.weight)

    def grown(self) -> None:
        wider = nn.Embedding(100, 16)
        with torch.no_grad():
            wider.weight[:70] = self.item_embedding.weight.data


def grows_no_copy(trainer: Any) -> None:
    words = r"read \(__setitem__\).*full_parameter\('item_embedding'\)"
    with pytest.raises(ShardedWeightError, match=words):
        trainer.lightning_module.grown()


def follow(update: str, **strategy: Any) -> Case:
    tables = ["user_embedding", "item_embedding", "target"]
    options = {"convert_embeddings": tables, "sharding_types": ["row_wise"]} | strategy
    fields = {"batch": pairs, "steps": 2, "limit": 1e-5, "strategy": options}
    return case_of(Followed, update, look=grows_no_copy, **fields)


BY_ROWS = {name: {"sharding_types": ["row_wise"]} for name in ("target", "item_embedding")}
CASES = {update: follow(update) for update in ("data", "ema")}
CASES["way out"] = follow("lerp", sharding_types=["column_wise"], tables=BY_ROWS)


@pytest.mark.parametrize("name", CASES)
def test_a_table_follows_another_as_in_one_process(name: str) -> None:
    check(CASES[name])


def test_tables_that_lie_elsewhere_are_refused() -> None:
    apart = follow("lerp", tables={"target": {"sharding_types": ["column_wise"]}})
    words = "combines the sharded tables 'target' and 'item_embedding' element by element, "
    for error in check_refused(apart, words):
        assert f"Set tables={BY_ROWS}" in error
