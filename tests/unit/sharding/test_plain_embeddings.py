"""Which nn.Embedding and nn.EmbeddingBag become tables, and which stay whole and why; no ranks."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_distrec.errors import ConfigError, ShardingError
from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.sharding.tables import FoundTables, find_tables


class MyBag(nn.EmbeddingBag):
    """A subclass that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Offset(nn.Embedding):
    """A subclass with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(9, 8)
        self.bias = nn.Parameter(torch.zeros(9))


def _root(**children: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return root


def _found(root: nn.Module, selected: Any = "all", min_rows: int = 100_000) -> FoundTables:
    return find_tables(root, Conversion(selected, min_rows))


def test_a_module_under_two_names_is_one_table_that_either_name_names() -> None:
    root = _root(user=nn.Embedding(9, 8))
    root.item = root.user
    for selected in ("all", ["user"], ["item"], ["user", "item"]):
        assert [table.full_name for table in _found(root, selected).tables] == ["user"]


def test_auto_takes_tables_of_min_rows_and_reports_nothing_of_smaller_ones() -> None:
    root = _root(small=nn.Embedding(9, 8), large=nn.Embedding(10, 8), odd=nn.Embedding(9, 6))
    actual = _found(root, "auto", 10)
    assert [table.full_name for table in actual.tables] == ["large"]
    assert actual.left_alone == {}
    assert _found(root, "auto", 9).left_alone.keys() == {"odd"}
    assert _found(root, "auto").tables == []


WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "max_norm": (lambda: nn.Embedding(9, 8, max_norm=1.0), r"max_norm=1\.0"),
    "frequency": (lambda: nn.EmbeddingBag(9, 8, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "dim": (lambda: nn.Embedding(9, 10), "embedding_dim=10.*multiples of 4"),
    "subclass": (lambda: MyBag(9, 8), "MyBag is a subclass.*its own forward"),
    "more": (Offset, "it has a 'bias' besides its weight"),
    "double": (lambda: nn.Embedding(9, 8).double(), r"torch\.float64"),
    "weight_norm": (lambda: nn.utils.weight_norm(nn.Embedding(9, 8)), "weight"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_exact_stays_whole_with_the_reason_or_is_refused_where_it_is_listed(
    name: str,
) -> None:
    make, reason = WHOLE[name]
    root = _root(odd=make(), item=nn.Embedding(9, 8))
    for selected in ("all", "auto"):
        actual = _found(root, selected, 9)
        assert [table.full_name for table in actual.tables] == ["item"]
        assert actual.left_alone.keys() == {"odd"}
        assert re.search(reason, actual.left_alone["odd"])
    with pytest.raises(
        ShardingError, match=f"convert_embeddings: 'odd' cannot be sharded: .*{reason}"
    ):
        _found(root, ["odd"])


def test_a_weight_that_another_module_has_too_stays_whole_and_names_it() -> None:
    root = _root(
        item=nn.Embedding(9, 8), output=nn.Linear(8, 9, bias=False), other=nn.Embedding(9, 8)
    )
    root.output.weight = root.item.weight
    actual = _found(root)
    assert [table.full_name for table in actual.tables] == ["other"]
    assert actual.left_alone == {"item": "its weight is also 'output.weight'"}
    root.other.weight = root.item.weight
    assert _found(root).tables == []


def test_an_unknown_path_is_reported_with_a_near_match_and_those_there_are() -> None:
    root = _root(towers=nn.ModuleList([_root(item=nn.Embedding(9, 8))]), head=nn.Linear(8, 1))
    with pytest.raises(ConfigError, match=r"'towers\.0\.itm'; did you mean 'towers\.0\.item'\?"):
        _found(root, ["towers.0.itm"])
    with pytest.raises(ConfigError, match=r"'head'.*The module has towers\.0\.item"):
        _found(root, ["head"])
    with pytest.raises(ConfigError, match="The module has none"):
        _found(_root(head=nn.Linear(8, 1)), ["item"])
