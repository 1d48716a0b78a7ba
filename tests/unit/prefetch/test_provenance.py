"""Arguments of a lookup are found in the batch, and built again from other batches, or are refused
with a reason."""

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec.prefetch.batch_objects import BatchObjects
from lightning_distrec.prefetch.recorded_calls import RecordedCall
from lightning_distrec.prefetch.sources import (
    BatchRoots,
    ConstantSource,
    LookupCall,
    are_unwritten,
    is_same_input,
    versions,
)
from lightning_distrec.recorded_step import LateWeights

Pair = namedtuple("Pair", "left right")
Expression = Callable[[Any], Any]


@dataclasses.dataclass
class Example:
    """A batch as a dataclass."""

    ids: Tensor
    extras: dict[str, Any]


@dataclasses.dataclass
class Slotted:
    """The same with slots."""

    __slots__ = ("ids",)
    ids: Tensor


class Plain:
    """A batch as an ordinary object."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self.inner = SimpleNamespace(ids=ids + 1)


def _ids(size: int, seed: int, columns: int = 0) -> Tensor:
    shape = (size, columns) if columns else (size,)
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


def _lengths(size: int, seed: int) -> Tensor:
    """Lengths of two features that are never all alike where there are two."""
    drawn = torch.randint(0, 3, (2 * size,), generator=torch.Generator().manual_seed(seed))
    if len(drawn) > 1:
        drawn[0], drawn[1] = 0, 2
    return drawn


def _batch(size: int, seed: int) -> dict[str, Any]:
    """Return a batch with something of everything."""
    lengths = _lengths(size, seed)
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    values = _ids(int(ends[-1]), seed + 1)
    weights = torch.rand(len(values), generator=torch.Generator().manual_seed(seed + 2)) + 0.5
    return {
        "x": _ids(size, seed + 3, 6),
        "y": _ids(size, seed + 4),
        "cube": torch.randint(
            0, 50, (size, 3, 4), generator=torch.Generator().manual_seed(seed + 5)
        ),
        "by_feature": _ids(3, seed + 6, size) if size else torch.empty(3, 0, dtype=torch.long),
        "kjt": KeyedJaggedTensor(["a", "b"], values.clone(), lengths=lengths.clone()),
        "nested": [
            {
                "deep": (
                    _ids(size, seed + 7),
                    Pair(_ids(size, seed + 8), Plain(_ids(size, seed + 9))),
                )
            }
        ],
        "example": Example(_ids(size, seed + 10), {"extra": _ids(size, seed + 11)}),
        "slotted": Slotted(_ids(size, seed + 13)),
        "values": values,
        "lengths": lengths,
        "offsets": ends,
        "weights": weights,
        "flat": _ids(3 * size, seed + 12),
    }


def _source(batch: Any, argument: Any, ids: Any = None) -> Any:
    return BatchObjects(BatchRoots(batch)).source_of(argument, ids)


def _same(first: Any, other: Any) -> bool:
    if isinstance(first, KeyedJaggedTensor):
        weights = first.weights_or_none(), other.weights_or_none()
        return (
            first.keys() == other.keys()
            and torch.equal(first.values(), other.values())
            and torch.equal(first.lengths(), other.lengths())
            and ((weights[0] is None) == (weights[1] is None))
            and (weights[0] is None or torch.equal(*weights))
        )
    if isinstance(first, Tensor):
        return first.dtype == other.dtype and torch.equal(first, other)
    return bool(first == other)


def _jagged(batch: dict[str, Any], **parts: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], batch["values"], **parts)


def _regular(batch: dict[str, Any], **parts: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], batch["flat"], **parts)


FOUND: dict[str, Expression] = {
    "dict": lambda b: b["y"],
    "list, dict and tuple": lambda b: b["nested"][0]["deep"][0],
    "namedtuple": lambda b: b["nested"][0]["deep"][1].left,
    "attribute": lambda b: b["nested"][0]["deep"][1].right.ids,
    "dataclass": lambda b: b["example"].ids,
    "dataclass with slots": lambda b: b["slotted"].ids,
    "whole kjt": lambda b: b["kjt"],
    "values of a kjt": lambda b: b["kjt"].values(),
    "kjt by offsets": lambda b: _jagged(b, offsets=b["offsets"]),
    "kjt by lengths, synced": lambda b: KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], b["values"], b["lengths"]
    ),
    "kjt by offsets, synced": lambda b: KeyedJaggedTensor.from_offsets_sync(
        ["a", "b"], b["values"], b["offsets"]
    ),
    "kjt with weights": lambda b: _jagged(b, lengths=b["lengths"], weights=b["weights"]),
    "kjt of values.flatten()": lambda b: KeyedJaggedTensor(
        ["a", "b"], b["values"].flatten(), lengths=b["lengths"]
    ),
    "kjt of a matrix": lambda b: KeyedJaggedTensor(
        ["a"], b["x"].view(-1), lengths=torch.full((len(b["x"]),), 6, dtype=torch.int32)
    ),
    "lengths of threes": lambda b: _regular(
        b, lengths=torch.full((len(b["flat"]) // 3,), 3, dtype=torch.int32)
    ),
    "offsets": lambda b: _regular(b, offsets=torch.arange(len(b["flat"]) + 1)),
    "column": lambda b: b["x"][:, 2],
    "range of columns": lambda b: b["x"][:, 1:4],
    "last columns": lambda b: b["x"][:, 3:],
    "plane of the last dim": lambda b: b["cube"][:, :, 2],
    "row of features": lambda b: b["by_feature"][1],
    "view as matrix": lambda b: b["cube"].view(-1, 12),
    "rows split": lambda b: b["x"].view(-1, 3),
    "unsqueezed": lambda b: b["y"].unsqueeze(1),
    "alias": lambda b: b["x"].view_as(b["x"]),
    "column of an alias": lambda b: b["x"].detach()[:, 4],
    "None": lambda b: None,
    "number": lambda b: 3,
}
"""What a step may call a table with, and is found."""


@pytest.mark.parametrize("name", FOUND)
def test_what_is_part_of_the_batch_is_found_in_batches_of_any_size(name: str) -> None:
    batch, another = _batch(5, 10), _batch(5, 20)
    source = _source(batch, FOUND[name](batch))
    assert not isinstance(source, str), source
    found = source.get(BatchRoots(batch))
    assert _same(found, FOUND[name](batch))
    assert is_same_input(FOUND[name](another), found) == isinstance(source, ConstantSource)
    for size in (3, 1, 0, 8):
        if size == 0 and name == "kjt by offsets, synced":
            continue  # torchrec cannot synchronize an empty KeyedJaggedTensor of offsets
        other = _batch(size, 20)
        actual, expected = source.get(BatchRoots(other)), FOUND[name](other)
        assert _same(actual, expected)
        assert is_same_input(expected, actual)


def _written(write: Callable[[dict[str, Any]], Any], read: Expression) -> Expression:
    def expression(batch: dict[str, Any]) -> Any:
        write(batch)
        return read(batch)

    return expression


REFUSED: dict[str, tuple[Expression, str]] = {
    "cat": (
        lambda b: torch.cat([b["y"], b["example"].ids]),
        "shape (10,) that is no part of the batch",
    ),
    "transposed and copied": (lambda b: b["x"].t().reshape(-1), "no part of the batch"),
    "every second column": (lambda b: b["x"][:, ::2], "no part of the batch"),
    "first rows": (lambda b: b["x"][:2], "no part of the batch"),
    "bits as another type": (lambda b: b["y"].view(torch.float64), "no part of the batch"),
    "kjt of computed lengths": (
        lambda b: _jagged(b, lengths=b["lengths"].clone()),
        "lengths of a KeyedJaggedTensor",
    ),
    "kjt with unequal batch sizes": (
        lambda b: KeyedJaggedTensor(
            ["a", "b"], b["values"], lengths=b["lengths"], stride_per_key_per_rank=[[4], [6]]
        ),
        "unequal batch sizes",
    ),
    "part of a kjt": (lambda b: b["kjt"].split([1, 1])[1], "no part of the batch"),
    "another object": (lambda b: SimpleNamespace(ids=b["y"]), "a SimpleNamespace that is no part"),
    "written ids": (
        _written(lambda b: b["y"].add_(1), lambda b: b["y"]),
        "batch['y'] is changed in place",
    ),
    "written ids of a column": (
        _written(lambda b: b["x"].add_(1), lambda b: b["x"][:, 1]),
        "no part of the batch",
    ),
    "written kjt": (
        _written(lambda b: b["kjt"].values().remainder_(3), lambda b: b["kjt"]),
        "batch['kjt'] is changed in place",
    ),
    "replaced": (
        _written(lambda b: b.update(y=b["y"] + 1), lambda b: b["y"]),
        "no part of the batch",
    ),
}
"""What is not found, and what is said of it."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_computed_in_the_step_is_refused_with_the_reason(name: str) -> None:
    expression, reason = REFUSED[name]
    batch = _batch(5, 10)
    objects = BatchObjects(BatchRoots(batch))  # before the step, which may write to the batch
    source = objects.source_of(expression(batch))
    assert reason in source, source


