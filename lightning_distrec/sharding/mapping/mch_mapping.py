"""The rows that torchrec's MCHManagedCollisionModule gives to ids, bucket by bucket, on one rank.

Each bucket is a module of its own, so that the outcome does not depend on the number of ranks.
Torchrec's code decides which ids have rows, once in an eviction interval. Between these times ids
are noted only, and their rows are found.

Not run on a GPU yet: there, an update waits for the numbers of ids of the buckets, and torchrec's
code does for each.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_distrec._compat.torchrec_modules import (
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
    """The buckets of one rank; ids without a row share the last one of their bucket. module:
    torchrec's."""

    no_id = ANY_ID

    def __init__(
        self, spec: MchSpec, first_bucket: int, num_buckets: int, device: torch.device, module: Any
    ) -> None:
        super().__init__(spec, first_bucket, num_buckets, device)
        settings = mch_settings(module)
        self._module = module
        self._interval = settings["interval"]
        self._policy = settings["policy"]
        self._draws = settings["filters"]
        self._hash = settings["hash_function"]
        self.ids = torch.full((self.num_rows, 1), ANY_ID, device=device)
        size = spec.bucket_rows
        self._state = {name: self.ids.new_zeros(num_buckets, size) for name in mch_state(module)}
        """(num_buckets, bucket_rows): ids, rows and what the policy keeps of them, as torchrec has
        them, sorted by id.

        Not by row, since torchrec's code would sort them again, before an update and after.
        """
        # One for all buckets, which lends its code: its constructor copies numbers to the device,
        # each a wait.
        self._bucket = module.rebuild_with_output_id_range((0, size), [0, size], device)
        self._free(self._bucket)
        self._history: list[tuple[int, Tensor]] = []
        """Of each lookup since the last update: its number, and the ids, ascending."""
        self._noted: tuple[Tensor, ...] = ()
        """Of an update: the ids of the history by buckets, their places there, and where each
        bucket ends."""
        self._lookup: tuple[Tensor, ...] = ()
        """Of a lookup in training: its ids, these ascending, and their order; then its ids and
        their rows, until these are asked for, or change."""
        # Due: an eviction interval has ended. Wait: rows were looked up, and no optimizer has
        # stepped since.
        self._is_due = False
        self._rows_wait = False
        self._set_rows({})

    @property
    def changes_ids(self) -> bool:
        """Whether ids are not sent as they are."""
        return self._hash is not None

    def sent(self, ids: Tensor) -> Tensor:
        """Return ids as they are sent: by the user's hash function. Raises IdsError: it returns
        others than it may."""
        if self._hash is None:
            return ids
        size = self.spec.num_ids or ANY_ID
        hashed: Tensor = self._hash(ids, size)
        if hashed.shape != ids.shape or bool(((hashed < 0) | (hashed >= size)).any()):
            raise IdsError(
                f"input_hash_func has returned {len(hashed)} numbers for {len(ids)} ids, or some "
                f"that are not in the range from 0 to input_hash_size - 1 = {size - 1}. Return one "
                "in that range for each id."
            )
        return hashed

    def optimizer_stepped(self) -> None:
        """The rows that were used so far may be evicted from now on."""
        self._rows_wait = False

    @torch.no_grad()
    def find(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, (num_ids,) each, counted from this rank's first one."""
        lookup = self._lookup
        self._lookup = ()
        # By identity: what was learned last is asked for next.
        if lookup and lookup[0] is ids:
            return lookup[1]
        return self._rows_of(ids)[0]

    @torch.no_grad()
    def note_lookup(self, ids: Tensor) -> Tensor:
        """Note the ids of a lookup in training. Return where the buckets of an update end, or
        nothing."""
        self.num_lookups += 1
        self._lookup = (ids, *ids.sort())
        self._history.append((self.num_lookups, self._lookup[1]))
        self._is_due |= self.num_lookups % self._interval == 0
        # A second lookup of a step would evict rows that the first one has looked up: it leaves
        # that to a later one.
        if not self._is_due or self._rows_wait:
            return ids.new_empty(0)
        ids = torch.cat([ids for _, ids in self._history])
        buckets, order = torch.sort(self._bucket_of(ids), stable=True)
        self._noted = ids, order
        numbers = torch.arange(self.num_rows // self.spec.bucket_rows, device=ids.device)
        return torch.searchsorted(buckets, numbers, right=True)

    @torch.no_grad()
    def learn(self, numbers: Sequence[int]) -> Tensor:
        """Once in an interval, let ids have rows. Return rows that an id was evicted from, and
        -1s."""
        (looked_up, ids, order) = self._lookup
        evicted = ids.new_empty(0)
        if len(numbers):
            evicted = self._update(numbers)
            self._is_due = False
        self._rows_wait = True
        is_first = first_flags(ids)
        # A search for both counts and rows. It is faster in this order: it reads what is near.
        rows, has_own = self._rows_of(ids)
        self._lookup = looked_up, torch.empty_like(rows).scatter_(0, order, rows)
        num_shared = (is_first & ~has_own).sum()
        self._count(is_first.sum(), num_shared, (evicted >= 0).sum())
        return evicted

    def state(self) -> dict[str, ChunkedTensor | Tensor]:
        """Return what is saved of this rank's part, under torchrec's names; it sorts by id what is
        here by row."""
        rows = self._state[MCH_ROWS]
        state: dict[str, ChunkedTensor | Tensor] = {}
        for name, values in self._state.items():
            row_values = values.new_empty(values.shape).scatter_(1, rows, values).view(-1)
            if name == MCH_ROWS:
                row_values = self._rows()
            chunks = [Chunk((self.first_row,), row_values)]
            state[name] = ChunkedTensor((self.spec.num_rows,), row_values.dtype, chunks)
        ends = torch.arange(self.spec.num_buckets + 1) * self.spec.bucket_rows
        state[MCH_SEGMENTS] = torch.cat([ends, torch.full((_SEGMENTS - len(ends),), -1)])
        state[MCH_LOOKUPS] = torch.tensor([self.num_lookups])
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> str:
        """Load this rank's part of a state, of full tensors or such in a file; return what is
        wrong, or ""."""
        if tuple(state[MCH_IDS].shape) != (self.spec.num_rows,):
            return (
                f"the table maps ids to {self.spec.num_rows} rows, but there are "
                f"{tuple(state[MCH_IDS].shape)}."
            )
        local = {name: self._local_part(state[name], state[MCH_ROWS]) for name in self._state}
        # An unsharded module sorts its ids over all rows; only a sharded one keeps each id at its
        # row.
        if not torch.equal(local.pop(MCH_ROWS), self._rows()):
            return (
                "its ids are in their own order. Load it into an unsharded module, and start from "
                "that."
            )
        self.ids.view(-1).copy_(local.pop(MCH_IDS))
        self._set_rows(local)
        num_lookups = state[MCH_LOOKUPS]
        self.num_lookups = int(
            num_lookups if isinstance(num_lookups, Tensor) else num_lookups.read()
        )
        ids = self.ids.view(-1)
        buckets = (self._rows() - self.first_row) // self.spec.bucket_rows
        if not torch.equal(torch.where(ids == ANY_ID, buckets, self._bucket_of(ids)), buckets):
            return (
                "some ids have rows outside of the bucket that they have with "
                f"buckets={self.spec.num_buckets} and "
                f"input_hash_size={self.spec.num_ids or ANY_ID}. Use what it was trained with."
            )
        return ""

    def noted(self) -> dict[str, Any]:
        """Return the ids that were looked up since the last update, on this rank."""
        numbers, ids = zip(*self._history, strict=True) if self._history else ((), ())
        return {"lookups": list(numbers), "ids": list(ids), "is_due": self._is_due}

    def note(self, noted: Mapping[str, Any]) -> None:
        """Continue with what `noted` has returned."""
        device = self.ids.device
        self._is_due = bool(noted["is_due"])
        noted_lookups = zip(noted["lookups"], noted["ids"], strict=True)
        self._history = [(int(number), ids.to(device)) for number, ids in noted_lookups]

    def begin(self) -> str:
        """Take this rank's part of what the unsharded module has learned, and free it; return what
        is wrong, or ""."""
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
        """Return what this rank has of a tensor that is in the order of `rows`; in files it is that
        of the rows."""
        if isinstance(value, Tensor) and isinstance(rows, Tensor):
            part = value[torch.argsort(rows)][self.first_row : self.first_row + self.num_rows]
            return part.to(self.ids.device)
        part = torch.empty(self.num_rows, dtype=torch.int64)
        value.read_into([Chunk((self.first_row,), part)])
        return part.to(self.ids.device)

    def _set_rows(self, metadata: Mapping[str, Tensor]) -> None:
        """Set what the policy keeps of each row, (num_rows,) by name, and sort it and the ids; free
        rows come last."""
        ids, rows = self.ids.view_as(self._state[MCH_IDS]).sort(dim=1, stable=True)
        self._state[MCH_IDS].copy_(ids)
        self._state[MCH_ROWS].copy_(rows)
        for name, row_values in metadata.items():
            self._state[name].copy_(row_values.view_as(rows).gather(1, rows))
        self._index()

    def _index(self) -> None:
        """Make what lookups search in: it ascends over all buckets, as ids do within each."""
        self._lookup = ()
        ids = self._state[MCH_IDS]
        rows = self._state[MCH_ROWS]
        self._sorted_ids = self._search_keys = ids.view(-1)
        if len(ids) > 1:
            buckets = torch.arange(len(ids), device=ids.device).unsqueeze(1)
            # Rows without an id come last in their bucket, as behind the largest id that it may
            # have.
            last = self._keys(ids, buckets, are_last=True)
            self._search_keys = torch.where(ids == ANY_ID, last, self._keys(ids, buckets)).view(-1)
            rows = rows + buckets * self.spec.bucket_rows
        self._rows_of_sorted = rows.view(-1)

    def _keys(self, ids: Tensor, buckets: Tensor, are_last: bool = False) -> Tensor:
        """Return numbers that ascend by the bucket, counted from this rank's first one, and within
        it by the id."""
        spec = self.spec
        if spec.num_ids:
            span = -(-spec.num_ids // spec.num_buckets)
            place = ids % span
        else:
            span = ANY_ID // spec.num_buckets + 1
            place = ids // spec.num_buckets
        # From below 0 on: the sum of all spans may be above what 64 bits can count from 0.
        return (buckets - len(self._state[MCH_IDS]) // 2) * span + (span - 1 if are_last else place)

    def _rows_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of ids, and which have one of their own; (num_ids,) each."""
        buckets = self._bucket_of(ids)
        keys = ids if len(self._state[MCH_IDS]) == 1 else self._keys(ids, buckets)
        places = torch.searchsorted(self._search_keys, keys).clamp_(max=self.num_rows - 1)
        has_own = self._sorted_ids.index_select(0, places) == ids
        shared = (buckets + 1) * self.spec.bucket_rows - 1
        rows = torch.where(has_own, self._rows_of_sorted.index_select(0, places), shared)
        return rows, has_own

    def _update(self, ends: Sequence[int]) -> Tensor:
        """Let the module choose the ids of each bucket; return rows that an id was evicted from,
        and -1s."""
        (ids, order) = self._noted
        self._noted = ()
        kinds = self._policy.metadata_info
        recorded = {}
        for kind in kinds:
            if kind.is_history_metadata:
                recorded[kind.metadata_name] = torch.zeros_like(ids)
        first = 0
        for number, lookup_ids in self._history:
            part = slice(first, first + len(lookup_ids))
            self._policy.record_history_metadata(
                number, lookup_ids, {k: v[part] for k, v in recorded.items()}
            )
            first = part.stop
        self._history = self._history[:0]
        ids = ids[order]
        recorded = {name: values[order] for name, values in recorded.items()}
        changed = [ids[:0]]
        for bucket, part in enumerate(map(slice, [0, *ends], ends)):
            if part.start < part.stop:
                recorded_part = {name: values[part] for name, values in recorded.items()}
                changed.append(self._update_bucket(bucket, ids[part], recorded_part))
        self._free(self._bucket)
        rows = torch.cat(changed)
        evicted = torch.where(self.ids.view(-1)[rows] != ANY_ID, rows, -1)
        self.ids.view_as(self._state[MCH_IDS]).scatter_(
            1, self._state[MCH_ROWS], self._state[MCH_IDS]
        )
        self._index()
        return evicted

    def _update_bucket(self, number: int, ids: Tensor, recorded: dict[str, Tensor]) -> Tensor:
        """Let the module choose the ids of one bucket; return the rows that have another id now."""
        module = self._bucket
        first_row = number * self.spec.bucket_rows
        state = {name: values[number] for name, values in self._state.items()}
        # A policy that draws does so alike on any number of ranks, and leaves the draws of the run
        # alone.
        with torch.random.fork_rng([ids.device] if ids.is_cuda else [], enabled=self._draws):
            if self._draws:
                torch.manual_seed(
                    zlib.crc32(f"{self.num_lookups} {self.first_row + first_row}".encode())
                )
            update_mch(module, state, ids, recorded, self.num_lookups)
        for name, learned in mch_state(module).items():
            # torchrec's code writes to what it has; a user's policy may have put another tensor in
            # its place.
            if learned is not state[name]:
                state[name].copy_(learned)
        changed: Tensor = module.evict()
        return changed + first_row
