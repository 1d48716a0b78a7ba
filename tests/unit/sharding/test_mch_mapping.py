"""TorchRec's MCHManagedCollisionModule by buckets: when ids get rows, and what a state that does
not fit says."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_distrec._compat.torchrec_modules import MCH_IDS, MCH_ROWS, MCH_SEGMENTS
from lightning_distrec.chunks import ChunkedTensor
from lightning_distrec.errors import IdsError
from lightning_distrec.sharding.mapping.mch_mapping import MchMapping
from lightning_distrec.sharding.mapping.spec import ANY_ID, MchSpec, spec_of
from tests.support.host_cuda.following import followed_device
from tests.support.mapped_models import BUCKETS, ROWS, learn, mch

CPU = torch.device("cpu")


def _mapping(
    first_bucket: int = 0, num_buckets: int = BUCKETS, device: torch.device = CPU, **options: Any
) -> MchMapping:
    module = mch("users", **options)
    spec = spec_of(module, "users")
    assert isinstance(spec, MchSpec)
    return MchMapping(spec, first_bucket, num_buckets, device, module)


def _full(mapping: MchMapping) -> dict[str, Tensor]:
    return {
        key: value.chunks[0].tensor if isinstance(value, ChunkedTensor) else value
        for key, value in mapping.state().items()
    }


def _bucket_ids(bucket: int, *numbers: int) -> Tensor:
    return torch.tensor(numbers) * BUCKETS + bucket


def test_ids_get_rows_once_in_an_interval_and_share_the_last_of_their_bucket_until_then() -> None:
    mapping, ids = _mapping(interval=2), _bucket_ids(1, 10, 20)
    assert learn(mapping, ids).numel() == 0
    assert mapping.find(ids).tolist() == [7, 7]
    mapping.optimizer_stepped()
    learn(mapping, ids[:1])
    rows = mapping.find(ids).tolist()
    assert len(set(rows) & {4, 5, 6}) == 2
    assert (mapping.num_taken, mapping.counts.looked_up, mapping.counts.shared) == (2, 3, 2)


def test_rows_that_wait_for_the_optimizer_are_not_taken() -> None:
    mapping = _mapping(interval=1, policy="lru")
    learn(mapping, _bucket_ids(1, 1, 2, 3))
    rows = mapping.find(_bucket_ids(1, 1, 2, 3))
    assert learn(mapping, _bucket_ids(1, 4)).numel() == 0
    torch.testing.assert_close(mapping.find(_bucket_ids(1, 1, 2, 3)), rows)
    mapping.optimizer_stepped()
    evicted = learn(mapping, _bucket_ids(1, 5)).tolist()
    assert sorted(mapping.find(_bucket_ids(1, 4, 5)).tolist()) == sorted(evicted)
    (remaining,) = set(rows.tolist()) - set(evicted)
    assert sorted(mapping.find(_bucket_ids(1, 1, 2, 3)).tolist()) == [remaining, 7, 7]


class _Searches(TorchDispatchMode):
    """Counts the searches among all ids of a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        is_search = function is torch.ops.aten.searchsorted.Tensor
        self.number += is_search and args[0].numel() == ROWS["users"]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("buckets", [1, BUCKETS])
def test_a_lookup_in_training_searches_once_for_what_another_search_finds(buckets: int) -> None:
    mapping = _mapping(interval=3, policy="lru", buckets=buckets, num_buckets=buckets)
    before = _full(mapping)
    draw = torch.Generator().manual_seed(0)
    for _ in range(12):
        ids = torch.randint(0, 60, (40,), generator=draw)
        with _Searches() as searches:
            learn(mapping, ids)
            rows = mapping.find(ids)
        assert searches.number == 1
        assert torch.equal(rows, mapping.find(ids.clone()))
        mapping.optimizer_stepped()
    assert mapping.counts.evicted > 5
    learn(mapping, ids)
    assert mapping.load(before) == ""
    last_rows = mapping.spec.bucket_rows - 1
    assert set((mapping.find(ids) % mapping.spec.bucket_rows).tolist()) == {last_rows}, (
        "the rows from before the state was loaded"
    )


def test_a_state_loads_in_parts_and_one_of_other_buckets_is_refused() -> None:
    whole, ids = _mapping(interval=1), torch.arange(100)
    learn(whole, ids)
    state, full = whole.state(), _full(whole)
    order = torch.randperm(ROWS["users"])
    mixed = {
        key: value[order] if len(value) == ROWS["users"] else value for key, value in full.items()
    }
    for source in (full, mixed):
        part = _mapping(2, 2)
        assert part.load(source) == ""
        own_values = ids[torch.isin(ids % BUCKETS, torch.tensor([2, 3]))]
        torch.testing.assert_close(part.find(own_values) + part.first_row, whole.find(own_values))
    assert "outside of the bucket that they have with buckets=3" in _mapping(0, 3, buckets=3).load(
        full
    )
    assert "maps ids to 48 rows, but there are (24,)" in _mapping(scale=2).load(full)
    lying = {**state, MCH_ROWS: ChunkedTensor((24,), torch.int64, [])}
    with pytest.raises(ValueError, match="sharded differently"):
        _mapping().load(lying)
    lying[MCH_ROWS] = state[MCH_IDS]
    assert "in their own order" in _mapping().load(lying)
    assert full[MCH_SEGMENTS][: BUCKETS + 2].tolist() == [0, 4, 8, 12, 16, 20, 24, -1]


def test_a_hash_function_must_stay_in_its_range() -> None:
    mapping = _mapping(input_hash_func=lambda ids, size: ids % (size + 1), input_hash_size=10)
    assert mapping.spec.limit == ANY_ID
    assert mapping.sent(torch.tensor([3, 11, 14])).tolist() == [3, 0, 3]
    with pytest.raises(IdsError, match="not in the range from 0 to input_hash_size - 1 = 9"):
        mapping.sent(torch.tensor([10]))


def _num_torchrec_waits(policy: str) -> int:
    """Return how often the host waits for an update of torchrec's own module."""
    module = mch("users", policy=policy, interval=1, buckets=1, device="cuda")
    jagged = JaggedTensor(torch.arange(40), lengths=torch.tensor([40])).to(torch.device("cuda"))
    # else read from the device in the first step
    module._current_iter, module._last_eviction_iter = 0, 0
    module._init_history_buffers({"": jagged})
    with followed_device() as found:
        module.profile({"": jagged})
    return len(found.waits)


@pytest.mark.host_cuda
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_the_host_waits_where_torchrecs_code_does_only(policy: str) -> None:
    torchrec_waits = _num_torchrec_waits(policy)
    assert torchrec_waits > 4
    mapping = _mapping(interval=2, policy=policy, device=torch.device("cuda"))
    for step, num_buckets in enumerate((1, 1, 1, 3, 2, 6)):
        ids = (
            (torch.arange(5) + 5 * step).unsqueeze(1) * BUCKETS + torch.arange(num_buckets)
        ).cuda()
        with followed_device() as found:
            ends = mapping.note_lookup(ids.view(-1))
        assert found.waits == []
        numbers = ends.tolist()  # the one read of an update
        with followed_device() as found:
            mapping.learn(numbers)
        assert len(found.waits) == (num_buckets * torchrec_waits if numbers else 0), found.waits
        mapping.optimizer_stepped()
        mapping.find(ids.view(-1))
