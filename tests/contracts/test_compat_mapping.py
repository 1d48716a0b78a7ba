"""The same contracts, of torchrec's managed collision modules."""

from typing import Any

from lightning_distrec._compat import torchrec as _torchrec
from tests.support.mapped_models import ROWS, ManagedModel, hash_zch, loader
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer


def test_the_settings_of_hash_zch_are_those_that_it_was_built_with() -> None:
    assert _torchrec.hash_zch_settings(hash_zch("users")) == {"policy": "", "ttl_hours": 0, "percent_reserved": 0.0}
    evicts = hash_zch("users", evicts=True, opt_in_prob=100, percent_reserved_slots=25)
    assert _torchrec.hash_zch_settings(evicts) == {"policy": "LRU_EVICTION", "ttl_hours": 1, "percent_reserved": 25}
    assert _torchrec.why_hash_zch_differs(evicts, "users") == ""
    for options, reason in (
        ({"disable_fallback": True}, "disable_fallback=True"),
        ({"opt_in_prob": 50, "percent_reserved_slots": 25}, "opt_in_prob below 100"),
        ({"track_id_freq": True}, "track_id_freq"),
        ({"output_segments": [0, 10, 24], "total_num_buckets": 2}, "output_segments of unequal size"),
        ({"inference_dispatch_div_train_world_size": True}, "inference_dispatch_div_train_world_size"),
    ):
        assert reason in _torchrec.why_hash_zch_differs(hash_zch("users", **options), "users")  # type: ignore[arg-type]
    assert "makes it read-only" in _torchrec.why_hash_zch_differs(evicts, "users_readonly")


def test_a_managed_collection_has_the_parts_and_the_state_that_we_take() -> None:
    model = ManagedModel(evicts=True)
    collisions = _torchrec.collisions_of(model.mc)
    assert model.mc.get_submodule(_torchrec.COLLISIONS) is collisions
    assert model.mc.get_submodule(_torchrec.EMBEDDINGS) is _torchrec.embeddings_of(model.mc)
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


def _input_dist() -> Any:
    rank, num_ranks = rank_and_num_ranks()
    model = ManagedModel()
    found: list[Any] = []

    def look(*_: Any) -> None:
        sharded = model.trainer.strategy.run_tables.shards.sharded["mc._embedding_module"]  # type: ignore[attr-defined]
        place, sharding = _torchrec.row_wise_sharding(sharded)
        found.extend([place, sharded._input_dists[place]._keep_original_indices])

    model.on_train_batch_end = look  # type: ignore[method-assign]
    make_trainer().fit(model, loader(0, 1, rank, num_ranks, 2))
    return found


def test_route_by_bucket_makes_the_input_dist_of_a_row_wise_sharding() -> None:
    assert run_on_ranks(_input_dist, 2) == [[0, True]] * 2, _torchrec.route_by_bucket
