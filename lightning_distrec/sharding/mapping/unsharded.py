"""Lets unsharded modules find the rows of ids that sharded ones have given: for serving, and for calls after a run.

Ids without a row of their own share one, as outside of training; none gets a row.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.mc_modules import MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_distrec._compat.torchrec_collisions import MCH_LOOKUPS, MCH_SEGMENTS, mch_state, set_mch_state
from lightning_distrec.sharding.mapping.id_mapping import mixed
from lightning_distrec.sharding.mapping.rows_of_ids import bucket_of
from lightning_distrec.sharding.mapping.spec import ANY_ID, MappingSpec
from lightning_distrec.sharding.mapping.state import MADE_FOR, SAVED_NAMES

_ATTRIBUTE = "_maps_ids_by"
_SHARES = "_shares_rows_of_buckets"


def finds_rows(lookup: nn.Module) -> bool:
    """Whether `find_rows_by` was called for it."""
    return hasattr(lookup, _ATTRIBUTE)


def find_rows_by(lookup: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Let a lookup take ids of any range. state: what checkpoints hold of its mapping, by its names there."""
    _, num_buckets, num_reserved = state[MADE_FOR].tolist()
    for name, value in state.items():
        lookup.register_buffer(name, value)
    spec = MappingSpec(len(state["ids"]), num_buckets, num_reserved=num_reserved)
    lookup.__dict__[_ATTRIBUTE] = spec
    lookup.register_forward_pre_hook(_find, with_kwargs=True)


def mapping_state_of(lookup: nn.Module) -> dict[str, Tensor]:
    """Return the state that `find_rows_by` was given."""
    return {name: value for name, value in lookup.named_buffers(recurse=False) if name in SAVED_NAMES}


def lookups_with_mappings(root: nn.Module, state: Mapping[str, Any]) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield the lookups below `root` whose mappings are in a state_dict, each with its part of that."""
    for path in [key.removesuffix(f".{MADE_FOR}") for key in state if key.endswith(f".{MADE_FOR}")]:
        own = {name: state[f"{path}.{name}"] for name in SAVED_NAMES if f"{path}.{name}" in state}
        yield root.get_submodule(path), own


def restore_mch(module: Any, state: Mapping[str, Tensor]) -> None:
    """Set the full state of an unsharded MCHManagedCollisionModule, by its names."""
    set_mch_state(module, {name: state[name] for name in mch_state(module)}, state[MCH_LOOKUPS])
    share_rows_of_buckets(module, state[MCH_SEGMENTS])


def share_rows_of_buckets(module: Any, segments: Tensor) -> None:
    """Let ids without a row share the last one of their bucket; unsharded, torchrec has no buckets.

    module: an unsharded MCHManagedCollisionModule. segments: where its buckets ended when it was sharded, -1 behind.
    """
    buckets = int((segments >= 0).sum()) - 1
    if buckets > 1 and not hasattr(module, _SHARES):
        num_ids = 0 if module.input_size() == ANY_ID else module.input_size()
        spec = MappingSpec(module.output_size(), buckets, num_ids)
        setattr(module, _SHARES, module.register_forward_hook(partial(_share, spec)))


def mch_modules_of(root: nn.Module, state: Mapping[str, Any]) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the MCHManagedCollisionModules below `root` that are in a state_dict, each with its segments there."""
    for path, module in root.named_modules():
        if type(module) is MCHManagedCollisionModule and (segments := state.get(f"{path}.{MCH_SEGMENTS}")) is not None:
            yield module, segments


def _share(spec: MappingSpec, module: Any, given: tuple[Any, ...], mapped: dict[str, JaggedTensor]) -> Any:
    ids, found = module.preprocess(given[0]), {}
    for name, rows in mapped.items():
        last = (bucket_of(spec, ids[name].values()) + 1) * spec.bucket_rows - 1
        own = torch.where(rows.values() == spec.num_rows - 1, last, rows.values())
        found[name] = JaggedTensor(own, lengths=rows.lengths(), offsets=rows.offsets(), weights=rows.weights_or_none())
    return found


def _find(
    lookup: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    spec: MappingSpec = getattr(lookup, _ATTRIBUTE)
    given: Tensor = arguments[0] if arguments else options["input"]
    ids = mixed(given.flatten().long())
    rows, _ = torch.ops.fbgemm.zero_collision_hash(
        input=ids,
        identities=lookup.ids,
        max_probe=min(spec.max_probe, spec.own_rows),
        circular_probe=True,
        exp_hours=-1,
        readonly=True,
        local_sizes=torch.full_like(ids, spec.bucket_rows),
        offsets=ids % spec.num_buckets * spec.bucket_rows,
        opt_in_prob=100,
        num_reserved_slots=spec.num_reserved,
    )
    found = rows.view(given.shape)
    return ((found, *arguments[1:]), options) if arguments else ((), {**options, "input": found})
