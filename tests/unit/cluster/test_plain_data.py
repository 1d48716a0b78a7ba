"""What ranks send each other comes back as it was, and reading it runs no code."""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_distrec.cluster.plain_data import from_bytes, to_bytes
from lightning_distrec.sharding.planning.table_options import TableOptions

KEYS = st.one_of(
    st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.text(), st.integers())
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(KEYS, max_size=3),
        st.sets(KEYS, max_size=3),
    ),
    max_leaves=20,
)


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _types(item) for key, item in value.items()}
    return [_types(item) for item in value] if isinstance(value, list | tuple) else type(value)


@given(VALUES)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = from_bytes(to_bytes(value))
    assert back == value
    assert _types(back) == _types(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.randn(3, 2).T,
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.randn(5, dtype=torch.bfloat16),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
)
def test_tensors_come_back_bitwise(tensor: torch.Tensor) -> None:
    back = from_bytes(to_bytes({"rows": [tensor]}))["rows"][0]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_what_the_house_sends_comes_back_too() -> None:
    options = TableOptions(sharding_types=["row_wise"])
    value = (torch.float16, torch.device("cpu"), options, float("inf"), torch.Size([2, 3]))
    assert from_bytes(to_bytes(value)) == (*value[:4], (2, 3))
    array = from_bytes(to_bytes(np.arange(4.0)))
    assert array.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert from_bytes(to_bytes((np.int64(3), Path("a")))) == (3, "a")


@dataclass
class _Stranger:
    path: str


@pytest.mark.parametrize(
    "value",
    [object(), _Stranger("x"), print, lambda: None, 1j],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_sent_raises_before_anything_is_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        to_bytes([value])


class _Runs:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize(
    "crafted",
    [
        {
            "type": "dataclass",
            "class": ["subprocess", "Popen"],
            "fields": {"args": ["touch", "ran"]},
        },
        {
            "type": "dataclass",
            "class": ["lightning_distrec.cluster.plain_data", "Path"],
            "fields": {},
        },
        {
            "type": "dataclass",
            "class": ["lightning_distrec.cluster.slurm", "requeue"],
            "fields": {},
        },
        {
            "type": "dataclass",
            "class": ["lightning_distrec.cluster.slurm", "subprocess.Popen"],
            "fields": {},
        },
        {
            "type": "dataclass",
            "class": ["lightning_distrec.strategies", "TorchRecShardedStrategy"],
            "fields": {},
        },
        {"type": "enum", "class": ["signal", "Signals"], "name": "SIGKILL"},
        {"type": "dtype", "name": "hub"},
        {"type": "dtype", "name": "load"},
        {
            "type": "tensor",
            "dtype": "float32",
            "shape": [2**40],
            "values": {"type": "bytes", "base64": ""},
        },
        {
            "type": "tensor",
            "dtype": "int64",
            "shape": [2],
            "values": {"type": "bytes", "base64": "AA=="},
        },
        {
            "type": "array",
            "dtype": "O",
            "shape": [1],
            "values": {"type": "bytes", "base64": "AAAAAAAAAAA="},
        },
        {"type": "reduce"},
        {},
    ],
    ids=lambda crafted: str(crafted.get("class", crafted.get("type")))[:60],
)
def test_crafted_values_are_refused(crafted: Any) -> None:
    with pytest.raises(ValueError, match="."):
        from_bytes(json.dumps(crafted).encode())


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    payload = pickle.dumps(_Runs(tmp_path / "ran"))
    with pytest.raises(ValueError, match="."):
        from_bytes(payload)
    assert not (tmp_path / "ran").exists()
    pickle.loads(payload)
    assert (tmp_path / "ran").exists(), "the payload works where pickles are read"
