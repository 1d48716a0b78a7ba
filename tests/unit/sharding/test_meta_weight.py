"""What a constructor writes to a table without rows is repeated block by block, or gives the table
its rows."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec import meta_tables
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.meta_weight import (
    give_rows_to_buffers,
    stop_recording,
)
from lightning_distrec.sharding.weights.shard_access import without_guard

ROWS, WIDTH = 23, 8
PRETRAINED = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)


def _embedding(kind: Any = nn.Embedding, **options: Any) -> Any:
    with meta_tables("all"):
        return kind(ROWS, WIDTH, **options)


def _is_meta(weight: Any) -> bool:
    with without_guard():  # user code is told what it would be told without this package
        return bool(weight.is_meta)


def _in_blocks(weight: Any, rows: int) -> torch.Tensor:
    """Return the weight's rows, made by `rows` at a time."""
    blocks = []
    for start in range(0, ROWS, rows):
        values = torch.empty(min(rows, ROWS - start), WIDTH).fill_(float("nan"))
        weight.record.fill(values, start)
        blocks.append(values)
    return torch.cat(blocks)


def _write_rows(weight: Any) -> None:
    weight.data.fill_(1.0)
    with torch.no_grad():
        weight[0].zero_()
        weight[4] = 0
        weight[-1].add_(2.0).mul_(torch.tensor(3.0))


def _scale(weight: Any) -> None:
    weight.data.copy_(torch.tensor(9.0))
    weight.data.mul_(0.5).add_(1, alpha=3).clamp_(max=7)
    weight.data *= 2


EXACT: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda weight: nn.init.zeros_(weight),
    "constant": lambda weight: nn.init.constant_(weight, 0.3),
    "rows": _write_rows,
    "scaled": _scale,
}


@pytest.mark.parametrize("name", EXACT)
def test_values_that_are_written_to_a_weight_without_rows_are_those_of_a_weight_with_rows(
    name: str,
) -> None:
    expected, actual = nn.Embedding(ROWS, WIDTH).weight, _embedding().weight
    EXACT[name](expected)
    EXACT[name](actual)
    assert _is_meta(actual)
    assert not expected.isnan().any()
    for rows in (1, 5, ROWS):
        assert torch.equal(_in_blocks(actual, rows), expected), rows


DRAWN: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda weight: None,
    "normal": lambda weight: nn.init.normal_(weight, std=0.01),
    "xavier": lambda weight: nn.init.xavier_uniform_(weight),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_of_one_block_are_those_of_a_weight_with_rows(name: str) -> None:
    actual = _embedding(padding_idx=2).weight
    with torch.device("cpu"):  # as Lightning does around configure_model
        DRAWN[name](actual)
    assert _is_meta(actual)
    torch.manual_seed(1)
    expected = nn.Embedding(ROWS, WIDTH, padding_idx=2).weight
    if name != "nothing":
        torch.manual_seed(1)
        DRAWN[name](expected)
    torch.manual_seed(1)
    assert torch.equal(_in_blocks(actual, ROWS), expected)
    assert bool((_in_blocks(actual, 5)[2] == 0).all()) == (name == "nothing")


def _write_a_constant(weight: Any) -> Any:
    weight.data.fill_(3.0)
    weight.data[2].mul_(2)
    return weight


NEED_ROWS: dict[str, Callable[[Any], Any]] = {
    "pretrained": lambda weight: weight.data.copy_(PRETRAINED),
    "orthogonal": lambda weight: nn.init.orthogonal_(weight, gain=2),
    "columns": lambda weight: weight.data[:, 2].fill_(7.0),
    "norm": lambda weight: weight.data.div_(weight.data.norm(dim=1, keepdim=True)),
    "generator": lambda weight: nn.init.normal_(weight, generator=torch.Generator().manual_seed(4)),
    "itself": lambda weight: torch.no_grad()(weight.add_)(weight),
    "numpy": lambda weight: weight.detach().numpy().__imul__(2),
    "memory": lambda weight: weight.untyped_storage().fill_(0),
}


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Leave what is in reference cycles where it is."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", NEED_ROWS)
def test_what_needs_all_rows_makes_them_and_says_so(name: str) -> None:
    module = _embedding(padding_idx=5)  # whose row is zeroed by a view, which must not stay
    weight = _write_a_constant(module.weight)
    view = weight.data[3:5]
    torch.manual_seed(2)
    with pytest.warns(
        UserWarning,
        match=r"Embedding\(23, 8\) is built whole on every rank: '.*' needs all of its rows",
    ):
        NEED_ROWS[name](weight)
    expected = _write_a_constant(nn.Parameter(torch.empty(ROWS, WIDTH)))
    torch.manual_seed(2)
    NEED_ROWS[name](expected)
    assert type(module.weight) is nn.Parameter
    assert module.weight is weight
    assert torch.equal(weight, expected)
    view.zero_()
    assert not weight[3:5].any(), "a view from before is one of the rows"


