"""Every kind of call that a user makes of nn.Embedding and nn.EmbeddingBag, drawn at random."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ROWS, DIM = 37, 8

Embedding = nn.Embedding | nn.EmbeddingBag
Arguments = dict[str, Tensor]
Kind = tuple[Callable[[], Embedding], Callable[[torch.Generator, bool], Arguments]]
"""How an embedding is made, and how its call's arguments are drawn on the rank whose turn it is,
and on the others."""


def rows_maker(**options: Any) -> Callable[[], Embedding]:
    """Return what makes an nn.Embedding."""
    return lambda: nn.Embedding(ROWS, DIM, **options)


def _pretrained(freeze: bool) -> Callable[[], Embedding]:
    return lambda: nn.Embedding.from_pretrained(torch.randn(ROWS, 2 * DIM), freeze=freeze)


def _xavier() -> Embedding:
    table = nn.Embedding(ROWS, 2 * DIM)
    nn.init.xavier_normal_(table.weight)
    return table


def bags_maker(mode: str, **options: Any) -> Callable[[], Embedding]:
    """Return what makes an nn.EmbeddingBag."""
    return lambda: nn.EmbeddingBag(ROWS, DIM, mode=mode, **options)


def _ids(
    *shape: int,
    turn_shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.long,
    rows: int = ROWS,
) -> Callable[[torch.Generator, bool], Arguments]:
    def draw(generator: torch.Generator, turn: bool) -> Arguments:
        size = turn_shape if turn and turn_shape is not None else shape
        return {"input": torch.randint(0, rows, size, generator=generator).to(dtype)}

    return draw


def _weighted_ids(*shape: int) -> Callable[[torch.Generator, bool], Arguments]:
    def draw(generator: torch.Generator, turn: bool) -> Arguments:
        return _ids(*shape)(generator, turn) | {
            "per_sample_weights": torch.rand(*shape, generator=generator) + 0.5
        }

    return draw


def _offsets(
    last: bool = False,
    weighted: bool = False,
    dtype: torch.dtype = torch.long,
    rows: int = ROWS,
    bags: int = 7,
    turn_shape: int = 7,
    ids_of_turn: int = 3,
) -> Callable[[torch.Generator, bool], Arguments]:
    def draw(generator: torch.Generator, turn: bool) -> Arguments:
        size, most = (turn_shape, ids_of_turn) if turn else (bags, 3)
        lengths = torch.randint(0, most + 1, (size,), generator=generator)  # some bags are empty
        ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        ids = torch.randint(0, rows, (int(ends[-1]),), generator=generator)
        drawn = {"input": ids.to(dtype), "offsets": (ends if last else ends[:-1]).to(dtype)}
        weights = (
            {"per_sample_weights": torch.rand(len(ids), generator=generator) + 0.5}
            if weighted
            else {}
        )
        return drawn | weights

    return draw


class Categories(nn.Embedding):
    """Is built in another way."""

    def __init__(self) -> None:
        super().__init__(ROWS, DIM, padding_idx=0)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -1, 1)
        self._fill_padding_idx_with_zero()


KINDS: dict[str, Kind] = {
    "one_id": (rows_maker(), _ids()),
    "vector": (rows_maker(), _ids(6)),
    "matrix": (rows_maker(), _ids(4, 3)),
    "cube": (rows_maker(), _ids(2, 3, 4)),
    "int32": (rows_maker(), _ids(4, 3, dtype=torch.int32)),
    "no_ids": (rows_maker(), _ids(0)),
    "no_ids_on_a_rank": (rows_maker(), _ids(6, 2, turn_shape=(0, 2))),
    "padding": (rows_maker(padding_idx=0), _ids(6, 3, rows=5)),
    "padding_at_the_end": (rows_maker(padding_idx=-1), _ids(60)),
    "frozen": (_pretrained(True), _ids(6)),
    "pretrained": (_pretrained(False), _ids(6)),
    "sparse": (rows_maker(sparse=True), _ids(6)),
    "xavier": (_xavier, _ids(6)),
    "keyword": (rows_maker(), _ids(6)),
    "subclass": (Categories, _ids(6, 3)),
    "bag_sum": (bags_maker("sum"), _ids(6, 3)),
    "bag_mean": (bags_maker("mean"), _ids(6, 3, turn_shape=(6, 2))),
    "bag_int32": (bags_maker("mean"), _ids(6, 3, dtype=torch.int32)),
    "bag_offsets": (bags_maker("sum"), _offsets()),
    "bag_offsets_mean": (bags_maker("mean"), _offsets()),
    "bag_offsets_int32": (bags_maker("mean"), _offsets(dtype=torch.int32)),
    "bag_last": (bags_maker("sum", include_last_offset=True), _offsets(last=True)),
    "bag_last_mean": (bags_maker("mean", include_last_offset=True), _offsets(last=True)),
    "bag_weights": (bags_maker("sum"), _weighted_ids(5, 3)),
    "bag_weights_offsets": (bags_maker("sum"), _offsets(weighted=True)),
    "bag_weights_padding": (bags_maker("sum", padding_idx=2), _offsets(weighted=True, rows=5)),
    "bag_padding": (bags_maker("sum", padding_idx=0), _ids(6, 3, rows=4)),
    "bag_padding_mean": (bags_maker("mean", padding_idx=-1), _ids(20, 4)),
    "bag_padding_offsets": (bags_maker("mean", padding_idx=1), _offsets(rows=3)),
    "bag_sparse": (bags_maker("mean", sparse=True), _ids(6, 3)),
    "bag_all_empty_on_a_rank": (bags_maker("sum"), _offsets(ids_of_turn=0)),
    "bag_keyword": (bags_maker("sum"), _offsets(weighted=True)),
}
UNEQUAL: dict[str, Kind] = {
    "fewer_bags": (bags_maker("mean"), _ids(6, 3, turn_shape=(4, 2))),
    "fewer_bags_offsets": (bags_maker("mean"), _offsets(turn_shape=5)),
    "no_bags": (bags_maker("sum"), _ids(6, 3, turn_shape=(0, 3))),
    "no_bags_offsets": (bags_maker("mean"), _offsets(turn_shape=0)),
}
"""The ranks' calls have unequal numbers of bags."""


def draw_batch(step: int, rank: int, num_ranks: int, kinds: Sequence[str]) -> dict[str, Arguments]:
    """Return the batch of one rank: the arguments of each kind's call."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    turn = step % num_ranks == rank
    return {kind: (KINDS | UNEQUAL)[kind][1](generator, turn) for kind in kinds}
