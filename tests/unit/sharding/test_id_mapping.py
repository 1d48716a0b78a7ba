"""Ids get rows as an id after the other would, whatever the number of ranks that share the
buckets."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.mapping import id_mapping
from lightning_distrec.sharding.mapping.id_mapping import IdMapping
from lightning_distrec.sharding.mapping.spec import MappingSpec, dynamic_spec, spec_of, specs_of
from lightning_distrec.sharding.mapping.state import load_into
from lightning_distrec.sharding.tables import find_tables
from lightning_distrec.strategies.tables.mapped_tables import refuse_shared_features
from tests.support.host_cuda.following import followed_device
from tests.support.looped_mapping import LoopedMapping
from tests.support.mapped_models import ManagedModel, hash_zch, learn

CPU = torch.device("cpu")
BUCKETS = 6


def _ids(step: int) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    return (torch.rand(64, generator=draw) ** 3 * 1000).long() * 1_234_567 + 3


def _run(spec: MappingSpec, num_ranks: int, steps: int = 15) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows of each step's ids, and those that were evicted."""
    share = BUCKETS // num_ranks
    parts = [IdMapping(spec, rank * share, share, CPU) for rank in range(num_ranks)]
    rows, evicted = [], []
    for step in range(steps):
        ids, actual, lost = _ids(step), torch.empty(64, dtype=torch.long), []
        for rank, part in enumerate(parts):
            local = ids % BUCKETS // share == rank
            lost.append(learn(part, ids[local]) + part.first_row)
            actual[local] = part.find(ids[local]) + part.first_row
            part.optimizer_stepped()
        rows.append(actual)
        evicted.append(torch.cat(lost).sort().values)
    return rows, evicted


@pytest.mark.parametrize("policy", ["none", "lfu"])
def test_rows_do_not_depend_on_the_number_of_ranks(policy: Any) -> None:
    spec = MappingSpec(96, BUCKETS, max_probe=9, policy=policy, min_sights=3, num_reserved=2)
    rows, evicted = _run(spec, 1)
    for num_ranks in (2, 3):
        torch.testing.assert_close(_run(spec, num_ranks), (rows, evicted))
    assert (sum(map(len, evicted)) > 50) == (policy != "none")


SPECS = {
    "lru": MappingSpec(120, BUCKETS, max_probe=18, policy="lru", num_reserved=1),
    "lfu": MappingSpec(120, BUCKETS, max_probe=7, policy="lfu", min_sights=2),
    "none": MappingSpec(240, BUCKETS, max_probe=40, min_sights=3, num_reserved=2),
    "ttl": MappingSpec(60, BUCKETS, max_probe=5, policy="ttl", ttl_hours=1),
    "ttl_lru": MappingSpec(
        150, BUCKETS, max_probe=128, policy="ttl_lru", ttl_hours=2, num_reserved=3
    ),
    "one bucket": MappingSpec(200, 1, policy="lru", num_reserved=3),
}


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_rows_are_those_of_a_loop_over_ids(
    name: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_distrec.gpu.is_on_gpu", lambda _: on_gpu)
    spec = SPECS[name]
    fast, loop = (kind(spec, 0, spec.num_buckets, CPU) for kind in (IdMapping, LoopedMapping))
    num_evicted = 0
    for step, (size, kinds) in enumerate(
        [(30, 200), (90, 200), (0, 1), (60, 40), (90, 10**12)] * 4
    ):
        monkeypatch.setattr(id_mapping, "current_hour", lambda hour=1000 + step: hour)
        draw = torch.Generator().manual_seed(step)
        ids = (torch.rand(size, generator=draw) ** 2 * kinds).long()
        evicted, expected = learn(fast, ids), learn(loop, ids)
        assert torch.equal(evicted.sort().values, expected.sort().values)
        torch.testing.assert_close(fast.tensors, loop.tensors, rtol=0, atol=0)
        assert fast.counts == loop.counts
        num_evicted += len(evicted)
        if step % 3 != 1:  # else rows wait for the optimizer over more lookups
            fast.optimizer_stepped()
            loop.optimizer_stepped()
        if step == 10:  # as a checkpoint does
            for name in fast.tensors:
                assert (
                    load_into(
                        fast, f"ids_{name}".replace("ids_ids", "ids"), loop.tensors[name].clone()
                    )
                    == ""
                )
    assert fast.counts.shared > 10
    assert (num_evicted > 100) == (spec.policy != "none")


def test_rows_that_a_checkpoint_frees_are_given_again() -> None:
    mapping = IdMapping(MappingSpec(8, 1, num_reserved=1), 0, 1, CPU)
    learn(mapping, torch.arange(7))
    assert load_into(mapping, "ids", torch.full((8, 1), -1)) == ""
    learn(mapping, torch.arange(100, 107))
    assert sorted(mapping.find(torch.arange(100, 107)).tolist()) == list(range(7))


def test_what_torchrec_maps_in_another_way_says_so() -> None:
    assert specs_of(ManagedModel().mc)["users"].num_buckets == BUCKETS  # type: ignore[index]
    model = ManagedModel()
    model.mc._return_remapped_features = True
    assert "return_remapped_features=True" in str(specs_of(model.mc))
    assert "Linear may map ids in another way" in str(spec_of(torch.nn.Linear(1, 1), "users"))
    assert "makes it read-only" in str(spec_of(hash_zch("users"), "users_readonly"))


def test_a_feature_of_two_tables_is_mapped_for_both_or_for_none() -> None:
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=24, feature_names=["f"])
        for name in "ab"
    ]
    first, other = find_tables(
        torch.nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=configs)})
    ).tables
    mapped = replace(first, mapping=dynamic_spec(24, 6, "lru", 1))
    refuse_shared_features([first, other])
    with pytest.raises(
        ConfigError, match="feature 'f' is looked up in tables 'ebc.a' and 'ebc.b', of which one"
    ):
        refuse_shared_features([mapped, other])


@pytest.mark.host_cuda
@pytest.mark.parametrize("name", SPECS)
def test_the_host_waits_for_one_number_whatever_the_ids(name: str) -> None:
    spec = SPECS[name]
    mapping = IdMapping(spec, 0, spec.num_buckets, torch.device("cuda"))
    batches = [_ids(step).cuda() for step in range(6)]
    with followed_device() as found:
        for ids in batches:
            mapping.learn(mapping.note_lookup(ids).tolist())
            mapping.optimizer_stepped()
    assert found.operations() == ["copy to the host"] * 6, found.waits
    assert mapping.counts.evicted > 10 or spec.policy in ("none", "ttl", "ttl_lru")
