"""Private names of torchrec's managed collision modules."""

from typing import Any

from torch import Tensor, nn
from torchrec.modules.hash_mc_evictions import HashZchEvictionPolicyName

IDENTITIES = "_hash_zch_identities"
METADATA = "_hash_zch_metadata"
BUCKETS = "_hash_zch_bucket"
"""Names in the state_dict of HashZchManagedCollisionModule."""
COLLISIONS = "_managed_collision_collection"
EMBEDDINGS = "_embedding_module"
MODULES = "_managed_collision_modules"
"""Names in the state_dict of ManagedCollisionEmbedding(Bag)Collection. Source: torchrec/modules/mc_*.py."""


def modules_of(collisions: Any) -> dict[str, nn.Module]:
    """Return the managed collision module of each table of a ManagedCollisionCollection, by name."""
    return dict(collisions._managed_collision_modules.items())


def returns_remapped_features(managed: Any) -> bool:
    """Whether calls return the rows' numbers too."""
    return bool(managed._return_remapped_features)


def hash_zch_settings(module: Any) -> dict[str, Any]:
    """Return what a HashZchManagedCollisionModule was built with. Source: torchrec/modules/hash_mc_modules.py."""
    config = module._eviction_config
    reserves = module._opt_in_prob != -1
    return {
        "policy": "" if module._eviction_policy_name is None else module._eviction_policy_name.value,
        "ttl_hours": 0 if config is None else int(config.single_ttl or 0),
        "percent_reserved": module._percent_reserved_slots if reserves else 0.0,
    }


def hash_zch_difference(module: Any, name: str) -> str:
    """Return the setting by which a HashZchManagedCollisionModule maps ids as `IdMapping` does not; "" for none."""
    rows, buckets = module.output_size(), module.buckets()
    reasons = {
        "output_segments of unequal size": module._output_segments
        != [rows // buckets * bucket for bucket in range(buckets + 1)],
        "opt_in_prob below 100, which draws ids at random,": 0 < module._opt_in_prob < 100,
        "disable_fallback=True": module.disable_fallback,
        "PER_FEATURE_TTL_EVICTION": module._eviction_policy_name == HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION,
        "track_id_freq or write_runtime_meta_dim": module._hash_zch_runtime_meta is not None,
        "inference_dispatch_div_train_world_size=True": module.input_mapper._inference_dispatch_div_train_world_size,
        "is_inference=True": module._is_inference,
        f"a table whose name, '{name}', makes it read-only,": name.lower().endswith(module._read_only_suffix),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def hash_zch_state(module: Any) -> tuple[Tensor, Tensor | None]:
    """Return the identities and the metadata, (zch_size, 1) each; no metadata: nothing is evicted."""
    metadata = module._hash_zch_metadata
    has_metadata = metadata is not None and metadata.numel() == module._hash_zch_identities.numel()
    return module._hash_zch_identities.data, metadata if has_metadata else None


def set_hash_zch_state(module: Any, identities: Tensor, metadata: Tensor | None) -> None:
    """Set the identities and the metadata; those without rows free their memory."""
    module._hash_zch_identities.data = identities
    if metadata is not None:
        module._hash_zch_metadata = metadata


MCH_IDS = "_mch_sorted_raw_ids"
MCH_ROWS = "_mch_remapped_ids_mapping"
MCH_SEGMENTS = "_output_segments_tensor"
MCH_LOOKUPS = "_current_iter_tensor"
"""Names in the state_dict of MCHManagedCollisionModule. Source: torchrec/modules/mc_modules.py."""


def mch_settings(module: Any) -> dict[str, Any]:
    """Return what an MCHManagedCollisionModule was built with."""
    policy = module._eviction_policy
    return {
        "interval": module._eviction_interval,
        "hash_function": module._input_hash_func,
        "policy": policy,
        "filters": policy._threshold_filtering_func is not None,
    }


def mch_difference(module: Any) -> str:
    """Return the setting by which an MCHManagedCollisionModule is a part of another; "" for none."""
    if module._output_global_offset:
        return f"output_global_offset={module._output_global_offset}"
    segments = module._output_segments_tensor
    last = module.output_size() if segments.is_meta else int(segments.max())
    return "" if last == module.output_size() else f"output_segments that end at {last}"


def mch_state(module: Any) -> dict[str, Tensor]:
    """Return what an MCHManagedCollisionModule keeps of each id, (zch_size,) each, sorted by id; and its row."""
    return {MCH_IDS: module._mch_sorted_raw_ids, MCH_ROWS: module._mch_remapped_ids_mapping} | {
        f"_mch_{name}": values for name, values in module._mch_metadata.items()
    }


def set_mch_state(module: Any, state: dict[str, Tensor], lookups: Tensor) -> None:
    """Set what `mch_state` returns, in any order. lookups: how many there were in training, (1,)."""
    _set_sorted(module, state)
    module._current_iter_tensor = lookups
    module._sort_mch_buffers()


def _set_sorted(module: Any, state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        setattr(module, name, value)
    module._mch_metadata = {name: getattr(module, f"_mch_{name}") for name in module._mch_metadata}


def update_mch(module: Any, state: dict[str, Tensor], ids: Tensor, history: dict[str, Tensor], step: int) -> None:
    """Let an MCHManagedCollisionModule choose which ids have rows, as it does once in an eviction interval.

    state: what `mch_state` returns, sorted by id; it is changed, and sorted again. ids: those that were looked up since
    the last time. history: what the policy has recorded of each, by name. step: the number of this lookup.
    """
    _set_sorted(module, state)
    module._current_iter, module._history_accumulator, module._history_metadata = step, ids, history
    module._current_history_buffer_offset = len(ids)
    module._coalesce_history()
