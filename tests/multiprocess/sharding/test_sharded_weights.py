"""What a module may do with the weights of sharded tables gives what one process gives, or raises
by name."""

import io
import re
from collections.abc import Callable
from functools import partial
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
from tests.support.cases import Case, case_of, check, check_refused
from tests.support.click_model import seeded
from tests.support.embedding_models import TwoTower, loader, pairs
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 3
MIXED = {
    "user_embedding": {"sharding_types": ["row_wise"]},
    "item_embedding": {"sharding_types": ["column_wise"]},
}
Hook = Callable[[pl.LightningModule], Any]


def _fit(model: pl.LightningModule, **options: Any) -> pl.Trainer:
    rank, _ = rank_and_num_ranks()
    trainer = make_trainer({"convert_embeddings": "all"} | options)
    pl.seed_everything(7, verbose=False)
    trainer.fit(model, loader([pairs(step, rank) for step in range(STEPS)]))
    return trainer


# -- rows and sums of the weights, in the step and in hooks


class Penalized(TwoTower):
    """Has norms of all of its parameters in its loss."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for weight in self.parameters():
            norms = weight.norm() + torch.linalg.vector_norm(weight, 3)
            loss = loss + 0.01 * weight.pow(2).sum() + 0.02 * norms
        return loss + self.item_embedding.weight.abs().mean()


class Looks(TwoTower):
    """Keeps the norms of its gradients, by the strategy and by Lightning. hook: looks at weights."""

    def __init__(self, hook: Hook | None = None, optimizer: type | None = None) -> None:
        super().__init__()
        self.norms: list[Any] = []
        self.hook, self.optimizer = hook, optimizer

    @property
    def items(self) -> Tensor:
        """Reads a weight where nn.Module replaces an AttributeError by its own."""
        return self.item_embedding.weight[1:]

    def configure_optimizers(self) -> Any:
        if self.optimizer is not None:
            return self.optimizer(self.parameters(), lr=0.1)
        return super().configure_optimizers()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        of_lightning = {key: float(value) for key, value in grad_norm(self, norm_type=2).items()}
        by_strategy = getattr(self.trainer.strategy, "gradient_norms", None)
        norms = of_lightning if by_strategy is None else by_strategy(norm_type=2)
        self.norms.append((list(norms), norms, of_lightning))
        if self.hook is not None:
            self.hook(self)


def norms_of(model: Any) -> Any:
    assert all(names == list(norms) for names, norms, _ in model.norms)
    return [[norms, of_lightning] for _, norms, of_lightning in model.norms]


def full_parameters(trainer: Any) -> Any:
    """Return whole weights, and a part of two shards."""
    names = [name for name, _ in trainer.lightning_module.named_parameters()]
    full = {name: trainer.strategy.full_parameter(name) for name in names}
    return full, trainer.strategy.full_parameter("item_embedding", rows=(30, 45))


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
}
PARAMETER = "take the place of the weight of the sharded table 'item_embedding'"
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
        "weights of the sharded 'item_embedding'",
    ),
    "past torch": (
        lambda model: model.item_embedding._parameters.update(weight=nn.Parameter(ROWS)),
        "take the place of the module of the sharded table 'item_embedding'",
    ),
}


class Loads(TwoTower):
    """Loads rows in a hook."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def on_fit_start(self) -> None:
        (LOADED[self.way] if self.way in LOADED else REPLACED[self.way][0])(self)


class Normalized(TwoTower):
    """Scales its rows by itself, in one process."""

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.max_norm = max_norm

    def on_train_batch_end(self, *_: Any) -> None:
        for module in (self.user_embedding, self.item_embedding, self.user_tower[0]):
            weight = module.weight.data
            norms = weight.norm(dim=1, keepdim=True)
            if self.max_norm is None:
                weight.copy_(nn.functional.normalize(weight))
            else:
                weight.mul_((self.max_norm / norms).clamp(max=1))


def case(kind: type, *arguments: Any, **values: Any) -> Case:
    """Return a case of a two-tower model with both tables sharded."""
    options = {"convert_embeddings": ["user_embedding", "item_embedding"], "tables": MIXED}
    strategy = options | values.pop("strategy", {})
    fields = {"batch": pairs, "steps": STEPS, "limit": 1e-5, "strategy": strategy}
    return case_of(kind, *arguments, **fields | values)


def normalized(max_norm: float | None) -> Case:
    names = ["user_embedding.weight", "item_embedding.weight", "user_tower.0.weight"]
    trainer = {"callbacks": [NormalizeRows(names, max_norm)]}
    return case(TwoTower, plain=partial(Normalized, max_norm), trainer=trainer)


