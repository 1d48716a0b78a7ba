"""TorchRec's MCHManagedCollisionModule by buckets: when ids get rows, and what a state that does not fit says."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_distrec._compat.torchrec_collisions import MCH_IDS, MCH_ROWS, MCH_SEGMENTS
from lightning_distrec.chunks import ChunkedTensor
from lightning_distrec.errors import IdsError
from lightning_distrec.sharding.mapping.mch_mapping import MchMapping
from lightning_distrec.sharding.mapping.spec import ANY_ID, MchSpec, spec_of
from tests.support.emulated_streams import emulated_streams
from tests.support.mapped_models import BUCKETS, ROWS, mch

CPU = torch.device("cpu")


def _mapping(first_bucket: int = 0, num_buckets: int = BUCKETS, **options: Any) -> MchMapping:
    module = mch("users", **options)
    spec = spec_of(module, "users")
    assert isinstance(spec, MchSpec)
    return MchMapping(spec, first_bucket, num_buckets, CPU, module)


def _bucket_ids(bucket: int, *numbers: int) -> Tensor:
    return torch.tensor(numbers) * BUCKETS + bucket


def test_ids_get_rows_once_in_an_interval_and_share_the_last_of_their_bucket_until_then() -> None:
    mapping, ids = _mapping(interval=2), _bucket_ids(1, 10, 20)
    assert mapping.learn(ids).numel() == 0
    assert mapping.find(ids).tolist() == [7, 7]
    mapping.optimizer_stepped()
    mapping.learn(ids[:1])
    rows = mapping.find(ids).tolist()
    assert len(set(rows) & {4, 5, 6}) == 2
    assert (mapping.num_taken, mapping.counts.looked_up, mapping.counts.shared) == (2, 3, 2)


def test_rows_that_wait_for_the_optimizer_are_not_taken() -> None:
    mapping = _mapping(interval=1, policy="lru")
    mapping.learn(_bucket_ids(1, 1, 2, 3))
    rows = mapping.find(_bucket_ids(1, 1, 2, 3))
    assert mapping.learn(_bucket_ids(1, 4)).numel() == 0
    torch.testing.assert_close(mapping.find(_bucket_ids(1, 1, 2, 3)), rows)
    mapping.optimizer_stepped()
    evicted = mapping.learn(_bucket_ids(1, 5)).tolist()
    assert sorted(mapping.find(_bucket_ids(1, 4, 5)).tolist()) == sorted(evicted)
    (remaining,) = set(rows.tolist()) - set(evicted)
    assert sorted(mapping.find(_bucket_ids(1, 1, 2, 3)).tolist()) == [remaining, 7, 7]


def test_a_state_loads_in_parts_and_one_of_other_buckets_is_refused() -> None:
    whole, ids = _mapping(interval=1), torch.arange(100)
    whole.learn(ids)
    state = whole.state()
    full = {key: value.chunks[0].tensor if isinstance(value, ChunkedTensor) else value for key, value in state.items()}
    order = torch.randperm(ROWS["users"])
    mixed = {key: value[order] if len(value) == ROWS["users"] else value for key, value in full.items()}
    for source in (full, mixed):
        part = _mapping(2, 2)
        assert part.load(source) == ""
        own_values = ids[torch.isin(ids % BUCKETS, torch.tensor([2, 3]))]
        torch.testing.assert_close(part.find(own_values) + part.first_row, whole.find(own_values))
    assert "outside of the bucket that they have with buckets=3" in _mapping(0, 3, buckets=3).load(full)
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


def test_the_host_reads_the_numbers_of_ids_once_in_an_update_of_many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MchMapping, "_update_bucket", lambda self, bucket, ids, recorded: ids.new_empty(0))
    counts = []
    for num_ids in (1, 40):  # of one bucket, and of all
        mapping = _mapping(interval=3)
        with emulated_streams() as streams:
            for step in range(3):
                waits_before = len(streams.reports.waits)
                mapping.learn(torch.arange(num_ids) + step)
                mapping.optimizer_stepped()
        places = [place for _, _, place in streams.reports.waits[waits_before:]]
        counts.append(sum("_update" in place for place in places))
    assert counts == [4, 4], places
