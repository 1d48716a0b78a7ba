"""What load_from_checkpoint has of a large tensor is in the file until it is copied, and a tensor
to everybody."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_distrec.checkpoint.lazy_tensors import MappedTensor, UnreadTensor

VALUES = torch.arange(12.0).reshape(4, 3)


class Stored(MappedTensor):
    """Counts how often it is read in full."""

    num_reads = 0

    def read(self) -> torch.Tensor:
        self.num_reads += 1
        return self.tensor.clone()


def _unread() -> tuple[Any, Stored]:
    stored = Stored(VALUES)
    return UnreadTensor.of_lazy(stored), stored


def test_it_is_copied_into_a_module_without_being_read_in_full() -> None:
    unread, stored = _unread()
    module = nn.Embedding(4, 3)
    module.load_state_dict({"weight": unread})
    assert torch.equal(module.weight, VALUES)
    assert (unread.shape, unread.dtype, unread.device, unread.is_meta) == (
        (4, 3),
        torch.float32,
        torch.device("cpu"),
        0,
    )
    assert stored.num_reads == 0


def test_it_is_read_for_a_module_of_another_type_or_shape() -> None:
    unread, stored = _unread()
    half = nn.Embedding(4, 3, dtype=torch.half)
    half.load_state_dict({"weight": unread})
    assert torch.equal(half.weight, VALUES.half())
    assert stored.num_reads == 1
    with pytest.raises(RuntimeError, match=r"size mismatch .* torch.Size\(\[4, 3\]\)"):
        nn.Embedding(5, 3).load_state_dict({"weight": unread})


USES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda tensor: tensor.sum(),
    "copy": copy.deepcopy,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "numpy": lambda tensor: torch.from_numpy(tensor.numpy()),
    "data": lambda tensor: tensor.data,
    "list": lambda tensor: torch.tensor(tensor.tolist()),
    "sum of two": lambda tensor: torch.add(VALUES, other=tensor),
}


def test_anything_else_finds_its_values() -> None:
    for name, use in USES.items():
        unread, stored = _unread()
        actual = use(unread)
        assert torch.equal(actual, use(VALUES)), name
        assert type(actual) is torch.Tensor, name
        assert stored.num_reads == 1, name


def test_what_is_written_to_it_is_copied() -> None:
    unread, stored = _unread()
    unread.mul_(2)
    unread[0] = 5.0
    module = nn.Embedding(4, 3)
    module.load_state_dict({"weight": unread})
    assert torch.equal(module.weight[1:], 2 * VALUES[1:])
    assert bool((module.weight[0] == 5).all())
    assert stored.num_reads == 1
