"""The same contracts, of torchrec's managed collision modules."""

from typing import Any

import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_distrec._compat import torchrec_modules as _torchrec
from tests.support.mapped_models import ROWS, ManagedModel, hash_zch, loader, mch
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer


def test_the_settings_of_hash_zch_are_those_that_it_was_built_with() -> None:
    plain = {"policy": "", "ttl_hours": 0, "percent_reserved": 0.0, "max_probe": 3}
    assert _torchrec.hash_zch_settings(hash_zch("users")) == plain
    assert _torchrec.hash_zch_settings(hash_zch("users", max_probe=7)) == plain | {"max_probe": 7}
    evicts = hash_zch("users", evicts=True, opt_in_prob=100, percent_reserved_slots=25)
    actual = {"policy": "LRU_EVICTION", "ttl_hours": 1, "percent_reserved": 25}
    assert _torchrec.hash_zch_settings(evicts) == plain | actual
    by_feature = {
        "eviction_policy_name": HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION,
        "eviction_config": HashZchEvictionConfig(features=["user"], per_feature_ttl=[1]),
    }
    assert _torchrec.hash_zch_difference(evicts, "users") == ""
    for options, reason in (
        ({"disable_fallback": True}, "disable_fallback=True"),
        (by_feature, "PER_FEATURE_TTL_EVICTION"),
        ({"opt_in_prob": 50, "percent_reserved_slots": 25}, "opt_in_prob below 100"),
        ({"track_id_freq": True}, "track_id_freq"),
        (
            {"output_segments": [0, 10, 24], "total_num_buckets": 2},
            "output_segments of unequal size",
        ),
        (
            {"inference_dispatch_div_train_world_size": True},
            "inference_dispatch_div_train_world_size",
        ),
    ):
        assert reason in _torchrec.hash_zch_difference(hash_zch("users", **options), "users")  # type: ignore[arg-type]
    assert "makes it read-only" in _torchrec.hash_zch_difference(evicts, "users_readonly")


def test_a_managed_collection_has_the_parts_and_the_state_that_we_take() -> None:
    model = ManagedModel(evicts=True)
    collisions = model.mc.get_submodule(_torchrec.COLLISIONS)
    assert isinstance(
        model.mc.get_submodule(_torchrec.EMBEDDINGS), (EmbeddingBagCollection, EmbeddingCollection)
    )
    assert not _torchrec.returns_remapped_features(model.mc)
    modules = _torchrec.modules_of(collisions)
    assert list(modules) == ["users", "goods"]
    prefix = f"{_torchrec.MODULES}.users."
    keys = {key.removeprefix(prefix) for key in collisions.state_dict() if key.startswith(prefix)}
    assert keys == {_torchrec.IDENTITIES, _torchrec.METADATA, _torchrec.BUCKETS}
    identities, metadata = _torchrec.hash_zch_state(modules["users"])
    assert metadata is not None
    assert identities.shape == metadata.shape == (ROWS["users"], 1)
    assert _torchrec.hash_zch_state(hash_zch("users"))[1] is None
    _torchrec.set_hash_zch_state(modules["users"], identities + 1, metadata + 2)
    state = collisions.state_dict()
    assert state[prefix + _torchrec.IDENTITIES].unique().item() == 0
    assert state[prefix + _torchrec.METADATA].unique().item() == 1


def test_mch_has_the_settings_and_the_state_that_we_take() -> None:
    module = mch("users", policy="distance", interval=3, filters=len)
    settings = _torchrec.mch_settings(module)
    assert (settings["interval"], settings["hash_function"], settings["filters"]) == (3, None, True)
    assert type(settings["policy"]) is DistanceLFU_EvictionPolicy
    assert _torchrec.mch_difference(module) == ""
    assert "output_global_offset=24" in _torchrec.mch_difference(
        mch("users", output_global_offset=24)
    )
    other = mch("users", output_segments=[0, 24, 48])
    assert "output_segments that end at 48" in _torchrec.mch_difference(other)
    state = _torchrec.mch_state(module)
    assert (
        state.keys() | {_torchrec.MCH_SEGMENTS, _torchrec.MCH_LOOKUPS} == module.state_dict().keys()
    )
    per_row = {name: torch.arange(ROWS["users"]).flip(0) for name in state}
    per_row[_torchrec.MCH_IDS] = 10 * torch.arange(ROWS["users"])
    _torchrec.set_mch_state(module, per_row, torch.tensor([7]))
    assert module.state_dict()[_torchrec.MCH_LOOKUPS].tolist() == [7]
    inputs = {"": JaggedTensor(torch.tensor([0, 10, 220]), lengths=torch.tensor([3]))}
    assert module.remap(inputs)[""].values().tolist() == [23, 22, 1]


def test_update_mch_gives_rows_to_the_ids_of_an_interval() -> None:
    module = mch("users")
    _torchrec.update_mch(module, _torchrec.mch_state(module), torch.tensor([50, 7, 50]), {}, 2)
    learned = _torchrec.mch_state(module)
    assert learned[_torchrec.MCH_IDS][:3].tolist() == [7, 50, torch.iinfo(torch.int64).max]
    assert sorted(learned[_torchrec.MCH_ROWS][:2].tolist()) == sorted(module.evict().tolist())
    assert learned["_mch_counts"][:2].tolist() == [1, 2]


def _input_dist() -> Any:
    rank, num_ranks = rank_and_num_ranks()
    model = ManagedModel()
    actual: list[Any] = []

    def look(*_: Any) -> None:
        sharded = model.trainer.strategy.run_tables.shards.sharded["mc._embedding_module"]  # type: ignore[attr-defined]
        place, sharding = _torchrec.row_wise_sharding(sharded)
        actual.extend([place, sharded._input_dists[place]._keep_original_indices])

    model.on_train_batch_end = look  # type: ignore[method-assign]
    make_trainer().fit(model, loader(0, 1, rank, num_ranks, 2))
    return actual


def test_route_by_bucket_makes_the_input_dist_of_a_row_wise_sharding() -> None:
    assert run_on_warm_ranks(_input_dist, 2) == [[0, True]] * 2, _torchrec.route_by_bucket
