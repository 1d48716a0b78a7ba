"""What a user may say about a table: by name, by pattern, from code and from YAML; and what
planning makes of it."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.utils import add_params_from_parameter_sharding

from lightning_distrec import TableOptions, TorchRecShardedStrategy
from lightning_distrec.errors import ConfigError, PlanError
from lightning_distrec.sharding.planning.constraints import (
    TableConstraints,
    allowed_kernels,
)
from lightning_distrec.sharding.planning.planner import Planner
from lightning_distrec.sharding.planning.report_text import print_plan
from lightning_distrec.sharding.planning.table_options import (
    options_by_table,
    options_of_modules,
    replicated_collections,
)
from lightning_distrec.sharding.sharders import KERNELS
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table, find_tables
from tests.support.planned_tables import topology_of


def config(name: str = "t", **changes: Any) -> EmbeddingBagConfig:
    """Return the config of a small table."""
    return EmbeddingBagConfig(
        **{"name": name, "embedding_dim": 8, "num_embeddings": 10, "feature_names": [f"{name}_ids"]}
        | changes
    )


def tables_named(*names: str) -> list[Table]:
    """Return the tables of one collection, "ebc"."""
    root = nn.Module()
    root.ebc = EmbeddingBagCollection(tables=[config(name) for name in names])
    return find_tables(root).tables


def two_of_one_name() -> list[Table]:
    """Return the tables first.t and second.t; the second has two features."""
    root = nn.Module()
    root.first = EmbeddingBagCollection(tables=[config()])
    root.second = EmbeddingBagCollection(tables=[config(feature_names=["f", "g"])])
    return find_tables(root).tables


def demand(kernel: str, **options: Any) -> TableConstraints:
    """Return a demand of a table that may be cut in any of two ways."""
    types = ("table_wise", "row_wise")
    return TableConstraints(types, False, TableOptions(**options), compute_kernels=(kernel,))


def test_later_patterns_override_earlier_ones_and_names_override_patterns_wherever_they_stand() -> (
    None
):
    arguments = {
        "user_id": {"min_partition": 16},
        "user_*": {"sharding_types": ["row_wise"], "min_partition": 4, "pooling_factor": 8.0},
        "ebc.*": {"sharding_types": ["column_wise"]},
        "item_?": {"pooling_factor": 2.5},
    }
    options = options_by_table(
        tables_named("user_id", "user_zip", "item_a", "item_ab"), TableOptions(), arguments
    )
    cut = {"sharding_types": ["column_wise"]}
    assert options == {
        "ebc.user_id": TableOptions(min_partition=16, pooling_factor=8.0, **cut),
        "ebc.user_zip": TableOptions(min_partition=4, pooling_factor=8.0, **cut),
        "ebc.item_a": TableOptions(pooling_factor=2.5, **cut),
        "ebc.item_ab": TableOptions(**cut),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t"], r"tables=\['t'\]: a dict from table names to options is needed"),
        ({"tt": {}}, "there is no table 'tt'; did you mean 't'.*The tables are ebc.t"),
        ({"tt*": {}}, r"tables: no table fits 'tt\*'; did you mean 't'.*The tables are ebc.t"),
        ({"t": {"sharding_typ": []}}, "no option 'sharding_typ'; did you mean 'sharding_types'"),
        ({"t": {"embedding_update": "fusd"}}, "'fusd' is not known; did you mean 'fused'"),
        ({"t": {"sharding_types": "row_wise"}}, r"must be a list: write \['row_wise'\]"),
        ({"t": {"min_partition": 6}}, "min_partition=6: .*multiples of 4"),
        ({"t": {"cache_load_factor": 1.0}}, "1.0: must be a share of the rows.*For all rows"),
        (
            {"t": {"cache_load_factor": 0.5, "compute_kernels": ["fused"]}},
            "only a fused_uvm_caching table has a cache, and compute_kernels=",
        ),
        (
            {"*": {"replicated": True}, "t": {"pooling_factor": 2.0, "min_partition": 8}},
            "replicated=True: .* min_partition and pooling_factor would.* Leave those out",
        ),
    ],
)
def test_options_that_cannot_be_are_reported_with_near_matches(
    arguments: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        options_by_table(tables_named("t"), TableOptions(), arguments)


@pytest.mark.parametrize(
    ("types", "kept_gradient", "device", "kernels"),
    [
        (["row_wise"], False, "cpu", ("fused",)),
        (["row_wise"], False, "cuda", ("fused", "fused_uvm", "fused_uvm_caching")),
        (["row_wise"], True, "cuda", ("fused",)),
        (["data_parallel"], True, "cuda", ("dense",)),
    ],
)
def test_the_kernels_that_are_possible(
    types: list[str], kept_gradient: bool, device: str, kernels: tuple
) -> None:
    (table,) = tables_named("t")
    assert allowed_kernels(table, types, TableOptions(), kept_gradient, device) == kernels
    for kernel in kernels:
        options = TableOptions(compute_kernels=[kernel])
        assert allowed_kernels(table, types, options, kept_gradient, device) == (kernel,)
    for kernel in set(KERNELS) - set(kernels):
        with pytest.raises(
            PlanError, match=rf"table 'ebc.t': compute_kernels=\['{kernel}'\]: {kernel}: .*; allow "
        ):
            allowed_kernels(
                table, types, TableOptions(compute_kernels=[kernel]), kept_gradient, device
            )


def test_some_tables_of_an_embedding_collection_cannot_be_kept_whole() -> None:
    root = nn.Module()
    configs = [
        EmbeddingConfig(name=n, embedding_dim=8, num_embeddings=9, feature_names=[n]) for n in "ab"
    ]
    root.rows = EmbeddingCollection(tables=configs)
    tables = find_tables(root).tables
    with pytest.raises(
        ConfigError,
        match=r"table 'rows.b': replicated=True, but .*all tables of 'rows', as 'rows.\*'",
    ):
        replicated_collections(tables, {"b": {"replicated": True}})
    assert replicated_collections(tables, {"rows.*": {"replicated": True}}) == {"rows"}


def test_tables_are_planned_with_the_kernels_and_the_caches_that_were_asked_for() -> None:
    tables = two_of_one_name()
    constraints = {
        "first.t": demand("fused_uvm_caching", cache_load_factor=0.25),
        "second.t": demand("fused"),
    }
    topology = topology_of(NodeLayout.from_node_sizes(2), "cuda", 1 << 30)
    plan = Planner(tables, constraints, topology, 16).make_plan()
    assert [table.cache_load_factor for table in plan.tables.values()] == [0.25, None]
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    first, second = plan.for_torchrec(devices).values()
    assert (first.compute_kernel, second.compute_kernel) == ("fused_uvm_caching", "fused")
    # What the kernel is made with.
    assert add_params_from_parameter_sharding(None, first)["cache_load_factor"] == 0.25
    assert second.cache_params is None
    console = Console(file=io.StringIO(), width=150)
    print_plan(plan, console=console)
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "In host memory (UVM): first.t (rows, 25% cached on the GPU)" in shown


class Shipped(nn.Module):
    """A library's module, which knows how its tables are used."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[config("user_id"), config("user_zip"), config("item")]
        )
        self.options = options

    def table_options(self) -> Any:
        return self.options


