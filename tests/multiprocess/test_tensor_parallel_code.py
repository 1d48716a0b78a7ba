"""Attention as people write it has the numbers of one process when its layers are split, or is refused."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_distrec import TunedFSDPStrategy
from lightning_distrec.errors import UnsupportedError
from tests.support.dense_models import WIDTH
from tests.support.ranks import run_on_warm_ranks
from tests.support.split_models import Split
from tests.support.trainers import DEFAULTS

DIM, HEADS = 8, 4
attend = functional.scaled_dot_product_attention


def _rotated(tensor: Tensor, by: Tensor) -> Tensor:
    one, other = tensor.chunk(2, -1)
    return torch.cat([one * by - other * by, one * by + other * by], -1)


def _by_bmm(query: Tensor, key: Tensor, value: Tensor, _: nn.Module) -> Tensor:
    query, key, value = (tensor.reshape(-1, WIDTH, DIM // HEADS) for tensor in (query, key, value))
    return torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value).view(-1, HEADS, WIDTH, DIM // HEADS)


def _grouped(query: Tensor, key: Tensor, value: Tensor, _: nn.Module) -> Tensor:
    return attend(query, key[:, ::2], value[:, ::2], enable_gqa=True)


ATTEND: dict[str, Callable[..., Tensor]] = {
    "plain": lambda q, k, v, m: attend(q, k, v),
    "mask": lambda q, k, v, m: attend(q, k, v, attn_mask=m.mask),
    "mask of examples": lambda q, k, v, m: attend(q, k, v, attn_mask=m.mask[None, None].expand(len(q), 1, -1, -1)),
    "bias of heads": lambda q, k, v, m: attend(q, k, v, attn_mask=m.bias),
    "bias of all": lambda q, k, v, m: attend(q, k, v, attn_mask=m.bias[0]),
    "dropout": lambda q, k, v, m: attend(q, k, v, dropout_p=0.3),
    "grouped": _grouped,
    "norms": lambda q, k, v, m: attend(m.norm(q), m.norm(k), v),
    "rotated": lambda q, k, v, m: attend(_rotated(q, m.angles), _rotated(k, m.angles), v),
    "einsum": lambda q, k, v, m: torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v),
    "bmm": _by_bmm,
    "masked": lambda q, k, v, m: (q @ k.mT).masked_fill(~m.mask, -torch.inf).softmax(-1) @ v,
}
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda y: y - y.mean(-1, keepdim=True),
    "norm": lambda y: functional.normalize(y, dim=-1),
    "rms": lambda y: y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt(),
    "read": lambda y: y * float(y.sum()) / 100,
    "glu": lambda y: torch.cat([functional.glu(y, -1)] * 2, -1),
    "of channels": lambda y: functional.dropout1d(y, 0.3),
    "noise": lambda y: y + torch.randn_like(y) * 0.1,
    "chances": lambda y: y * torch.bernoulli(torch.sigmoid(y)),
    "order": lambda y: y[..., torch.randperm(DIM)],
    "top": lambda y: y * (y >= y.topk(3, -1).values[..., -1:]),
    "largest": lambda y: y * functional.one_hot(y.argmax(-1), DIM),
    "more": lambda y: torch.cat([y, torch.zeros(*y.shape[:2], 2, dtype=y.dtype)], -1)[..., 1:-1],
}
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda y: y.cumsum(-1),
    "gumbel_softmax": functional.gumbel_softmax,
    "conv1d": lambda y: functional.conv1d(y.transpose(1, 2), torch.ones(DIM, DIM, 1, dtype=y.dtype)).transpose(1, 2),
    "unbind": lambda y: torch.stack(list(y.unbind(-1)), -1),
}


class Attention(nn.Module):
    mask: Tensor
    angles: Tensor

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.norm = case, nn.LayerNorm(DIM // HEADS)
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(HEADS, WIDTH, WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril().bool())
        self.register_buffer("angles", torch.randn(WIDTH, DIM // HEADS // 2))

    def forward(self, inputs: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        heads = [layer(inputs).view(-1, WIDTH, HEADS, DIM // HEADS).transpose(1, 2) for layer in layers]
        attended = ATTEND.get(self.case, ATTEND["plain"])(*heads, self).transpose(1, 2).contiguous()
        between = (BETWEEN | REFUSED).get(self.case, lambda y: y)
        return self.out(between(attended.view(-1, WIDTH, DIM)))


class Attends(Split):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.lift, self.places = nn.Linear(1, DIM), nn.Parameter(torch.randn(WIDTH, DIM))
        self.blocks, self.head = nn.ModuleList(Attention(case) for _ in range(2)), nn.Linear(DIM, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.lift(inputs[..., None]) + self.places
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden).mean(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


PLAN = {f"blocks.*.{name}": "colwise" for name in ("query", "key", "value")} | {"blocks.*.out": "rowwise"}


def _fit(case: str, strategy: Any, num_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    pl.seed_everything(5)
    model = Attends(case)
    settings = DEFAULTS | {"limit_train_batches": 3, "limit_val_batches": 1, "precision": "64-true"}
    trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **settings)
    trainer.fit(model)
    state = trainer.strategy.full_state_dict() if num_ranks > 1 else model.state_dict()  # type: ignore[attr-defined]
    return model.losses + model.validated, {name: value.clone() for name, value in state.items()}


def _each(cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in cases:
        try:
            strategy = TunedFSDPStrategy(tensor_parallel={"size": 2, "plan": PLAN}, wrap=["Attention"])
            found[case] = _fit(case, strategy, 2)
        except UnsupportedError as error:
            found[case] = str(error)
    return found


@pytest.mark.slow
def test_code_between_layers_has_the_numbers_of_one_process_or_is_refused() -> None:
    first, *_ = run_on_warm_ranks(_each, 2, [*ATTEND, *BETWEEN, *REFUSED])
    for case in REFUSED:
        assert f"tensor_parallel: {case} " in first[case], first[case]
    for case in [*ATTEND, *BETWEEN]:
        assert not isinstance(first[case], str), first[case]
        losses, weights = _fit(case, "auto", 1)
        assert first[case][0] == pytest.approx(losses, rel=1e-9), case
        for name, value in weights.items():
            torch.testing.assert_close(first[case][1][name], value, rtol=1e-7, atol=1e-9, msg=f"{case}: {name}")
