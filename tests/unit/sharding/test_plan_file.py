"""Plans as files: what is written is what is read, and what cannot be is told with its place."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)

from lightning_distrec.errors import ConfigError, PlanError
from lightning_distrec.sharding.planning.checks import plan_for_run
from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.plan_file import load_plan, plan_text, save_plan
from lightning_distrec.sharding.planning.planner import Planner
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.sharders import SHARDING_TYPES
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import Table, find_tables
from tests.support.planned_tables import topology_of

SIZES = {"users": (60, 16), "films": (37, 8), "days": (11, 8)}


def tables_of(sizes: dict[str, tuple[int, int]], pooled: bool = True) -> list[Table]:
    """Return tables of one collection."""
    root = nn.Module()
    configs = {
        name: {
            "name": name,
            "num_embeddings": rows,
            "embedding_dim": dim,
            "feature_names": [f"of_{name}"],
        }
        for name, (rows, dim) in sizes.items()
    }
    if pooled:
        root.ebc = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(**config) for config in configs.values()]
        )
    else:
        root.ec = EmbeddingCollection(
            tables=[EmbeddingConfig(**config) for config in configs.values()]
        )
    return find_tables(root).tables


def constraints_of(
    tables: list[Table], *types: str, retained: bool = False, **extra: Any
) -> dict[str, TableConstraints]:
    """Return constraints that allow these sharding types, or all where there are none."""
    options = TableOptions(sharding_types=list(types) or None, min_partition=4)
    allowed = types or SHARDING_TYPES
    return {
        table.full_name: TableConstraints(tuple(allowed), retained, options, **extra)
        for table in tables
    }


def make(tables: list[Table], layout: NodeLayout, *types: str) -> ShardingPlan:
    """Return what the planner makes with these sharding types."""
    return Planner(
        tables, constraints_of(tables, *types), topology_of(layout, "cpu", 1 << 34), 64
    ).make_plan()


@pytest.fixture(scope="module")
def mixed() -> dict[str, Any]:
    """The content of a file with a row-wise, a column-wise, a table-wise and a data-parallel
    table."""
    tables, layout = tables_of({**SIZES, "hours": (24, 4)}), NodeLayout.from_node_sizes(2)
    types = {
        "ebc.users": "row_wise",
        "ebc.films": "column_wise",
        "ebc.days": "table_wise",
        "ebc.hours": "data_parallel",
    }
    made = {kind: make(tables, layout, kind) for kind in types.values()}
    tables_values = {name: made[kind].tables[name] for name, kind in types.items()}
    return json.loads(plan_text(ShardingPlan(layout=layout, device="cpu", tables=tables_values)))


def loaded(content: Any, folder: Path) -> ShardingPlan:
    """Return the plan in a file with this content."""
    (folder / "plan.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return load_plan(folder / "plan.json")


@settings(max_examples=40, deadline=None, database=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(16, 200), st.sampled_from([4, 8, 12, 32])), min_size=1, max_size=3
    ),
    layout=st.sampled_from([
        NodeLayout.from_node_sizes(1),
        NodeLayout.from_node_sizes(2),
        NodeLayout.from_node_sizes(2, 2),
        NodeLayout.from_node_sizes(3),
    ]),
    sharding_type=st.sampled_from(SHARDING_TYPES),
)
def test_any_plan_that_is_made_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, int]],
    layout: NodeLayout,
    sharding_type: str,
) -> None:
    file = tmp_path_factory.mktemp("any") / "plan.json"
    tables = tables_of({f"täble {i}": size for i, size in enumerate(sizes)})
    plan = make(tables, layout, sharding_type)
    save_plan(file, plan)
    assert plan_text(load_plan(file)) == plan_text(plan)
    devices = [torch.device("cpu")] * layout.num_ranks
    assert load_plan(file).for_torchrec(devices) == plan.for_torchrec(devices)
    repeated = ShardingPlan.from_torchrec(tables, plan.for_torchrec(devices), layout, "cpu")
    assert repeated == load_plan(file)


def _change(content: Any, path: list[int], change: Any) -> None:
    """Change or delete the value that a path leads to in nested dicts and lists; path: which key,
    at each level."""
    for level, number in enumerate(path):
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        if not keys:
            return
        key = keys[number % len(keys)]
        if level < len(path) - 1 and isinstance(content[key], (dict, list)):
            content = content[key]
            continue
        if change == "delete":
            del content[key]
        elif change == "twice" and isinstance(content, list):
            content.append(copy.deepcopy(content[key]))
        elif isinstance(change, tuple):
            content[key] = content[key] + change[0] if type(content[key]) is int else change[0]
        else:
            content[key] = copy.deepcopy(change)
        return


CHANGES = st.one_of(
    st.sampled_from([
        "delete",
        "twice",
        "row_wise",
        "table_wise",
        "fused",
        "dense",
        "cuda",
        (1,),
        (-1,),
        (10**30,),
    ]),
    st.sampled_from([None, True, 0, 1, 2, -1, 0.5, float("nan"), "", [], {}, [0, 0], [[]], 10**30]),
)


@settings(max_examples=150, deadline=None, database=None)
@given(
    edits=st.lists(
        st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=6), CHANGES),
        min_size=1,
        max_size=3,
    )
)
def test_a_changed_file_is_read_as_it_is_or_refused_by_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory,
    mixed: dict[str, Any],
    edits: list[tuple[list[int], Any]],
) -> None:
    content = json.loads(json.dumps(mixed))
    for path, change in edits:
        _change(content, path, change)
    folder = tmp_path_factory.mktemp("changed")
    actual, message = None, ""
    try:
        actual = loaded(content, folder)
    except (PlanError, ConfigError) as error:
        message = str(error)
    if actual is None:
        assert str(folder) in message
        return
    repeated = json.loads(plan_text(actual))
    for tables in (content["tables"], repeated["tables"]):
        for table in tables.values():
            table["shards"].sort(key=str)
    assert repeated == content


def shard(rank: int, row: int, column: int, rows: int, columns: int) -> dict[str, Any]:
    return {"rank": rank, "offsets": [row, column], "sizes": [rows, columns]}


USERS, FILMS, HOURS = (("tables", f"ebc.{name}") for name in ("users", "films", "hours"))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("version",), 2, "lightning_distrec reads 1. Install the version that wrote it"),
        (("version",), "1", "it has no integer version"),
        (("num_ranks",), None, "num_ranks is missing"),
        (("num_ranks",), 2**40, "1099511627776 is not a whole number of at least 1 and at most"),
        (("ranks_per_node",), 3, "2 ranks cannot be divided into nodes of 3 ranks each"),
        (("device",), "cude", "device: 'cude' is not known; did you mean 'cuda'"),
        (("tables",), [], "tables: an object is needed, from full names"),
        (("rank",), 1, "'rank' is not known; did you mean 'num_ranks'.*There are version, num"),
        ((*USERS, "rows"), 61, r"tables\['ebc.users'\].shards: rows 60 to 60 are in no shard"),
        ((*USERS, "rows"), 59, r"shards\[1\]: exceeds the table: rows 30 to 59"),
        ((*USERS, "sharding_type"), "table_wise", "shards: table_wise does not shard rows, and"),
        ((*USERS, "compute_kernel"), "dense", "dense with row_wise: data_parallel tables have"),
        ((*USERS, "shards", 0, "rank"), 2, r"shards\[0\]: is on rank 2, and the last one is 1"),
        ((*USERS, "shards", 0, "offsets"), [0], r"offsets: \[0\] is not two numbers, of rows"),
        ((*USERS, "shards", 0, "sizes"), [31, 16], "rows 30 to 30 are in shards that overlap"),
        ((*HOURS, "shards", 0, "rank"), 1, "each of 2 ranks must hold all of the table once"),
        (
            (*USERS, "shards"),
            [shard(0, 0, 0, 20, 16), shard(1, 20, 0, 40, 16)],
            "one block of rows, .*: 30 of 60 rows, the last has fewer",
        ),
        (
            (*FILMS, "shards"),
            [shard(0, 0, 0, 37, 2), shard(0, 0, 2, 37, 6)],
            "a shard has 2 columns, and FBGEMM's rows come in multiples of 4",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_reported_with_its_place(
    tmp_path: Path, mixed: dict[str, Any], place: tuple[Any, ...], value: Any, message: str
) -> None:
    content = json.loads(json.dumps(mixed))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    if value is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    with pytest.raises(PlanError, match=message) as raised:
        loaded(content, tmp_path)
    assert f"{tmp_path / 'plan.json'} is not a valid plan: " in str(raised.value)


def fit(content: Any, folder: Path, tables: list[Table], **extra: Any) -> ShardingPlan:
    """Return what the file with this content becomes for these tables on two ranks of one node."""
    usual = {
        "constraints": constraints_of(tables),
        "layout": NodeLayout.from_node_sizes(2),
        "device": "cpu",
    }
    return plan_for_run(loaded(content, folder), "plan_file='it'", tables, **usual | extra)


def test_a_file_of_another_module_is_reported_by_all_differences(tmp_path: Path) -> None:
    plan = make(tables_of(SIZES), NodeLayout.from_node_sizes(2), "table_wise")
    content = json.loads(plan_text(plan))
    remaining = tables_of({"user": (60, 16), "films": (38, 8), "days": (11, 8)})
    with pytest.raises(PlanError) as raised:
        fit(content, tmp_path, remaining, layout=NodeLayout.from_node_sizes(4))
    assert str(raised.value).splitlines() == [
        "plan_file='it' does not suit this run:",
        "  - it is for 2 ranks, and there are 4",
        "  - table 'ebc.users' is in the plan only; did you mean 'ebc.user'?",
        "  - table 'ebc.user' is in the module only; did you mean 'ebc.users'?",
        "  - table 'ebc.films' is 37 x 8 FP32 in the plan, 38 x 8 FP32 in the module",
        "Name the plan of a run like this one, change the file, or leave plan_file out.",
    ]
    many = tables_of({f"t{i}": (10, 4) for i in range(20)})
    with pytest.raises(PlanError, match="and 13 more\n"):
        fit(content, tmp_path, many)


@pytest.mark.parametrize(
    ("sharding_type", "change", "constraints", "message"),
    [
        (
            "row_wise",
            {},
            {"types": ["table_wise"]},
            r"and sharding_types=\['table_wise'\] does not",
        ),
        ("data_parallel", {}, {}, "so that the user's own optimizer must update it"),
        (
            "column_wise",
            {},
            {"unsplit_rows_for": "RowWiseAdagrad"},
            "cannot be sharded column_wise: RowWiseAdagrad keeps one number for each row",
        ),
        (
            "row_wise",
            {"compute_kernel": "fused_uvm"},
            {"retained": True},
            "the kernel fused_uvm, with which the user's own",
        ),
    ],
)
def test_a_place_that_a_table_cannot_have_in_this_run_is_reported(
    tmp_path: Path,
    sharding_type: str,
    change: dict[str, Any],
    constraints: dict[str, Any],
    message: str,
) -> None:
    tables = tables_of({"users": (60, 16)})
    content = json.loads(plan_text(make(tables, NodeLayout.from_node_sizes(2), sharding_type)))
    content["tables"]["ebc.users"] |= change
    others = dict(constraints)
    types = others.pop("types", [])
    with pytest.raises(PlanError, match=message):
        fit(content, tmp_path, tables, constraints=constraints_of(tables, *types, **others))


def test_sequence_tables_take_their_own_cuts_and_one_width(tmp_path: Path) -> None:
    tables = tables_of({"users": (60, 8), "films": (30, 8)}, pooled=False)
    content = json.loads(plan_text(make(tables, NodeLayout.from_node_sizes(2), "column_wise")))
    fit(content, tmp_path, tables)
    content["tables"]["ec.films"]["shards"] = [{"rank": 1, "offsets": [0, 0], "sizes": [30, 8]}]
    with pytest.raises(
        PlanError, match=r"EmbeddingCollection 'ec' have column_wise shards of \[4, 8\] columns"
    ):
        fit(content, tmp_path, tables)
    content["tables"]["ec.films"]["sharding_type"] = "table_column_wise"
    with pytest.raises(
        PlanError,
        match="'ec.films' cannot be sharded table_column_wise: an EmbeddingCollection's table",
    ):
        fit(content, tmp_path, tables)


def test_a_data_parallel_table_that_nothing_updates_is_on_the_rank_that_holds_least(
    tmp_path: Path,
) -> None:
    tables = tables_of({"users": (60, 16), "days": (11, 8)})
    content = json.loads(plan_text(make(tables, NodeLayout.from_node_sizes(2), "table_wise")))
    content["tables"]["ebc.users"]["shards"][0]["rank"] = 0
    content["tables"]["ebc.days"] = json.loads(
        plan_text(make(tables, NodeLayout.from_node_sizes(2), "data_parallel"))
    )["tables"]["ebc.days"]
    actual = fit(content, tmp_path, tables, constraints=constraints_of(tables, update="frozen"))
    assert actual.tables["ebc.users"] == load_plan(tmp_path).tables["ebc.users"]
    days = actual.tables["ebc.days"]
    assert (days.sharding_type, days.compute_kernel, [s.rank for s in days.shards]) == (
        "table_wise",
        "fused",
        [1],
    )
