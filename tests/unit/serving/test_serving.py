"""A folder for serving answers without this package and torchrec, as the trained module does."""

import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)

from lightning_distrec.checkpoint.lazy_tensors import MappedTensor
from lightning_distrec.cli.main import main
from lightning_distrec.errors import CheckpointError, ConfigError
from lightning_distrec.serving import answer
from lightning_distrec.serving.artifact import export_for_serving
from lightning_distrec.serving.program import (
    QuantizedTensor,
    dequantized,
    quantized,
    tensors_of,
    with_tensors,
)
from tests.support.console import finished
from tests.support.served_folder import ask


class Recommender(pl.LightningModule):
    """Pooled and unpooled collections, plain tables, one of them read as a whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        bags = [
            EmbeddingBagConfig(
                name="user", num_embeddings=90, embedding_dim=8, feature_names=["user", "friend"]
            ),
            EmbeddingBagConfig(
                name="tag",
                num_embeddings=40,
                embedding_dim=6,
                feature_names=["tag"],
                pooling=PoolingType.MEAN,
            ),
        ]
        seen = EmbeddingConfig(
            name="item", num_embeddings=70, embedding_dim=8, feature_names=["seen"]
        )
        self.bags, self.seen = (
            EmbeddingBagCollection(tables=bags),
            EmbeddingCollection(tables=[seen]),
        )
        self.city, self.words = nn.Embedding(30, 8), nn.EmbeddingBag(50, 8, mode="sum")
        self.top = nn.Linear(22 + 8 + 8 + 2, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return a vector per example."""
        seen = self.seen(batch["features"])["seen"]
        places = torch.arange(seen.values().shape[0])
        example = torch.searchsorted(seen.offsets()[1:].contiguous(), places, right=True)
        summed = torch.zeros(batch["dense"].shape[0], 8).index_add(0, example, seen.values())
        parts = [
            self.bags(batch["features"]).values(),
            summed,
            self.words(batch["words"]),
            batch["dense"],
        ]
        return self.dropout(self.top(torch.cat(parts, 1)))

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Return a score for each city, and the best."""
        scores = self(batch) @ self.city.weight.T
        return {"scores": scores, "best": scores.argmax(1)}


def batch_of(size: int, seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4 * size,), generator=draw)
    return {
        "features": KeyedJaggedTensor(
            keys=["user", "friend", "tag", "seen"],
            values=torch.randint(0, 40, (int(lengths.sum()),), generator=draw),
            lengths=lengths,
        ),
        "words": torch.randint(0, 50, (size, 3), generator=draw),
        "dense": torch.randn(size, 2, generator=draw),
        "label": torch.zeros(size),
    }


def answers(module: pl.LightningModule, batch: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        return module.eval().predict_step(batch, 0)


def test_a_moved_folder_answers_as_the_module_for_any_batch_size_and_refuses_bad_inputs(
    tmp_path: Path,
) -> None:
    module = Recommender()
    module.train()
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    served = export_for_serving(
        module, batch_of(64), tmp_path / "made", first_request=batch_of(1, seed=3)
    )
    assert served.largest_difference == 0
    assert (served.integers, served.other_integers) == (64, 0)
    assert not served.only_this_size
    assert served.num_tables == 5
    assert module.training
    assert all(torch.equal(initial[name], value) for name, value in module.state_dict().items())
    folder = tmp_path / "elsewhere"
    shutil.move(tmp_path / "made", folder)
    assert (folder / "program.pt2").stat().st_size < (
        folder / "tables.safetensors"
    ).stat().st_size * 20
    about = json.loads((folder / "serving.json").read_text())
    assert about["inputs"].keys() == {"features.values", "features.lengths", "words", "dense"}, (
        "labels are not asked for"
    )
    assert about["inputs"]["words"] == {"dtype": "int64", "shape": [None, 3], "rows": [64, 1]}
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {
        folder.stat().st_mode & 0o666
    }
    empty = batch_of(2, seed=4)
    none = torch.zeros(0, dtype=torch.int64)
    empty["features"] = KeyedJaggedTensor(
        empty["features"].keys(), none, lengths=torch.zeros(8).long()
    )
    batches = [batch_of(1, seed=3), batch_of(64), batch_of(200, seed=2), empty]
    expected = [answers(module, batch) for batch in batches]
    for number, batch in enumerate(batches):
        save_file(
            {name: tensors_of(batch)[name] for name in about["inputs"]},
            folder / f"{number}.safetensors",
        )
    code = (
        "import torch, serve\nfrom safetensors.torch import load_file\nserver = serve.Server('.')\n"
        "torch.save([server.answer(load_file(f'{number}.safetensors')) for number in range(4)], "
        "'found.pt')"
    )
    printed = ask(folder, [], ["--check"], code=code)
    for result, want in zip(torch.load(folder / "found.pt"), expected, strict=True):
        # In the process that exports they are equal; other processes may add in another order, by
        # their threads.
        assert torch.allclose(result["scores"], want["scores"], rtol=1e-6, atol=1e-6)
        assert torch.equal(result["best"], want["best"])
    first = json.loads(printed[0])
    assert first["best"] == expected[0]["best"].tolist()
    assert torch.tensor(first["scores"]).allclose(expected[0]["scores"], atol=1e-6)
    assert printed[1].startswith("largest difference from the trained module: ")
    _check_bad_inputs_and_damage(folder)


@pytest.mark.slow
def test_quantized_answers_are_those_of_the_module_with_rounded_rows_and_bad_inputs_are_refused(
    tmp_path: Path,
) -> None:
    bits = 4  # of the tables whose width is a multiple of 4; 8 of the others
    module, batch = Recommender(), batch_of(64)
    expected = answers(module, batch)
    # first_request: by it the folder knows which inputs have a row for each example.
    served = export_for_serving(module, batch, tmp_path / "q", bits=bits, first_request=batch_of(1))
    rounded = Recommender()
    for name, weight in module.state_dict().items():
        if "top" not in name:
            table_values = 8 if weight.shape[1] % 4 else bits
            rows = dequantized(quantized(weight, table_values), weight.shape[1], table_values)
            rounded.get_parameter(name).data.copy_(rows)
            steps = (weight.amax(1) - weight.amin(1)) / (2**table_values - 1)
            assert (
                (rows - weight).abs().amax(1) <= 0.55 * steps + 2e-3 * weight.abs().amax(1)
            ).all()
    actual = answers(rounded, batch)
    stored = load_file(tmp_path / "q" / "tables.safetensors")
    assert stored["city.rows"].dtype == torch.uint8
    assert served.table_bytes < served.float_bytes / 2.5
    answered = answer.Server(tmp_path / "q").answer({**tensors_of(batch)})
    assert torch.allclose(answered["scores"], actual["scores"], atol=1e-5)
    difference = (answered["scores"] - expected["scores"]).abs().max().item()
    assert 0 < difference <= served.largest_difference
    assert not list((tmp_path / "q").glob(".*"))
    _check_bad_inputs_and_damage(tmp_path / "q")


def test_rows_are_quantized_in_blocks_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.randn(101, 8)
    whole = QuantizedTensor(MappedTensor(table), 8).read()
    monkeypatch.setattr("lightning_distrec.chunks.BLOCK_BYTES", 100)
    assert torch.equal(QuantizedTensor(MappedTensor(table), 8).read(), whole)
    assert torch.equal(whole, quantized(table, 8))


def test_what_cannot_be_served_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    class Branches(Recommender):
        def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            return self(batch) if bool(batch["dense"].sum() > 0) else self(batch) * 2

    class Renormed(Recommender):
        def __init__(self) -> None:
            super().__init__()
            self.city = nn.Embedding(30, 8, max_norm=1.0)

    with pytest.raises(ConfigError, match="torch.export cannot follow predict_step of Branches"):
        export_for_serving(Branches(), batch_of(8), tmp_path / "out")
    with pytest.raises(ConfigError, match="'city' has a max_norm"):
        export_for_serving(Renormed(), batch_of(8), tmp_path / "out")
    state = {
        name: value for name, value in Recommender().state_dict().items() if name != "top.bias"
    }
    with pytest.raises(CheckpointError, match="lacks 'top.bias'"):
        export_for_serving(Recommender(), batch_of(8), tmp_path / "out", state=state)
    (tmp_path / "taken").mkdir()
    for overwrite, reason in ((False, "exists already"), (True, "is no folder that export wrote")):
        with pytest.raises(CheckpointError, match=reason):
            export_for_serving(Recommender(), batch_of(8), tmp_path / "taken", overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


REQUEST: dict[str, Any] = {
    "features.values": [1, 0],
    "features.lengths": [1, 0, 1, 0],
    "words": [[1, 2, 3]],
    "dense": [[0.5, 1]],
}
NO_ROW = "an id has no row in its table of [0-9]+ rows; there are .*"
BAD_REQUESTS: list[tuple[str, Any, str]] = [
    ("words", [[1.7, 2, 3]], "'words' must be lists of int64, and has 1.7"),
    ("words", [[True, 2, 3]], "'words' must be lists of int64, and has True"),
    ("dense", [["a", 2.0]], "'dense' must be lists of float32, and has 'a'"),
    ("dense", [[1.0, 2.0]] * 2, "as many examples as each other, and .*1 in 'words'.*2 in 'dense'"),
    ("features.lengths", [1, 0, 1, 0, 0], "5 in 'features.lengths', 1 in 'wor"),
    ("words", [1, 2, 3], "'words' must have the shape any x 3, not 3"),
    ("words", [[1, 2, 3, 4]], "'words' must have the shape any x 3, not 1 x 4"),
    ("words", [[-1, 2, 3]], f"{NO_ROW}-1 to 3 in 'words'"),
    ("words", [[50, 2, 3]], f"{NO_ROW}2 to 50 in 'words'"),
    ("features.values", [-1, 0], f"{NO_ROW}-1 to 0 in 'features.values'"),
    ("features.lengths", [-1, 3, 0, 0], "'features.lengths' has the length -1"),
    ("features.lengths", [1, 0, 0, 0], "'features.lengths' sum up to 1, and 'features.values' has 2"),
    ("features.lengths", [2**62] * 4, "'features.lengths' sum up to 18446744073709551616"),
    ("dense", [[10**400, 1]], "'dense' must be lists of float32 in equal lengths: int too large"),
    ("features.lengths", [1, 0, 1], "the inputs do not fit each other|for as many examples"),
    ("words", [[1, 2, 3], [1]], "'words' must be lists of int64 in equal lengths"),
]  # fmt: skip


def _check_bad_inputs_and_damage(folder: Path) -> None:
    server, request = answer.Server(folder), REQUEST
    assert len(server.answer_plain(request)["scores"]) == 1
    not_finite = server.answer_plain(request | {"dense": [[math.nan, 1]]})
    assert set(not_finite["scores"][0]) == {None}
    for name, value, message in BAD_REQUESTS:
        with pytest.raises(ValueError, match=message):
            server.answer_plain({**request, name: value})
    tensors = {name: torch.tensor(value) for name, value in request.items()}
    with pytest.raises(ValueError, match="'words' must be a tensor of int64, not torch.float32"):
        server.answer({**tensors, "words": tensors["words"].float()})
    tables = folder / "tables.safetensors"
    content = bytearray(tables.read_bytes())
    content[-9] ^= 1
    tables.write_bytes(content)
    with pytest.raises(
        ValueError, match="tables.safetensors is damaged: it does not match its checksum"
    ):
        answer.Server(folder)
    answer.Server(folder, verify=False)


@pytest.mark.slow
def test_a_size_that_the_step_fixes_is_told(tmp_path: Path) -> None:
    class Fixed(Recommender):
        def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            return self(batch) + torch.arange(len(batch["dense"]))[:, None]

    served = export_for_serving(Fixed(), batch_of(8), tmp_path / "out", first_request=batch_of(1))
    assert served.only_this_size
    assert len(json.loads(ask(tmp_path / "out", [])[0])) == 8


@pytest.mark.slow
def test_operators_of_fbgemm_are_named_as_needed(tmp_path: Path) -> None:
    class Padded(Recommender):
        def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            return self.seen(batch["features"])["seen"].to_padded_dense(4)

    served = export_for_serving(Padded(), batch_of(8), tmp_path / "out", first_request=batch_of(1))
    assert served.needs == ["fbgemm_gpu"]
    done = finished([sys.executable, "serve.py", "--check"], tmp_path / "out")
    assert done.stdout.startswith("largest difference from the trained module: 0 "), done.stderr


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Batch:
    """A container of the user's."""

    dense: Tensor
    name: str = "as it is"


