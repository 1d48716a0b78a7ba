"""A folder answers with the best rows of an item table, as `retrieval.top_k` finds them in the
trained module."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_distrec.cli.main import main
from lightning_distrec.errors import ConfigError
from lightning_distrec.retrieval import top_k
from lightning_distrec.serving import answer, nearest_rows
from lightning_distrec.serving.artifact import RawRows, export_for_serving
from lightning_distrec.serving.item_table import TopK
from tests.support.column_models import FEATURES, ColumnModel, click_data, write_clicks, write_job
from tests.support.served_folder import ask

ROWS = 300
DIM = 8


class NextItem(pl.LightningModule):
    """Queries of histories; `items` is found by the end of its path."""

    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tables = nn.ModuleDict({"item": nn.Embedding(rows, DIM, dtype=dtype)})
        self.users = nn.Embedding(4, DIM)
        self.layer = nn.Linear(DIM, DIM)

    def encode(self, batch: dict[str, Tensor]) -> Tensor:
        """Return queries, (examples, dim)."""
        return self.layer(self.tables["item"](batch["history"]).float().mean(1))

    def pair(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what no query is."""
        return batch["history"], batch["history"]


def batch_of(size: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"history": torch.randint(0, ROWS, (size, 3), generator=draw)}


def exported(folder: Path, module: NextItem, **options: Any) -> answer.Server:
    settings = {"queries": "encode", "items": "item"} | options.pop("top_k", {})
    batches: dict[str, Any] = {"first_request": batch_of(1, seed=1)}
    export_for_serving(module, batch_of(32), folder, top_k=TopK(**settings), **batches, **options)
    return answer.Server(folder)


def exact(module: NextItem, batch: dict[str, Tensor], k: int, **options: Any) -> list[Tensor]:
    with torch.no_grad():
        queries = module.encode(batch)
    return [*top_k(queries, module.tables["item"], k, **options)]


Served = tuple[NextItem, answer.Server, Path]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A module, and the server of a folder that no test changes."""
    module, folder = NextItem(), tmp_path_factory.mktemp("items") / "served"
    return module, exported(folder, module), folder


def _check_items(module: NextItem, server: answer.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.about["largest_difference"] == 0
    for size, max_bytes in ((7, 2**28), (1, 2000), (40, 2000)):
        batch = batch_of(size, seed=size)
        seen = batch["history"]
        expected = exact(module, batch, 12, exclude=seen, max_bytes=max_bytes)
        monkeypatch.setitem(type(server.items).best_rows.__globals__, "MAX_BYTES", max_bytes)
        answered = server.answer(batch, k=12, exclude=seen.tolist())
        assert torch.equal(answered["scores"], expected[0]), max_bytes
        assert torch.equal(answered["items"], expected[1])


def test_items_and_scores_are_those_of_top_k_to_the_digit(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, server, folder = served
    _check_items(module, server, monkeypatch)
    # Nothing is excluded, and the export's k is taken, unless a request says so.
    scores, items = exact(module, batch_of(1, seed=1), 10)
    plain = json.loads(ask(folder, [])[0])
    assert plain["items"] == items.tolist()
    assert plain["scores"][0] == pytest.approx(scores[0].tolist(), rel=1e-6)
    rounded = NextItem(torch.bfloat16)
    _check_items(rounded, exported(tmp_path / "served", rounded), monkeypatch)


def test_fewer_rows_than_k_are_a_shorter_list(served: Served) -> None:
    request = {"history": [[1, 2, 3], [4, 5, 6]], "k": 4}
    exclude = [[*range(2, ROWS)], []]
    answered = served[1].answer_plain(request | {"exclude": exclude})
    assert sorted(answered["items"][0]) == [0, 1]
    assert [*map(len, answered["scores"])] == [2, 4]
    none = served[1].answer({"history": torch.zeros(0, 3, dtype=torch.long)})
    assert none["items"].shape == (0, 10)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_rows_are_scored_as_they_are_read(bits: int, tmp_path: Path) -> None:
    module = NextItem()
    server = exported(tmp_path / "served", module, bits=bits)
    rows = server.tables["tables.item.rows"]
    assert rows.dtype == torch.uint8
    rounded = nn.Embedding.from_pretrained(nearest_rows.dequantized(rows, DIM, bits))
    weight = module.tables["item"].weight.detach()
    steps = (weight.amax(1) - weight.amin(1)) / (2**bits - 1)
    assert ((rounded.weight - weight).abs().amax(1) <= 0.6 * steps + 0.01).all()
    batch = batch_of(5, seed=5)
    scores, items = top_k(server.output(batch), rounded, 6)
    answered = server.answer(batch, k=6)
    assert torch.equal(answered["scores"], scores)
    assert torch.equal(answered["items"], items)


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"k": 0}, f"k must be 1 to {ROWS}, and is 0"),
    ({"k": ROWS + 1}, f"k must be 1 to {ROWS}, and is {ROWS + 1}"),
    ({"k": True}, "k must be 1 to .* and is True"),
    ({"exclude": [[ROWS]]}, f"exclude: there is no item {ROWS}"),
    ({"exclude": [[-1]]}, "exclude: there is no item -1"),
    ({"exclude": [["a"]]}, "exclude: there is no item 'a'"),
    ({"exclude": [3]}, "exclude must be lists of items, for each of 1 queries"),
    ({"exclude": [[1], [2]]}, "exclude must be lists of items, for each of 1 queries"),
    ({"history": [[1, 2]]}, "'history' must have the shape any x 3, not 1 x 2"),
    ({"user": [1]}, r"the request has \['user'\]"),
]


def test_a_request_that_does_not_fit_is_refused_with_its_reason(served: Served) -> None:
    request = {"history": [[1, 2, 3]], "k": 3, "exclude": [[1]]}
    assert len(served[1].answer_plain(request)["items"][0]) == 3
    for changed, message in BAD_REQUESTS:
        with pytest.raises(ValueError, match=message):
            served[1].answer_plain({"history": [[1, 2, 3]]} | changed)


class ItemModel(ColumnModel):
    """Finds items of the columns' history."""

    def encode(self, batch: dict[str, Any]) -> Tensor:
        """Return queries, (examples, dim)."""
        return self.tables(batch["ids"])["user"]