def test_copies_hooks_and_new_data_give_a_weight_its_rows_and_pickles_none() -> None:
    module = _embedding()
    with pytest.warns(UserWarning, match="deepcopy"):
        twin = copy.deepcopy(module)
    assert torch.equal(twin.weight, module.weight)
    module = _embedding()
    module.weight.data = PRETRAINED
    assert torch.equal(module.weight, PRETRAINED)
    module = _embedding()
    with pytest.warns(UserWarning, match="register_hook"):
        module.weight.register_hook(lambda gradient: gradient * 0)
    module(torch.tensor([1])).sum().backward()
    assert not module.weight.grad.any()
    module = _embedding()
    expected = _write_a_constant(nn.Embedding(ROWS, WIDTH).weight)
    _write_a_constant(module.weight)
    restored = pickle.loads(pickle.dumps(module))
    assert _is_meta(restored.weight)
    assert torch.equal(_in_blocks(restored.weight, 4), expected)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        _embedding().weight.zero_()


def test_a_buffer_that_is_a_view_gives_the_weight_its_rows_and_a_late_view_is_refused() -> None:
    root = nn.Module()
    root.table = _embedding()
    root.table.weight.data.fill_(3.0)
    root.register_buffer("first", root.table.weight.detach()[:2])
    late = root.table.weight.data[3]
    with pytest.warns(UserWarning, match="'buffer first' needs all of its rows"):
        give_rows_to_buffers(root)
    assert bool((root.first == 3).all())
    root.table.weight.data.zero_()
    assert not root.first.any(), "one memory"
    assert not late.any()

    table = _embedding()
    late = table.weight.data[3]
    stop_recording(table.weight)
    for use in (late.sum, late.zero_):
        with pytest.raises(
            ShardingError,
            match=r"called on a view of Embedding\(23, 8\) from before it was sharded",
        ):
            use()


def test_embeddings_that_are_not_sharded_are_made_as_ever() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Any) -> Any:
            return 2 * super().forward(ids)

    kinds = [(Scaled, {}), (nn.Embedding, {"max_norm": 1.0}), (nn.EmbeddingBag, {"mode": "max"})]
    kinds += [(nn.Embedding, {"_weight": PRETRAINED}), (nn.Embedding, {"device": "cpu"})]
    assert all(not _is_meta(_embedding(kind, **options).weight) for kind, options in kinds)
    with meta_tables():
        assert not _is_meta(nn.Embedding(ROWS, WIDTH).weight), "few rows"
        assert not _is_meta(nn.Embedding.from_pretrained(PRETRAINED).weight)
        assert _is_meta(nn.Embedding(100_000, WIDTH).weight)
        with torch.device("cpu"):
            assert _is_meta(nn.EmbeddingBag(100_000, WIDTH).weight)
    assert not _is_meta(nn.Embedding(100_000, WIDTH).weight)


def test_what_is_built_whole_without_the_memory_for_it_is_refused() -> None:
    message = r"\(100,000,000,000 x \d\) needs [\d.,]+ TiB on every rank, and .* are free. It is built whole because "
    with meta_tables():
        with pytest.raises(ShardingError, match=message + "max_norm=1.0 changes rows when they"):
            nn.Embedding(10**11, 8, max_norm=1.0)
        with pytest.raises(ShardingError, match=message + "it is given a device"):
            nn.Embedding(10**11, 8, device="cpu")
        config = EmbeddingBagConfig(
            name="t", num_embeddings=10**11, embedding_dim=6, feature_names=["f"]
        )
        with pytest.raises(ShardingError, match=message + "table 't' has embedding_dim=6"):
            EmbeddingBagCollection([config])


def test_a_collections_weight_is_recorded_or_gets_its_rows() -> None:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=WIDTH, feature_names=["f"]
    )
    with meta_tables():
        weight = EmbeddingBagCollection([config]).embedding_bags["t"].weight
    assert 0 < float(_in_blocks(weight, 6).abs().max()) <= ROWS**-0.5, "its init_fn"
    nn.init.constant_(weight, 2.0)
    assert torch.equal(_in_blocks(weight, 6), torch.full((ROWS, WIDTH), 2.0))
    with pytest.warns(
        UserWarning, match="table 't' is built whole on every rank: 'sum' needs all of its rows"
    ):
        assert weight.sum() == 2 * ROWS * WIDTH