class Outer(nn.Module):
    """Has two of them, and options for them."""

    def __init__(self) -> None:
        super().__init__()
        inner = {
            "user_*": TableOptions(pooling_factor=3.0, min_partition=8),
            "ebc.item": {"replicated": True},
        }
        self.first, self.second = Shipped(inner), Shipped({"absent": {"replicated": True}})

    def table_options(self) -> dict[str, Any]:
        by_rows = {"sharding_types": ["row_wise"]}
        return {"first.ebc.user_id": {"pooling_factor": 5.0}, "second.*": by_rows}


def test_a_module_ships_options_of_its_tables_which_outer_modules_and_the_user_override() -> None:
    root = Outer()
    tables = find_tables(root).tables
    shipped, lines = options_of_modules(root, tables)
    everywhere = TableOptions(embedding_update="auto", sharding_types=["table_wise"])
    options = options_by_table(tables, everywhere, {"user_zip": {"pooling_factor": 7.0}}, shipped)
    of_all = {"embedding_update": "auto", "sharding_types": ["table_wise"]}
    partition = {"min_partition": 8}
    expected = {
        "first.ebc.user_id": of_all | partition | {"pooling_factor": 5.0},
        "first.ebc.user_zip": of_all | partition | {"pooling_factor": 7.0},
        "first.ebc.item": {"replicated": True},
        "second.ebc.item": of_all | {"sharding_types": ["row_wise"]},
    }
    assert {name: options[name].explicit_options() for name in expected} == expected
    assert lines == [
        "table_options() of 'second' has options of absent (no sharded table)",
        "table_options() of 'first' has options of user_*, ebc.item",
        "table_options() of 'Outer' has options of first.ebc.user_id, second.*",
    ]
    root.first.options = {"item": {"sharding_typ": []}}
    words = r"of 'first': tables\['item'\].*did you mean 'sharding_types'"
    with pytest.raises(ConfigError, match=words):
        options_of_modules(root, tables)


SAID: dict[str, dict[str, Any]] = {
    "user_*": {"sharding_types": ["row_wise"], "pooling_factor": 64},
    "ebc.user_id": {
        "compute_kernels": ["fused", "fused_uvm_caching"],
        "cache_load_factor": 0.1,
        "pooling_factor": 3.0,
    },
    "item_a": {"replicated": True},
    "item_b": {"min_partition": 8, "embedding_update": "sparse"},
}


def from_yaml(folder: Path, **arguments: Any) -> TorchRecShardedStrategy:
    """Return the strategy of a YAML, parsed as LightningCLI does."""
    parser: ArgumentParser = LightningArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(TorchRecShardedStrategy, "strategy")
    strategy = {"class_path": "lightning_distrec.TorchRecShardedStrategy", "init_args": arguments}
    (folder / "job.yaml").write_text(yaml.safe_dump({"strategy": strategy}))
    return parser.instantiate(parser.parse_args(["--config", str(folder / "job.yaml")])).strategy


def test_options_say_the_same_from_yaml_and_from_code(tmp_path: Path) -> None:
    tables = tables_named("user_id", "user_zip", "item_a", "item_b")
    coded = TorchRecShardedStrategy(
        tables={name: TableOptions(**message) for name, message in SAID.items()}
    )
    as_dicts = TorchRecShardedStrategy(tables=SAID)
    parsed = from_yaml(tmp_path, tables=SAID, planning={"estimate_pooling": 4})
    expected = options_by_table(tables, TableOptions(embedding_update="auto"), SAID)
    assert expected["ebc.user_zip"].pooling_factor == 64
    for strategy in (coded, as_dicts, parsed):
        settings = strategy.table_settings
        assert (
            options_by_table(tables, settings.default_options, settings.table_options) == expected
        )
    assert parsed.table_settings.planning.estimate_pooling == 4