def test_tensors_of_any_container_are_named_and_replaced() -> None:
    jagged = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]), weights=torch.ones(3))
    keyed = KeyedTensor(keys=["a"], length_per_key=[2], values=torch.ones(2, 2))
    batch = Pair([Batch(torch.ones(2)), 7], {"jagged": jagged, "keyed": keyed, "none": None})
    actual = tensors_of(batch)
    names = [
        "left.0.dense",
        "right.jagged.values",
        "right.jagged.lengths",
        "right.jagged.weights",
        "right.keyed.values",
    ]
    assert list(actual) == names
    other = with_tensors(
        batch, {name: tensor * 3 for name, tensor in actual.items() if "lengths" not in name}
    )
    assert type(other) is Pair
    assert other.left[0] == Batch(other.left[0].dense)
    assert other.left[0].dense.tolist() == [3, 3]
    assert other.left[1] == 7
    assert other.right["jagged"].weights().tolist() == [3, 3, 3]
    assert other.right["jagged"].lengths().tolist() == [1, 2]
    assert other.right["keyed"]["a"].tolist() == [[3, 3], [3, 3]]
    assert list(tensors_of(torch.ones(2))) == ["input"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--format", "torch.export"], "name the YAML"),
        (["--bits", "4"], "--bits is for --format torch.export and quantized"),
        (["--index", "Flat"], "--index is for --format torch.export and quantized"),
        (["--format", "safetensors"], "is not named"),
        (
            ["--format", "torch.export", "--bits", "8", "--config", "x.yaml"],
            "--bits is for --format quantized",
        ),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "a.ckpt", "out", *arguments]) != 0
    assert reason in capsys.readouterr().err
