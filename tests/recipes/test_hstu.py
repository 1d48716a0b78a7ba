"""HSTU's jagged attention against its formula, place by place, and its batches against SASRec's."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from recipes.hstu.data import JaggedSequenceDataModule
from recipes.hstu.model import BUCKET_WIDTH, HSTU, HSTULayer
from recipes.sasrec.data import SequenceDataModule
from tests.support.movielens_folder import write_movielens_folder

LENGTH = 8


@pytest.fixture
def batches(tmp_path: Path) -> list[dict[str, Tensor]]:
    """The same windows padded, as SASRec reads them, and jagged."""
    folder = str(write_movielens_folder(tmp_path / "made"))
    chosen = []
    for kind in (SequenceDataModule, JaggedSequenceDataModule):
        data = kind(data_dir=folder, length=LENGTH, stride=3)
        data.setup()
        chosen.append(data.train_dataloader().dataset.__getitems__(range(10, 40)))
    return chosen


def _layer_by_hand(layer: HSTULayer, hidden: Tensor, times: Tensor, next_times: Tensor) -> Tensor:
    """hidden: (places, dim) of one sequence; times, next_times: (places,)."""
    size = hidden.shape[1] // layer.num_heads
    gate, values, queries, keys = functional.silu(layer.projection(layer.norm(hidden))).chunk(
        4, dim=1
    )
    rows = []
    for place in range(len(hidden)):
        heads = []
        for head in range(layer.num_heads):
            part, total = slice(head * size, (head + 1) * size), torch.zeros(size)
            for earlier in range(place + 1):
                bucket = int(
                    math.log(max(1, int(next_times[place] - times[earlier]))) / BUCKET_WIDTH
                )
                bias = layer.bias.by_distance[place - earlier] + layer.bias.by_time[bucket]
                weight = functional.silu(queries[place, part] @ keys[earlier, part] + bias) / LENGTH
                total = total + weight * values[earlier, part]
            heads.append(total)
        rows.append(layer.attended_norm(torch.cat(heads)))
    return hidden + layer.output(gate * torch.stack(rows))


def test_jagged_sequences_are_encoded_each_by_itself_as_the_formula_says(
    batches: list[dict[str, Tensor]],
) -> None:
    torch.manual_seed(1)
    _, batch = batches
    model = HSTU(num_items=20, length=LENGTH, dim=8, num_layers=2).eval()
    for layer in model.layers:
        torch.nn.init.normal_(layer.bias.by_distance)
        torch.nn.init.normal_(layer.bias.by_time)
    sizes = batch["length"].tolist()
    assert min(sizes) < LENGTH == max(sizes)
    expected = []
    parts = [batch[name].split(sizes) for name in ("items", "time", "following_time")]
    for items, times, next_times in zip(*parts, strict=True):
        hidden = model.start(model.items(items) + model.positions.weight[: len(items)])
        for layer in model.layers:
            hidden = _layer_by_hand(layer, hidden, times, next_times)
        expected.append(model.end(hidden))
    torch.testing.assert_close(model.encode(batch), torch.cat(expected), atol=1e-5, rtol=1e-4)
    lasts = torch.stack([rows[-1] for rows in expected])
    torch.testing.assert_close(
        model.encode(batch)[model.last_places(batch)], lasts, atol=1e-5, rtol=1e-4
    )


def test_jagged_windows_hold_the_films_of_padded_ones_and_when_they_were_seen(
    batches: list[dict[str, Tensor]],
) -> None:
    padded, jagged = batches
    is_filled = torch.arange(LENGTH) < padded["length"][:, None]
    assert torch.equal(padded["length"], jagged["length"])
    for name in ("items", "following"):
        assert torch.equal(padded[name][is_filled], jagged[name])
        assert not padded[name][~is_filled].any()
    firsts = jagged["length"].cumsum(0)[:-1]
    continues = torch.ones(len(jagged["items"]) - 1, dtype=torch.bool)
    continues[firsts - 1] = False
    assert torch.equal(jagged["following_time"][:-1][continues], jagged["time"][1:][continues])
    assert (jagged["following_time"] >= jagged["time"]).all()
