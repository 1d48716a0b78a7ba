"""Weights that hooks draw under fsdp_tuned are those of one process, on any number of ranks."""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_distrec import TunedFSDPStrategy
from tests.support.dense_models import Numbers, loader
from tests.support.embedding_models import too_far
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS


def _noisy(weight: nn.Parameter) -> None:
    weight.data.add_(torch.randn_like(weight), alpha=0.1)


DRAWS: dict[str, Any] = {
    "xavier": lambda weight: nn.init.xavier_normal_(weight.data),
    "kaiming": nn.init.kaiming_uniform_,
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    "bernoulli": lambda weight: weight.data.bernoulli_(0.3),
    "noisy": _noisy,
}


class Draws(Numbers):
    """Draws its weights in a hook."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.draw = draw
        self.drawn: Any = None

    def on_train_start(self) -> None:
        self.draw_all()
        state = self.trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        self.drawn = {name: value.clone() for name, value in state.items()}, torch.rand(2)

    def draw_all(self) -> None:
        for weight in self.parameters():
            if weight.dim() > 1:
                DRAWS[self.draw](weight)


def _built(draw: str) -> Draws:
    pl.seed_everything(5, verbose=False)
    model = Draws(draw)
    pl.seed_everything(7, verbose=False)
    return model


def _drawn(draw: str) -> tuple[dict[str, Tensor], Tensor]:
    model = _built(draw)
    rank, num_ranks = rank_and_num_ranks()
    options = DEFAULTS | {"max_steps": 1}
    trainer = pl.Trainer(
        strategy=TunedFSDPStrategy(min_num_parameters=8), devices=num_ranks, **options
    )
    trainer.fit(model, loader(rank, num_ranks))
    return model.drawn


def test_weights_drawn_in_hooks_under_fsdp_are_those_of_one_process() -> None:
    actual = run_each_on_ranks({draw: (_drawn, draw) for draw in DRAWS}, 2)
    for draw in DRAWS:
        expected = copy.deepcopy(_built(draw))
        expected.draw_all()
        final = torch.rand(2)
        assert too_far(actual[0][draw][0], expected.state_dict(), 0.0) == {}, draw
        assert all(torch.equal(rank_result[draw][1], final) for rank_result in actual), draw
