"""FBGEMM's cache of rows of the host, in a reference form: rows are copied in, trained there, and
written back.

As in its CUDA wheel a row may be in one set of slots. What was used longest ago leaves, if no
prefetch has locked it.
"""

from typing import Any

import torch
from torch import Tensor


def _row(host: Tensor, tables: list[Tensor], index: int) -> Tensor:
    """Return a row on the host. index: of all cached tables' rows. tables: as FBGEMM passes
    them."""
    starts, table_of_index, begins, columns = tables
    table = int(table_of_index[index])
    dim = int(columns[table + 1] - columns[table])
    begin = int(begins[table]) + (index - int(starts[table])) * dim
    return host.flatten()[begin : begin + dim]


def _write_back(
    host: Tensor, tables: list[Tensor], state: Tensor, cache: Tensor, group: int, slot: int
) -> None:
    row = _row(host, tables, int(state[group, slot]))
    row.copy_(cache[group * state.shape[1] + slot, : len(row)])


def _fill(
    host: Tensor,
    state: Tensor,
    cache: Tensor,
    used: Tensor,
    locks: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    now: int,
) -> None:
    """Copy rows in. now: what `used` gets of slots, where it is by slot; -1: it counts uses by
    index."""
    num_all, num_groups = len(tables[1]), state.shape[0]
    present = ids[(ids >= 0) & (ids < num_all)]
    for index in present.unique().tolist():
        group = index % num_groups
        if now < 0:
            used[index] += int((present == index).sum())
        slot = _slot(state, group, index)
        if slot is None:
            slot = _free_slot(
                state[group],
                used,
                None if now < 0 else group,
                locks[group] if locks.numel() else None,
            )
            if slot is None:
                continue  # all are locked: the row is used where it is
            if state[group, slot] >= 0:
                _write_back(host, tables, state, cache, group, slot)
            row = _row(host, tables, index)
            cache[group * state.shape[1] + slot, : len(row)] = row
            state[group, slot] = index
        if now >= 0:
            used[group, slot] = now
        if locks.numel():
            locks[group, slot] += 1


def _slot(state: Tensor, group: int, index: int) -> int | None:
    slots = (state[group] == index).nonzero()
    return int(slots[0]) if len(slots) else None


def _free_slot(
    indices: Tensor, used: Tensor, group: int | None, locks: Tensor | None
) -> int | None:
    """Return the slot whose row was used longest ago or, where uses are counted, least often."""
    uses = used[indices.clamp(min=0)] if group is None else used[group].clone()
    uses = torch.where(indices < 0, -1, uses)
    if locks is not None:
        uses = torch.where(locks > 0, torch.iinfo(uses.dtype).max, uses)
        if bool((locks > 0).all()):
            return None
    return int(uses.argmin())


def _find(ids: Tensor, state: Tensor, locations: Tensor) -> None:
    known = {int(index): slot for slot, index in enumerate(state.flatten().tolist()) if index >= 0}
    locations.copy_(
        torch.tensor([known.get(index, -1) for index in ids.tolist()], dtype=locations.dtype)
    )


def _flush(host: Tensor, state: Tensor, cache: Tensor, tables: list[Tensor]) -> None:
    for group, slot in (state >= 0).nonzero().tolist():
        _write_back(host, tables, state, cache, group, slot)
    state.fill_(-1)


def _unlock(locks: Tensor, locations: Tensor) -> None:
    slots = locations[locations >= 0].unique().long()
    locks.view(-1)[slots] -= 1


