"""What a module may do with the weights of sharded tables gives what one process gives, or raises
by name."""

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm, rank_zero_only
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from lightning_distrec import NormalizeRows
from lightning_distrec.errors import ConfigError, ShardedWeightError, ShardingError
from tests.support.click_model import seeded
from tests.support.embedding_models import (
    TwoTower,
    loader,
    pairs,
    too_far,
    train_unsharded,
    whole_state,
)
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 3
Hook = Callable[[pl.LightningModule], Any]


def _fit(model: pl.LightningModule, types: list[str] | None = None, **options: Any) -> pl.Trainer:
    rank, _ = rank_and_num_ranks()
    trainer = make_trainer({"convert_embeddings": "all", "sharding_types": types} | options)
    pl.seed_everything(7, verbose=False)
    trainer.fit(model, loader([pairs(step, rank) for step in range(STEPS)]))
    return trainer


# -- weights drawn in hooks


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


DRAWS = {
    "truncated": _truncated,
    "xavier": _xavier,
    "kaiming": _kaiming,
    "own": _own,
    "noisy": _noisy,
}


class Draws(TwoTower):
    """Draws its weights in a hook, as the sequence models of rectools do."""

    def __init__(self, draw: str, hook: str = "") -> None:
        super().__init__(num_items=71)  # unequal shards
        self.draw, self.hook = draw, hook
        self.drawn: Any = None

    def on_fit_start(self) -> None:
        if self.hook == "on_fit_start":
            self.draw_all()

    def on_train_start(self) -> None:
        if self.hook == "on_train_start":
            self.draw_all()

    def draw_all(self) -> None:
        for weight in self.parameters():
            if weight.dim() > 1:
                DRAWS[self.draw](weight)
        state = whole_state(self) if self._trainer is not None else copy.deepcopy(self.state_dict())
        self.drawn = state, torch.rand(2)


def _drawn(draw: str, hook: str, types: list[str]) -> Any:
    model = seeded(Draws, draw, hook)
    _fit(model, types)
    return model.drawn


@pytest.mark.parametrize(
    ("types", "num_ranks"),
    [
        (["row_wise"], 2),
        (["column_wise"], 2),
        pytest.param(["table_wise"], 3, marks=pytest.mark.slow),
    ],
)
def test_weights_drawn_in_hooks_are_those_of_one_process(types: list[str], num_ranks: int) -> None:
    hooks = dict(zip(DRAWS, ["on_fit_start", "on_train_start"] * 3, strict=False))
    actual = run_each_on_ranks(
        {draw: (_drawn, draw, hook, types) for draw, hook in hooks.items()}, num_ranks
    )
    for draw in DRAWS:
        expected = seeded(Draws, draw)
        pl.seed_everything(7, verbose=False)
        expected.draw_all()
        state, _ = actual[0][draw]
        assert too_far(state, expected.drawn[0], 0.0) == {}, draw
        assert all(
            torch.equal(rank_result[draw][1], expected.drawn[1]) for rank_result in actual
        ), draw


# -- sums and norms in the loss


