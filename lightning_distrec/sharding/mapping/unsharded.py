"""Lets an unsharded nn.Embedding or nn.EmbeddingBag find the rows of ids: for serving, and for calls after a run.

Ids without a row of their own share one, as outside of training; none gets a row.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distrec.sharding.mapping.id_mapping import mixed
from lightning_distrec.sharding.mapping.spec import MappingSpec
from lightning_distrec.sharding.mapping.state import MADE_FOR, SAVED_NAMES

_ATTRIBUTE = "_maps_ids_by"


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