def _number(starts: Tensor, ids: Tensor, offsets: Tensor, sizes: Tensor | None) -> Tensor:
    """Return ids as indices of all cached tables' rows; the number of all rows for ids of other
    tables."""
    num_features, total = len(starts) - 1, starts[-1]
    lengths = offsets[1:] - offsets[:-1]
    bags = (
        torch.arange(num_features + 1) * (len(lengths) // num_features)
        if sizes is None
        else sizes.long()
    )
    feature_of_bag = torch.repeat_interleave(torch.arange(num_features), bags[1:] - bags[:-1])
    start = starts[torch.repeat_interleave(feature_of_bag, lengths)]
    return torch.where((start >= 0) & (ids >= 0), start + ids, total)


OPERATORS: dict[str, Any] = {
    "number_rows(Tensor starts, Tensor ids, Tensor offsets, Tensor? sizes) -> Tensor": _number,
    "fill_cache(Tensor(a!) host, Tensor(b!) state, Tensor(c!) cache, Tensor(d!) used, Tensor(e!) "
    "locks, "
    "Tensor[] tables, Tensor ids, int now) -> ()": _fill,
    "find_in_cache(Tensor ids, Tensor state, Tensor(a!) locations) -> ()": _find,
    "flush_cache(Tensor(a!) host, Tensor(b!) state, Tensor(c!) cache, Tensor[] tables) -> ()": _flush,
    "unlock_cache(Tensor(a!) locks, Tensor locations) -> ()": _unlock,
}
"""Schema -> its kernel over the host's memory."""


# ---- FBGEMM's operators on the device


def _linearize_cache_indices(
    cache_hash_size_cumsum: Tensor,
    indices: Tensor,
    offsets: Tensor,
    B_offsets: Tensor | None = None,
    max_B: int = -1,
    indices_base_offset: int = 0,
) -> Tensor:
    return torch.ops.host_cuda.number_rows(cache_hash_size_cumsum, indices, offsets, B_offsets)


def _lru_cache_populate(
    weights: Tensor,
    hash_size_cumsum: Tensor,
    total_cache_hash_size: int,
    cache_index_table_map: Tensor,
    weights_offsets: Tensor,
    D_offsets: Tensor,
    linear_cache_indices: Tensor,
    lxu_cache_state: Tensor,
    lxu_cache_weights: Tensor,
    time_stamp: int,
    lru_state: Tensor,
    stochastic_rounding: bool,
    gather_cache_stats: bool = False,
    uvm_cache_stats: Tensor | None = None,
    lock_cache_line: bool = False,
    lxu_cache_locking_counter: Tensor | None = None,
) -> None:
    tables = [hash_size_cumsum, cache_index_table_map, weights_offsets, D_offsets]
    locks = lxu_cache_locking_counter if lock_cache_line else None
    _populate(
        weights,
        tables,
        linear_cache_indices,
        [lxu_cache_state, lxu_cache_weights, lru_state],
        locks,
        time_stamp,
    )


def _lfu_cache_populate(
    weights: Tensor,
    cache_hash_size_cumsum: Tensor,
    total_cache_hash_size: int,
    cache_index_table_map: Tensor,
    weights_offsets: Tensor,
    D_offsets: Tensor,
    linear_cache_indices: Tensor,
    lxu_cache_state: Tensor,
    lxu_cache_weights: Tensor,
    lfu_state: Tensor,
    stochastic_rounding: bool,
) -> None:
    tables = [cache_hash_size_cumsum, cache_index_table_map, weights_offsets, D_offsets]
    _populate(
        weights,
        tables,
        linear_cache_indices,
        [lxu_cache_state, lxu_cache_weights, lfu_state],
        None,
        -1,
    )


def _populate(
    host: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    cache: list[Tensor],
    locks: Tensor | None,
    now: int,
) -> None:
    if locks is None:
        locks = torch.empty(0, dtype=torch.int32, device=ids.device)
    torch.ops.host_cuda.fill_cache(host, *cache, locks, tables, ids, now)


def _lxu_cache_lookup(
    linear_cache_indices: Tensor,
    lxu_cache_state: Tensor,
    invalid_index: int = -1,
    gather_cache_stats: bool = False,
    uvm_cache_stats: Tensor | None = None,
    num_uniq_cache_indices: Tensor | None = None,
    lxu_cache_locations_output: Tensor | None = None,
) -> Tensor:
    locations = lxu_cache_locations_output
    if locations is None:
        locations = torch.empty_like(linear_cache_indices, dtype=torch.int32)
    torch.ops.host_cuda.find_in_cache(linear_cache_indices, lxu_cache_state, locations)
    return locations


def _lxu_cache_flush(
    uvm_weights: Tensor,
    cache_hash_size_cumsum: Tensor,
    cache_index_table_map: Tensor,
    weights_offsets: Tensor,
    D_offsets: Tensor,
    total_D: int,
    lxu_cache_state: Tensor,
    lxu_cache_weights: Tensor,
    stochastic_rounding: bool,
) -> None:
    tables = [cache_hash_size_cumsum, cache_index_table_map, weights_offsets, D_offsets]
    torch.ops.host_cuda.flush_cache(uvm_weights, lxu_cache_state, lxu_cache_weights, tables)


def _lxu_cache_locations_update(
    locations: Tensor, new: Tensor, num_unique: Tensor | None = None
) -> None:
    locations.copy_(torch.where(new >= 0, new, locations))


KERNELS: dict[str, Any] = {
    "linearize_cache_indices": _linearize_cache_indices,
    "lru_cache_populate": _lru_cache_populate,
    "lfu_cache_populate": _lfu_cache_populate,
    "lxu_cache_lookup": _lxu_cache_lookup,
    "lxu_cache_flush": _lxu_cache_flush,
    "lxu_cache_locations_update": _lxu_cache_locations_update,
    "lxu_cache_locking_counter_decrement": lambda locks, locations: (
        torch.ops.host_cuda.unlock_cache(locks, locations)
    ),
}
"""FBGEMM's operator -> its kernel on the device."""