class Penalized(TwoTower):
    """Has norms of all of its parameters in its loss."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        squares = sum(weight.pow(2).sum() for weight in self.parameters())
        norms = sum(
            weight.norm() + torch.linalg.vector_norm(weight, 3) for weight in self.parameters()
        )
        self.penalty = float(norms + squares + self.item_embedding.weight.abs().mean())
        return loss + 0.01 * squares + 0.02 * norms + self.item_embedding.weight.abs().mean()


def _penalized(types: list[str]) -> Any:
    model = seeded(Penalized)
    trainer = _fit(model, types, embedding_update="dense")
    return whole_state(model) if trainer.global_step == STEPS else {}, model.penalty


@pytest.mark.parametrize("types", [["row_wise"], ["column_wise"]])
def test_norms_of_all_parameters_in_the_loss_are_those_of_the_full_tables(types: list[str]) -> None:
    actual = run_on_warm_ranks(_penalized, 2, types)
    batches = [[pairs(step, rank) for rank in range(2)] for step in range(STEPS)]
    expected = train_unsharded(seeded(Penalized), batches)
    assert too_far(actual[0][0], expected.state_dict(), 1e-5) == {}
    assert actual[0][1] == actual[1][1] == pytest.approx(expected.penalty, rel=1e-5)


# -- norms of gradients, full parameters


class Looks(TwoTower):
    """Logs the norms of its gradients, and looks at full weights."""

    def __init__(self, hook: Hook | None = None) -> None:
        super().__init__()
        self.norms: list[dict[str, float]] = []
        self.norms_of_lightning: list[dict[str, float]] = []
        self.hook = hook

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.trainer.strategy.gradient_norms(norm_type=2))
        self.norms_of_lightning.append({
            name: float(norm) for name, norm in grad_norm(self, norm_type=2).items()
        })
        if self.hook is not None:
            self.hook(self)


def _norms(types: list[str]) -> dict[str, Any]:
    model = seeded(Looks)
    trainer = _fit(model, types)
    strategy: Any = trainer.strategy
    state = whole_state(model)
    full = {name: strategy.full_parameter(name) for name, _ in model.named_parameters()}
    part = strategy.full_parameter("item_embedding", rows=(30, 45))  # of two shards
    return {
        "norms": model.norms,
        "lightning": model.norms_of_lightning,
        "state": state,
        "full": full,
        "part": part,
    }


@pytest.mark.parametrize("types", [["row_wise"], ["column_wise"]])
def test_gradient_norms_and_full_parameters_are_those_of_one_process(types: list[str]) -> None:
    actual = run_on_warm_ranks(_norms, 2, types)
    model = copy.deepcopy(seeded(TwoTower))
    optimizer = model.configure_optimizers()
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([
            model.training_step(pairs(step, rank), 0) for rank in range(2)
        ]).mean().backward()
        expected = {name: float(norm) for name, norm in grad_norm(model, norm_type=2).items()}
        assert list(actual[0]["norms"][step]) == list(expected)
        assert (
            actual[0]["norms"][step]
            == actual[1]["norms"][step]
            == pytest.approx(expected, rel=1e-4)
        )
        assert actual[0]["lightning"][step] == pytest.approx(expected, rel=1e-4)
        optimizer.step()
    for rank_result in actual:
        assert all(
            torch.equal(rank_result["full"][name], value)
            for name, value in actual[0]["state"].items()
        )
        assert torch.equal(rank_result["part"], actual[0]["state"]["item_embedding.weight"][30:45])


# -- rows that are loaded in a hook

ROWS = torch.linspace(-0.2, 0.2, 70 * 16).view(70, 16)


def _set_rows(model: pl.LightningModule) -> None:
    weight = model.item_embedding.weight
    weight.data[10:40] = ROWS[10:40]
    weight.data[0] = 0.0
    weight.data[[45, 50]] = ROWS[[1, 2]]
    with torch.no_grad():
        weight[torch.arange(70) > 60] = 0.1


def _copy_all(model: pl.LightningModule) -> None:
    with torch.no_grad():
        model.item_embedding.weight[:] = ROWS


LOADED: dict[str, Hook] = {
    "data": lambda model: setattr(model.item_embedding.weight, "data", ROWS.clone()),
    "all": _copy_all,
    "rows": _set_rows,
    "another module": lambda model: setattr(
        model, "item_embedding", nn.Embedding.from_pretrained(ROWS.clone())
    ),
}
PARAMETER = r"take the place of the weight of the sharded table 'item_embedding'.*embedding.weight.copy_\(rows\)"
REPLACED: dict[str, tuple[Hook, str]] = {
    "parameter": (
        lambda model: setattr(model.item_embedding, "weight", nn.Parameter(ROWS)),
        PARAMETER,
    ),
    "registered": (
        lambda model: model.item_embedding.register_parameter("weight", nn.Parameter(ROWS)),
        PARAMETER,
    ),
    "deleted": (lambda model: delattr(model.item_embedding, "weight"), PARAMETER),
    "assigned": (
        lambda model: model.item_embedding.load_state_dict({"weight": ROWS}, assign=True),
        "weights of the sharded 'item_embedding'.*assign=True",
    ),
    "past torch": (
        lambda model: model.item_embedding._parameters.update(weight=nn.Parameter(ROWS)),
        "take the place of the module of the sharded table 'item_embedding'",
    ),
}


def _loaded(hook: Hook) -> Any:
    model = seeded(TwoTower)
    model.on_fit_start = lambda: hook(model)  # type: ignore[method-assign]
    try:
        _fit(model, ["row_wise"])
    except ShardedWeightError as error:
        return str(error)
    return whole_state(model)


def _load_each() -> dict[str, Any]:
    hooks = LOADED | {name: hook for name, (hook, _) in REPLACED.items()}
    return {name: _loaded(hook) for name, hook in hooks.items()}


def test_rows_that_a_hook_loads_are_trained_and_other_parameters_are_refused() -> None:
    for rank, results in enumerate(run_on_warm_ranks(_load_each, 2)):
        for name, (_, pattern) in REPLACED.items():
            assert re.search(pattern, str(results[name]), re.S), (name, results[name])
        for name in LOADED if rank == 0 else []:
            model = copy.deepcopy(seeded(TwoTower))
            optimizer = model.configure_optimizers()
            LOADED[name](model)
            for step in range(STEPS):
                optimizer.zero_grad()
                torch.stack([
                    model.training_step(pairs(step, rank), 0) for rank in range(2)
                ]).mean().backward()
                optimizer.step()
            assert too_far(results[name], model.state_dict(), 1e-5) == {}, name


# -- what is refused


class Property(TwoTower):
    """Reads the table's weight in a property, whose AttributeErrors nn.Module replaces by its
    own."""

    @property
    def items(self) -> Tensor:
        return self.item_embedding.weight[1:]


REFUSED: dict[str, tuple[Hook, str]] = {
    "property": (
        lambda model: model.items,
        r"of the sharded table 'item_embedding' was read \(__getitem__\)",
    ),
    "matmul": (
        lambda model: torch.ones(2, 16) @ model.item_embedding.weight.T,
        r"read \(T\).*full_parameter",
    ),
    "linear": (
        lambda model: nn.functional.linear(torch.ones(2, 16), model.item_embedding.weight),
        r"\(linear\)",
    ),
    "histogram": (
        lambda model: [p.detach().cpu().numpy() for p in model.parameters()],
        r"'user_embedding' .*\(numpy",
    ),
    "norms of rows": (
        lambda model: [p.norm(dim=1) for p in model.parameters()],
        r"\(norm\).*full_parameter",
    ),
    "normalized": (
        lambda model: [nn.functional.normalize(p.data, dim=0) for p in model.parameters()],
        r"\(normalize\)",
    ),
    "row": (lambda model: model.item_embedding.weight.data[0].zero_(), r"\(__getitem__\)"),
    "rows of a gradient": (
        lambda model: model.item_embedding.weight.grad.mean(1),
        r"the gradient of the sharded table .*\(mean\).*gradient_norms\(\)",
    ),
    "other data": (
        lambda model: setattr(model.item_embedding.weight, "data", torch.zeros(70, 16).double()),
        r"\(data =\)",
    ),
    "data of another shape": (
        lambda model: setattr(model.item_embedding.weight, "data", torch.zeros(71, 16)),
        r"data = a tensor of shape \(71, 16\)",
    ),
    "on rank 0": (rank_zero_only(lambda model: model.item_embedding.weight.norm()), r"\(norm\)"),
    "pickled": (
        lambda model: torch.save([p.data for p in model.parameters()], io.BytesIO()),
        "to pickle it, which full_parameter",
    ),
    "averaged": (
        lambda model: torch.zeros(70, 16).lerp_(model.item_embedding.weight.data, 0.1),
        "none of its shards",
    ),
}


class PropertyLooks(Looks, Property):
    """Both."""


def _refused(names: list[str]) -> dict[str, str]:
    message: dict[str, str] = {}

    def try_each(model: pl.LightningModule) -> None:
        for name in names:
            try:
                REFUSED[name][0](model)
            except ShardedWeightError as error:
                message.setdefault(name, str(error))

    # by "all", one whose weight is read would stay on every rank
    pair = ["user_embedding", "item_embedding"]
    _fit(seeded(PropertyLooks, try_each), ["row_wise"], convert_embeddings=pair)
    return message


def test_other_reads_and_writes_are_refused_on_every_rank_by_name() -> None:
    for rank, message in enumerate(run_on_warm_ranks(_refused, 2, list(REFUSED))):
        for name, (_, pattern) in REFUSED.items():
            if name != "on rank 0" or rank == 0:
                assert re.search(pattern, message[name], re.S), (name, message.get(name))


def _wrong_calls() -> dict[str, str]:
    rank, _ = rank_and_num_ranks()
    strategy: Any = _fit(seeded(TwoTower)).strategy
    message = {}
    for case, call in {
        "unknown": ("item_embeding.weight",),
        "different": (["item_embedding", "user_embedding"][rank],),
        "rows": ("item_embedding", (0, 71)),
    }.items():
        with pytest.raises(ConfigError) as refused:
            strategy.full_parameter(*call)
        message[case] = str(refused.value)
    return message


def _read_by_others(folder: str) -> dict[str, str]:
    rank, _ = rank_and_num_ranks()
    model = seeded(TwoTower)
    trainer = make_trainer({"convert_embeddings": "all"})
    trainer.fit(model, loader([pairs(0, rank)]))
    state, weights = model.state_dict(), dict(model.named_parameters())
    name = next(key for key, value in state.items() if isinstance(value, ShardedTensor))
    plain = torch.zeros(state[name].size())
    calls: dict[str, Callable[[], Any]] = {
        "save_file": lambda: save_file(state, f"{folder}/state.safetensors"),
        "save_file of parameters": lambda: save_file(weights, f"{folder}/weights.safetensors"),
        "equal": lambda: torch.equal(state[name], plain),
        "allclose": lambda: torch.allclose(plain, state[name]),
        "==": lambda: state[name] == plain,
    }
    messages = {}
    for call, function in calls.items():
        with pytest.raises((ShardingError, ShardedWeightError)) as raised:
            function()
        messages[call] = str(raised.value)
    return messages | {"name": name}


def test_what_others_read_of_shards_is_refused_with_the_name_of_the_table(tmp_path: Any) -> None:
    for messages in run_on_warm_ranks(_read_by_others, 2, str(tmp_path)):
        name = messages.pop("name")
        for call, message in messages.items():
            assert "full_parameter('" in message, call
            if call != "save_file of parameters":
                assert (
                    f"'{name}' in a state_dict is all ranks' shards of a table, and" in message
                ), call
                assert (
                    f"trainer.strategy.full_parameter('{name}') returns them on every rank"
                    in message
                ), call
    assert not list(tmp_path.iterdir())


def test_full_parameter_refuses_what_is_not_there_on_every_rank() -> None:
    for message in run_on_warm_ranks(_wrong_calls, 2):
        assert re.search(
            "no parameter 'item_embeding.weight'; did you mean 'item_embedding.weight",
            message["unknown"],
        )
        assert re.search("the ranks ask for different parameters", message["different"])
        assert re.search(r"rows=\(0, 71\) are not within the 70 rows", message["rows"])


def _fused_norms() -> None:
    model = seeded(Looks)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[method-assign]
    _fit(model, embedding_update="fused")


def test_gradient_norms_of_fused_tables_are_refused() -> None:
    with pytest.raises(
        RankFailed, match="OptimizerError: gradient_norms: table 'user_embedding' has no gradient"
    ):
        run_on_warm_ranks(_fused_norms, 2)


def _normalized(types: list[str], max_norm: float | None) -> dict[str, Tensor]:
    model = seeded(TwoTower)
    rank, _ = rank_and_num_ranks()
    names = ["item_embedding.weight", "user_tower.0.weight"]
    trainer = make_trainer(
        {"convert_embeddings": "all", "sharding_types": types},
        callbacks=[NormalizeRows(names, max_norm)],
    )
    trainer.fit(model, loader([pairs(step, rank) for step in range(STEPS)]))
    return whole_state(model)


@pytest.mark.parametrize("types", [["row_wise"], ["column_wise"]])
def test_rows_are_normalized_over_shards_as_in_one_process(types: list[str]) -> None:
    actual = run_each_on_ranks({str(norm): (_normalized, types, norm) for norm in (None, 0.3)}, 2)[
        0
    ]
    for norm in (None, 0.3):
        model = copy.deepcopy(seeded(TwoTower))
        optimizer = model.configure_optimizers()
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.stack([
                model.training_step(pairs(step, rank), 0) for rank in range(2)
            ]).mean().backward()
            optimizer.step()
            for weight in (model.item_embedding.weight.data, model.user_tower[0].weight.data):
                norms = weight.norm(dim=1, keepdim=True)
                weight.copy_(
                    nn.functional.normalize(weight)
                    if norm is None
                    else weight * (norm / norms).clamp(max=1)
                )
        assert too_far(actual[str(norm)], model.state_dict(), 1e-5) == {}


def test_normalize_rows_refuses_what_it_cannot_scale() -> None:
    with pytest.raises(ConfigError, match="a list of names of weights is needed"):
        NormalizeRows("item_embedding.weight")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_norm=0 must be above 0"):
        NormalizeRows(["item_embedding.weight"], max_norm=0)
    with pytest.raises(
        ConfigError, match="no parameter 'items.weight'; it has user_embedding.weight"
    ):
        NormalizeRows(["items.weight"]).on_fit_start(None, TwoTower())  # type: ignore[arg-type]