def test_weights_that_the_step_computes_come_late() -> None:
    batch, other = _batch(5, 10), _batch(8, 20)
    features = _jagged(batch, lengths=batch["lengths"], weights=batch["weights"] * 2)
    recorded = RecordedCall("bags", (features,), BatchObjects(BatchRoots(batch)))
    assert recorded.recording is not None, recorded.reason
    (actual,) = recorded.recording.get(BatchRoots(other))
    assert type(actual.weights()) is LateWeights
    called = _jagged(other, lengths=other["lengths"], weights=other["weights"] * 3)
    assert is_same_input(called, actual)
    assert not is_same_input(_jagged(other, lengths=other["lengths"]), actual)
    changed = other | {"values": other["values"] + 1}
    assert not is_same_input(
        _jagged(changed, lengths=other["lengths"], weights=other["weights"]), actual
    )


def test_ids_that_look_like_lengths_or_offsets_are_refused_with_the_reason() -> None:
    for ids in (torch.arange(6), torch.ones(6, dtype=torch.long), torch.full((6,), 3)):
        recorded = RecordedCall("positions", (ids,), BatchObjects(BatchRoots(_batch(5, 10))))
        assert "no part of the batch" in recorded.reason
        assert recorded.recording is None


@pytest.mark.parametrize("offsets", ["arange", "of the batch"])
@pytest.mark.parametrize("size", [3, 1, 8])
def test_a_call_with_several_arguments_is_built_from_another_batch(offsets: str, size: int) -> None:
    def arguments(batch: dict[str, Any]) -> tuple[Any, ...]:
        if offsets == "arange":
            return batch["flat"], torch.arange(0, len(batch["flat"]), 3), None
        return batch["values"], batch["offsets"], batch["weights"]

    batch, other = _batch(5, 10), _batch(size, 20)
    recorded = RecordedCall("bags", arguments(batch), BatchObjects(BatchRoots(batch)))
    assert recorded.reason == ""
    assert recorded.recording is not None
    assert isinstance(recorded.recording.call, LookupCall)
    actual = recorded.recording.get(BatchRoots(other))
    assert len(actual) == 3
    for argument, expected in zip(actual, arguments(other), strict=True):
        assert is_same_input(expected, argument)
        assert (argument is None) == (expected is None)