def test_items_of_columns_are_values_of_their_vocabulary(tmp_path: Path) -> None:
    file = write_clicks(tmp_path)
    data = click_data(file, batch_size=32)
    data.prepare_data()
    data.setup("predict")
    model = ItemModel()
    torch.save(
        {"state_dict": model.state_dict(), type(data).__qualname__: data.state_dict()},
        tmp_path / "items.ckpt",
    )
    write_job(tmp_path / "items.yaml", "tests.unit.serving.test_served_items.ItemModel", file)
    options = ["--format", "torch.export", "--config", str(tmp_path / "items.yaml")]
    options += ["--queries", "encode", "--items", "history", "--vocabulary", "history"]
    out = tmp_path / "served"
    assert main(["export", str(tmp_path / "items.ckpt"), str(out), *options]) == 0

    server = answer.Server(out)
    values = server.encoder.plain["vocabularies"]["history"]
    assert 1 < len(values) < FEATURES["history"]["rows"]
    table = model.tables.embedding_bags["history"]
    rows = [{"user": "u3"}, {"user": "u7", "history": ["i1"]}]
    columns = {name: [row.get(name) for row in rows] for name in FEATURES}
    with torch.no_grad():
        queries = model.encode(data.columns(columns))
    unnamed = [0, *range(1 + len(values), table.num_embeddings)]
    left_out = [values[0], values[2]]
    exclude = torch.tensor([[*unnamed, 1, 3], [*unnamed, -1, -1]])
    scores, numbers = top_k(queries, table, 5, exclude=exclude)
    request = {"rows": rows, "k": 5, "exclude": [left_out, []]}
    answered = server.answer_plain(request)
    assert answered["items"] == [
        [values[row - 1] for row in row_ids] for row_ids in numbers.tolist()
    ]
    torch.testing.assert_close(torch.tensor(answered["scores"]), scores)
    # One row needs no list around it, and has the options beside its columns.
    single = server.answer_plain(rows[0] | {"k": 5, "exclude": [left_out]})
    assert single["items"] == answered["items"][:1]
    with pytest.raises(ValueError, match="exclude: there is no item 'never seen'"):
        server.answer_plain(request | {"exclude": [["never seen"], []]})
    with pytest.raises(ValueError, match=f"k must be 1 to {len(values)}, and is {len(values) + 1}"):
        server.answer_plain(request | {"k": len(values) + 1})


@pytest.mark.parametrize(
    ("top_k_fields", "batch", "message"),
    [
        ({"queries": "encoder"}, None, "NextItem has no method 'encoder'"),
        ({"items": "tem"}, None, "'tem' names 0 tables of tables.item, users"),
        ({"queries": "pair"}, None, "the method returned a tuple"),
        ({"vocabulary": "item"}, None, "the data's columns have no vocabulary 'item'"),
        ({"k": ROWS + 1}, None, f"k={ROWS + 1} of {ROWS} items"),
        ({"queries": "forward"}, {"k": torch.ones(4, DIM)}, "a column is called 'k'"),
        ({"queries": "forward"}, {"x": torch.ones(4, 3)}, r"queries \(4, 3\) of torch.float32"),
    ],
)
def test_an_item_table_that_cannot_be_served_is_named(
    top_k_fields: dict[str, Any], batch: Any, message: str, tmp_path: Path
) -> None:
    class Passed(NextItem):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return next(iter(batch.values())) * 1

    module = NextItem() if batch is None else Passed()
    fields = {"queries": "encode", "items": "item"} | top_k_fields
    with pytest.raises(ConfigError, match=message):
        export_for_serving(module, batch or batch_of(4), tmp_path / "served", top_k=TopK(**fields))
    assert not list(tmp_path.iterdir())


