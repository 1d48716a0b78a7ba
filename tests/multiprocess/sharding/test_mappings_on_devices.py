"""Mappings on a device that this machine lacks: no tensor of theirs is elsewhere, and the host
reads none of them.

Torch's fake tensors have a device and no values: an operation on two devices raises, and so does
one whose result the host must read.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from lightning_distrec._compat.torchrec_modules import MCH_LOOKUPS, mch_state
from lightning_distrec.sharding.mapping.id_mapping import IdMapping
from lightning_distrec.sharding.mapping.mch_mapping import MchMapping
from lightning_distrec.sharding.mapping.spec import MappingSpec, MchSpec, spec_of
from tests.support.mapped_models import BUCKETS, mch
from tests.support.ranks import run_each_on_ranks

DEVICE = torch.device("privateuseone:0")
NUM_IDS = 30
POLICIES = ("none", "lru", "lfu", "ttl", "ttl_lru")


class Guard(torch._C._acc.DeviceGuard):
    """Lets torch take views of tensors on the fake device."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def _on_fake_device(function: Any, *args: Any) -> list[tuple[tuple[int, ...], str]]:
    """Return sizes and devices of the tensors that a function returns. On a rank, since torch keeps
    the guard."""
    torch._C._acc.register_python_privateuseone_device_guard(Guard())
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        patch("lightning_distrec.gpu.is_on_gpu", lambda _: True),
    ):
        return [(tuple(tensor.shape), str(tensor.device)) for tensor in function(*args)]


def _learn(policy: Any) -> list[Tensor]:
    spec = MappingSpec(
        96, BUCKETS, max_probe=9, policy=policy, ttl_hours=1, min_sights=2, num_reserved=1
    )
    mapping, ids = IdMapping(spec, 0, BUCKETS, DEVICE), torch.arange(NUM_IDS, device=DEVICE)
    with pytest.raises(DataDependentOutputException):
        mapping.note_lookup(ids).tolist()
    known = [mapping.note_lookup(ids), mapping.learn([0])]
    new = [mapping.note_lookup(ids), mapping.learn([NUM_IDS])]
    return [*known, *new, mapping.find(ids)]


def _begin(is_there: bool) -> list[Tensor]:
    """Let a mapping on the device load a module's state, there or on the CPU, and note ids up to an
    update."""
    with unset_fake_temporarily():
        module = mch("users", interval=2)
        spec = spec_of(module, "users")
    assert isinstance(spec, MchSpec)
    ids = torch.arange(NUM_IDS, device=DEVICE)
    rows = (0, module.output_size())
    module = module.rebuild_with_output_id_range(rows, list(rows), DEVICE if is_there else None)
    mapping = MchMapping(spec, 0, BUCKETS, DEVICE, module)
    with patch("torch.equal", _equal):  # whose result the host reads
        assert (
            mapping.load({**mch_state(module), MCH_LOOKUPS: SimpleNamespace(read=lambda: 0)}) == ""
        )
    first = [mapping.note_lookup(ids), mapping.learn([])]
    mapping.optimizer_stepped()
    return [*first, mapping.note_lookup(ids), mapping.find(ids)]


def _equal(first: Tensor, second: Tensor) -> bool:
    assert first.device == second.device == DEVICE
    return True


@pytest.fixture(scope="module")
def results() -> Any:
    calls: dict[str, tuple[Any, ...]] = {
        policy: (_on_fake_device, _learn, policy) for policy in POLICIES
    }
    calls |= {f"MCH {is_there}": (_on_fake_device, _begin, is_there) for is_there in (False, True)}
    return run_each_on_ranks(calls, 1)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_ids_get_rows_on_the_device_by_one_number_that_the_host_reads(
    results: Any, policy: str
) -> None:
    num_evicted = 0 if policy == "none" else NUM_IDS
    assert results[policy] == [
        (size, str(DEVICE)) for size in ((1,), (0,), (1,), (num_evicted,), (NUM_IDS,))
    ]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_state_of_mch_on_any_device_is_loaded_to_that_of_the_rows(
    results: Any, is_there: bool
) -> None:
    assert results[f"MCH {is_there}"] == [
        (size, str(DEVICE)) for size in ((0,), (0,), (BUCKETS,), (NUM_IDS,))
    ]
