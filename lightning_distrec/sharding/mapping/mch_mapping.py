"""The rows that torchrec's MCHManagedCollisionModule gives to ids, bucket by bucket, on one rank.

Each bucket is a module of its own, so that the outcome does not depend on the number of ranks. Torchrec's code decides
which ids have rows, once in an eviction interval. Between these times ids are noted only, and their rows are found.

Not run on a GPU yet: there, an update waits for the numbers of ids of the buckets, and torchrec's code does for each.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_distrec._compat.torchrec_collisions import (
    MCH_IDS,
    MCH_LOOKUPS,
    MCH_ROWS,
    MCH_SEGMENTS,
    mch_settings,
    mch_state,
    set_mch_state,
    update_mch,
)
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.errors import IdsError
from lightning_distrec.sharding.mapping.spec import ANY_ID, MchSpec, RowsOfIds, first_flags

_SEGMENTS = 1025
"""Length of torchrec's tensor of the ends of buckets."""


class MchMapping(RowsOfIds):
    """The buckets of one rank; ids without a row share the last one of their bucket. module: torchrec's."""

    no_id = ANY_ID

    def __init__(self, spec: MchSpec, first_bucket: int, num_buckets: int, device: torch.device, module: Any) -> None:
        super().__init__(spec, first_bucket, num_buckets, device)
        settings = mch_settings(module)
        self._module, self._interval, self._policy = module, settings["interval"], settings["policy"]
        self._draws, self._hash = settings["filters"], settings["hash_function"]
        self.ids = torch.full((self.num_rows, 1), ANY_ID, device=device)
        names = [name for name in mch_state(module) if name not in (MCH_IDS, MCH_ROWS)]
        self._metadata = {name: torch.zeros(self.num_rows, dtype=torch.int64, device=device) for name in names}
        """What the policy keeps for each row, by its name in the state_dict."""
        size = spec.bucket_rows
        # One for all buckets, which lends its code: its constructor copies numbers to the device, each a wait.
        self._bucket = module.rebuild_with_output_id_range((0, size), [0, size], device)
        self._free(self._bucket)
        self._history: list[tuple[int, Tensor]] = []
        """Of each lookup since the last update: its number, and the ids, ascending."""
        self._noted: tuple[Tensor, ...] = ()
        """Of an update: the ids of the history by buckets, their places there, and where each bucket ends."""
        # Due: an eviction interval has ended. Wait: rows were looked up, and no optimizer has stepped since.
        self._is_due, self._rows_wait = False, False
        self._index()

    @property
    def changes_ids(self) -> bool:
        """Whether ids are not sent as they are."""
        return self._hash is not None

    def sent(self, ids: Tensor) -> Tensor:
        """Return ids as they are sent: by the user's hash function. Raises IdsError: it returns others than it may."""
        if self._hash is None:
            return ids
        size = self.spec.num_ids or ANY_ID
        hashed: Tensor = self._hash(ids, size)
        if hashed.shape != ids.shape or bool(((hashed < 0) | (hashed >= size)).any()):
            raise IdsError(
                f"input_hash_func has returned {len(hashed)} numbers for {len(ids)} ids, or some that are not in the "
                f"range from 0 to input_hash_size - 1 = {size - 1}. Return one in that range for each id."
            )
        return hashed

    def optimizer_stepped(self) -> None:
        """The rows that were used so far may be evicted from now on."""
        self._rows_wait = False

    @torch.no_grad()
    def find(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, (num_ids,) each, counted from this rank's first one."""
        rows, has_own = self._own_rows(ids)
        shared = (self._bucket_of(ids) + 1) * self.spec.bucket_rows - 1
        return torch.where(has_own, rows, shared)

    @torch.no_grad()
    def note_lookup(self, ids: Tensor) -> Tensor:
        """Note the ids of a lookup in training. Return where the buckets of an update end, or nothing."""
        self.num_lookups += 1
        self._history.append((self.num_lookups, ids.sort().values))
        self._is_due |= self.num_lookups % self._interval == 0
        # A second lookup of a step would evict rows that the first one has looked up: it leaves that to a later one.
        if not self._is_due or self._rows_wait:
            return ids.new_empty(0)
        ids = torch.cat([ids for _, ids in self._history])
        buckets, order = torch.sort(self._bucket_of(ids), stable=True)
        self._noted = ids, order
        numbers = torch.arange(self.num_rows // self.spec.bucket_rows, device=ids.device)
        return torch.searchsorted(buckets, numbers, right=True)

    @torch.no_grad()
    def learn(self, numbers: Sequence[int]) -> Tensor:
        """Once in an interval, let ids have rows. Return rows that an id was evicted from, and -1s."""
        ids = self._history[-1][1]
        evicted = ids.new_empty(0)
        if len(numbers):
            evicted = self._update(numbers)
            self._is_due = False
        self._rows_wait = True
        is_first = first_flags(ids)
        num_shared = (is_first & ~self._own_rows(ids)[1]).sum()
        self._count(is_first.sum(), num_shared, (evicted >= 0).sum())
        return evicted

    def state(self) -> dict[str, ChunkedTensor | Tensor]:
        """Return what is saved of this rank's part, under torchrec's names; it sorts by id what is here by row."""
        rows_state = {MCH_IDS: self.ids.view(-1), MCH_ROWS: self._rows()} | self._metadata
        ends = torch.arange(self.spec.num_buckets + 1) * self.spec.bucket_rows
        segments = torch.cat([ends, torch.full((_SEGMENTS - len(ends),), -1)])
        return {
            name: ChunkedTensor((self.spec.num_rows,), value.dtype, [Chunk((self.first_row,), value)])
            for name, value in rows_state.items()
        } | {MCH_SEGMENTS: segments, MCH_LOOKUPS: torch.tensor([self.num_lookups])}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> str:
        """Load this rank's part of a state, of full tensors or such in a file; return what is wrong, or ""."""
        if tuple(state[MCH_IDS].shape) != (self.spec.num_rows,):
            return f"the table maps ids to {self.spec.num_rows} rows, but there are {tuple(state[MCH_IDS].shape)}."
        local = {name: self._local_part(state[name], state[MCH_ROWS]) for name in (MCH_IDS, MCH_ROWS, *self._metadata)}
        # An unsharded module sorts its ids over all rows; only a sharded one keeps each id at its row.
        if not torch.equal(local.pop(MCH_ROWS), self._rows()):
            return "its ids are in their own order. Load it into an unsharded module, and start from that."
        self.ids.view(-1).copy_(local.pop(MCH_IDS))
        for name, value in local.items():
            self._metadata[name].copy_(value)
        num_lookups = state[MCH_LOOKUPS]
        self.num_lookups = int(num_lookups if isinstance(num_lookups, Tensor) else num_lookups.read())
        self._index()
        ids, buckets = self.ids.view(-1), (self._rows() - self.first_row) // self.spec.bucket_rows
        if not torch.equal(torch.where(ids == ANY_ID, buckets, self._bucket_of(ids)), buckets):
            return (
                f"some ids have rows outside of the bucket that they have with buckets={self.spec.num_buckets} and "
                f"input_hash_size={self.spec.num_ids or ANY_ID}. Use what it was trained with."
            )
        return ""

    def noted(self) -> dict[str, Any]:
        """Return the ids that were looked up since the last update, on this rank."""
        numbers, ids = zip(*self._history, strict=True) if self._history else ((), ())
        return {"lookups": list(numbers), "ids": list(ids), "is_due": self._is_due}

    def note(self, noted: Mapping[str, Any]) -> None:
        """Continue with what `noted` has returned."""
        device, self._is_due = self.ids.device, bool(noted["is_due"])
        noted_lookups = zip(noted["lookups"], noted["ids"], strict=True)
        self._history = [(int(number), ids.to(device)) for number, ids in noted_lookups]

    def begin(self) -> str:
        """Take this rank's part of what the unsharded module has learned, and free it; return what is wrong, or ""."""
        learned = mch_state(self._module)
        if learned[MCH_IDS].is_meta or not len(learned[MCH_IDS]):
            return ""
        problem = self.load({**learned, MCH_LOOKUPS: self._module.state_dict()[MCH_LOOKUPS]})
        self._free(self._module)  # Every rank has the unsharded module's ids, of all rows.
        return problem

    def _free(self, module: Any) -> None:
        state = dict.fromkeys(mch_state(module), self.ids.new_empty(0))
        set_mch_state(module, state, torch.tensor([self.num_lookups]))

    def _rows(self) -> Tensor:
        return torch.arange(self.first_row, self.first_row + self.num_rows, device=self.ids.device)

    def _local_part(self, value: Any, rows: Any) -> Tensor:
        """Return what this rank has of a tensor that is in the order of `rows`; in files it is that of the rows."""
        if isinstance(value, Tensor) and isinstance(rows, Tensor):
            part = value[torch.argsort(rows)][self.first_row : self.first_row + self.num_rows]
            return part.to(self.ids.device)
        part = torch.empty(self.num_rows, dtype=torch.int64)
        value.read_into([Chunk((self.first_row,), part)])
        return part.to(self.ids.device)

    def _index(self) -> None:
        """Sort the rows by id, for lookups; those that no id has are the last."""
        self._sorted_ids, self._rows_of_sorted = torch.sort(self.ids.view(-1))

    def _own_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of ids, and which have one of their own; (num_ids,) each."""
        places = torch.searchsorted(self._sorted_ids, ids).clamp_(max=self.num_rows - 1)
        return self._rows_of_sorted[places], self._sorted_ids[places] == ids

    def _update(self, ends: Sequence[int]) -> Tensor:
        """Let the module choose the ids of each bucket; return rows that an id was evicted from, and -1s."""
        (ids, order), self._noted = self._noted, ()
        kinds = self._policy.metadata_info
        recorded = {kind.metadata_name: torch.zeros_like(ids) for kind in kinds if kind.is_history_metadata}
        first = 0
        for number, lookup_ids in self._history:
            part = slice(first, first + len(lookup_ids))
            self._policy.record_history_metadata(number, lookup_ids, {k: v[part] for k, v in recorded.items()})
            first = part.stop
        self._history = self._history[:0]
        had_id = self.ids.view(-1) != ANY_ID
        ids, recorded = ids[order], {name: values[order] for name, values in recorded.items()}
        changed = [ids[:0]]
        for bucket, part in enumerate(map(slice, [0, *ends], ends)):
            if part.start < part.stop:
                recorded_part = {name: values[part] for name, values in recorded.items()}
                changed.append(self._update_bucket(bucket, ids[part], recorded_part))
        self._free(self._bucket)
        self._index()
        rows = torch.cat(changed)
        return torch.where(had_id[rows], rows, -1)

    def _update_bucket(self, number: int, ids: Tensor, recorded: dict[str, Tensor]) -> Tensor:
        """Let the module choose the ids of one bucket; return the rows that have another id now."""
        module, first_row, size = self._bucket, number * self.spec.bucket_rows, self.spec.bucket_rows
        tensors = {MCH_IDS: self.ids.view(-1), **self._metadata}
        tensors = {name: value[first_row : first_row + size] for name, value in tensors.items()}
        rows = torch.arange(size, device=ids.device)
        state = {name: value.clone() for name, value in tensors.items()}
        set_mch_state(module, {**state, MCH_ROWS: rows}, torch.tensor([self.num_lookups]))
        # A policy that draws does so alike on any number of ranks, and leaves the draws of the run alone.
        with torch.random.fork_rng([ids.device] if ids.is_cuda else [], enabled=self._draws):
            if self._draws:
                torch.manual_seed(zlib.crc32(f"{self.num_lookups} {self.first_row + first_row}".encode()))
            update_mch(module, ids, recorded, self.num_lookups)
        learned = mch_state(module)
        # torchrec has sorted its tensors by id; here they are by row.
        for name, value in tensors.items():
            value[learned[MCH_ROWS]] = learned[name]
        changed: Tensor = module.evict()
        return changed + first_row