def test_a_folder_without_items_takes_no_k(tmp_path: Path) -> None:
    class Predicts(NextItem):
        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.encode(batch)

    export_for_serving(Predicts(), batch_of(4), tmp_path / "served")
    server = answer.Server(tmp_path / "served")
    for options in ({"k": 3}, {"exclude": [[1]] * 4}):
        with pytest.raises(ValueError, match="answers with no items"):
            server.answer(batch_of(4), **options)
    with pytest.raises(ValueError, match=r"the request has \['k'\]"):
        server.answer_plain({"history": [[1, 2, 3]], "k": 3})
    with pytest.raises(ValueError, match="answers with no items: export it with --queries"):
        answer.add_index(tmp_path / "served", "Flat")


def test_rows_that_stand_for_other_items_and_a_longer_vocabulary_are_refused(
    tmp_path: Path,
) -> None:
    raw = RawRows(mapping={"vocabularies": {"item": ["a"] * ROWS}}, rows=[{}])
    with pytest.raises(ConfigError, match=f"{ROWS} items, in a table of {ROWS} rows"):
        exported(tmp_path / "served", NextItem(), raw=raw, top_k={"vocabulary": "item"})
    module = NextItem()
    module.tables["item"].ids_made_for = torch.zeros(1)  # as tables with dynamic ids have it
    with pytest.raises(ConfigError, match=r"'tables.item' are mapped to rows \(dynamic_ids\)"):
        exported(tmp_path / "served", module)


MEASURE = """
import serve, torch
def anonymous_mib():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["RssAnon"].split()[0]) / 1024
server = serve.Server(".", verify=False)  # it loads what torch.export needs
before = anonymous_mib()
server = serve.Server(".", verify=False)
type(server.items).best_rows.__globals__["MAX_BYTES"] = 2**21
read, most = server.items.read, []
def watched(block):
    most.append(anonymous_mib())
    return read(block)
server.items.read = watched
server.answer({"history": torch.zeros(1, 3, dtype=torch.int64)})
print(len(most), max(most) - before)
"""


@pytest.mark.slow
def test_a_table_is_read_in_blocks_and_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    rows = 1_250_000  # 38 MiB
    exported(tmp_path / "served", NextItem(rows=rows))
    blocks, grown_mib = ask(tmp_path / "served", code=MEASURE)[0].split()
    assert int(blocks) > 30
    assert float(grown_mib) < 15


# -- an index of faiss


def test_an_index_of_all_rows_answers_as_top_k_without_what_is_excluded(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    module = NextItem()
    server = exported(tmp_path / "served", module, top_k={"index": "Flat"})
    assert server.about["top_k"]["index"] == {"factory": "Flat", "recall": 1.0, "queries": 32}
    batch = batch_of(9, seed=9)
    expected = exact(module, batch, 5, exclude=batch["history"])
    answered = server.answer(batch, k=5, exclude=batch["history"].tolist())
    assert torch.equal(answered["items"], expected[1])
    torch.testing.assert_close(answered["scores"], expected[0])
    everything = {"exclude": [[*range(2, ROWS)]], "k": 3}
    short = server.answer_plain({"history": [[1, 2, 3]]} | everything)
    assert sorted(short["items"][0]) == [0, 1]
    assert answer.check(server, tmp_path / "served") == 0


def test_a_served_folder_gets_an_index_and_its_recall_is_what_is_said(
    served: Served, tmp_path: Path
) -> None:
    pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    module = served[0]
    folder = shutil.copytree(served[2], tmp_path / "served")
    items = exact(module, batch_of(32), 10)[1]
    answer.add_index(folder, "HNSW16")  # replaced by the other
    printed = ask(folder, ["--index", "IVF8,Flat nprobe=2"])
    server = answer.Server(folder)
    answered = server.answer(batch_of(32))["items"]
    num_equal = 0
    for row, exact_row in zip(answered.tolist(), items.tolist(), strict=True):
        num_equal += len(set(row) & set(exact_row))
    recall = server.about["top_k"]["index"]["recall"]
    assert recall == pytest.approx(num_equal / items.numel())
    assert 0.3 < recall < 1
    assert printed == [f"finds {recall:.2%} of the exact answers"]
    content = bytearray((folder / "items.faiss").read_bytes())
    content[-9] ^= 1
    (folder / "items.faiss").write_bytes(content)
    with pytest.raises(ValueError, match=r"items\.faiss is damaged"):
        answer.Server(folder)


def test_an_index_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    with pytest.raises(ConfigError, match="index 'IVF9,Quatsch': .*could not parse"):
        exported(tmp_path / "served", NextItem(), top_k={"index": "IVF9,Quatsch"})
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match="not installed: run pip install faiss-cpu"):
        exported(tmp_path / "served", NextItem(), top_k={"index": "Flat"})
    assert not list(tmp_path.iterdir())