BY_ROWS = {"tables": {}, "sharding_types": ["row_wise"]}
CASES = {
    "penalized": case(Penalized, strategy={"embedding_update": "dense"}),
    "norms": case(Looks, same=norms_of, look=full_parameters),
    **{f"loaded by {way}": case(Loads, way, strategy=BY_ROWS) for way in LOADED},
    "normalized": normalized(None),
    "norm below a maximum": normalized(0.3),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_done_to_weights_gives_the_numbers_of_one_process(name: str) -> None:
    outcomes = check(CASES[name])
    state = outcomes[0].state
    for full, part in [outcome.seen for outcome in outcomes if outcome.seen is not None]:
        assert all(torch.equal(full[key], value) for key, value in state.items())
        assert torch.equal(part, state["item_embedding.weight"][30:45])


FUSED_SGD = {"embedding_update": "fused"}
LOST = {name: (case(Loads, name), message) for name, (_, message) in REPLACED.items()}
LOST["norms of fused tables"] = (
    case(Looks, optimizer=torch.optim.SGD, strategy=FUSED_SGD),
    "OptimizerError: gradient_norms: table 'user_embedding' has no gradient",
)


@pytest.mark.parametrize("name", LOST)
def test_parameters_in_the_place_of_shards_are_refused_on_every_rank(name: str) -> None:
    check_refused(*LOST[name])


# -- what is refused


REFUSED: dict[str, tuple[Hook, str]] = {
    "property": (
        lambda model: model.items,
        r"of the sharded table 'item_embedding' was read \(__getitem__\)",
    ),
    "linear": (
        lambda model: nn.functional.linear(torch.ones(2, 16), model.item_embedding.weight),
        r"\(linear\)",
    ),
    "histogram": (
        lambda model: [p.detach().cpu().numpy() for p in model.parameters()],
        r"'user_embedding' .*\(numpy",
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
    _fit(seeded(Looks, try_each), sharding_types=["row_wise"], convert_embeddings=pair)
    return message


def test_other_reads_and_writes_are_refused_on_every_rank_by_name() -> None:
    for rank, message in enumerate(run_on_warm_ranks(_refused, 2, list(REFUSED))):
        for name, (_, pattern) in REFUSED.items():
            if name != "on rank 0" or rank == 0:
                assert re.search(pattern, message[name], re.S), (name, message.get(name))


def _wrong_calls(folder: str) -> dict[str, str]:
    model = seeded(TwoTower)
    strategy: Any = _fit(model).strategy
    state, weights = model.state_dict(), dict(model.named_parameters())
    name = next(key for key, value in state.items() if isinstance(value, ShardedTensor))
    plain = torch.zeros(state[name].size())
    different = ["item_embedding", "user_embedding"][rank_and_num_ranks()[0]]
    calls: dict[str, Callable[[], Any]] = {
        "unknown": lambda: strategy.full_parameter("item_embeding.weight"),
        "different": lambda: strategy.full_parameter(different),
        "rows": lambda: strategy.full_parameter("item_embedding", (0, 71)),
        "save_file of parameters": lambda: save_file(weights, f"{folder}/weights.safetensors"),
        "save_file": lambda: save_file(state, f"{folder}/state.safetensors"),
        "equal": lambda: torch.equal(state[name], plain),
        "allclose": lambda: torch.allclose(plain, state[name]),
        "==": lambda: state[name] == plain,
    }
    messages = {"name": name}
    for call, function in calls.items():
        with pytest.raises((ConfigError, ShardingError, ShardedWeightError)) as raised:
            function()
        messages[call] = str(raised.value)
    return messages


def test_calls_that_need_more_than_shards_are_refused_with_the_name(tmp_path: Any) -> None:
    for messages in run_on_warm_ranks(_wrong_calls, 2, str(tmp_path)):
        unknown = "no parameter 'item_embeding.weight'; did you mean 'item_embedding.weight"
        assert unknown in messages["unknown"]
        assert "the ranks ask for different parameters" in messages["different"]
        assert "rows=(0, 71) are not within the 70 rows" in messages["rows"]
        assert "full_parameter('" in messages["save_file of parameters"]
        name = messages["name"]
        for call in ("save_file", "equal", "allclose", "=="):
            assert f"'{name}' in a state_dict is all ranks' shards of a table" in messages[call]
            way_out = f"trainer.strategy.full_parameter('{name}') returns them on every rank"
            assert way_out in messages[call], call
    assert not list(tmp_path.iterdir())