def test_writes_in_place_after_the_stamp_are_noticed() -> None:
    for write in (
        lambda b: b["kjt"].values().add_(1),
        lambda b: b["kjt"].lengths().zero_(),
        lambda b: b["x"][:, 5].zero_(),
        lambda b: b["x"].detach().zero_(),
        lambda b: b["weights"].mul_(2),
    ):
        batch = _batch(5, 10)
        stamped = versions(
            batch["kjt"],
            batch["x"][:, 1],
            None,
            3,
            _jagged(batch, lengths=batch["lengths"], weights=batch["weights"]),
        )
        assert are_unwritten(stamped)
        _ = batch["kjt"].offsets(), batch["x"] + 1, batch["kjt"]["a"].values()
        assert are_unwritten(stamped)
        write(batch)
        assert not are_unwritten(stamped)


def test_writes_in_place_in_inference_mode_are_noticed() -> None:
    """Evaluation runs in inference mode on GPUs, where batches that are collated by this process
    have no versions."""
    with torch.inference_mode():
        batch = {"ids": _ids(5, 1)}
        objects = BatchObjects(BatchRoots(batch))
        stamped = versions(batch["ids"])
        batch["ids"].remainder_(7)
        noticed = isinstance(objects.source_of(batch["ids"]), str) and not are_unwritten(stamped)
    # A first step that cannot tell must not say that the ids are part of the batch as it was
    # fetched.
    assert noticed


def test_what_is_prefetched_is_distinguished_from_what_is_not() -> None:
    batch, other = _batch(5, 10), _batch(5, 20)
    features = _jagged(batch, lengths=batch["lengths"], weights=batch["weights"])
    assert is_same_input(
        _jagged(batch, lengths=batch["lengths"], weights=batch["weights"]), features
    )
    assert is_same_input(
        _jagged(batch, lengths=batch["lengths"], weights=batch["weights"].clone()), features
    )
    wrong: list[tuple[Any, Any]] = [
        (
            KeyedJaggedTensor(["b", "a"], batch["values"], batch["weights"], batch["lengths"]),
            features,
        ),
        (_jagged(batch, lengths=batch["lengths"]), features),
        (features, _jagged(batch, lengths=batch["lengths"])),
        (_jagged(batch, lengths=batch["lengths"], weights=batch["weights"] + 1), features),
        (_jagged(batch, lengths=batch["lengths"].flip(0), weights=batch["weights"]), features),
        (
            KeyedJaggedTensor(["a", "b"], batch["values"] + 1, batch["weights"], batch["lengths"]),
            features,
        ),
        (other["kjt"], batch["kjt"]),
        (batch["values"], features),
        (batch["x"][:, 1], batch["x"][:, 2]),
        (batch["y"], batch["y"].unsqueeze(1)),
        (batch["y"].int(), batch["y"]),
        (batch["y"], None),
        (None, batch["y"]),
        (1, True),
        (3, 4),
        ("a", "b"),
    ]
    for argument, foreseen in wrong:
        assert not is_same_input(argument, foreseen)
    assert is_same_input(3, 3)
    assert is_same_input(None, None)
