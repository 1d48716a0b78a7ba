"""The rows that torchrec's MCHManagedCollisionModule gives to ids, bucket by bucket, on one rank.

Each bucket is a module of its own, so that the outcome does not depend on the number of ranks. Torchrec's code decides
which ids have rows, once in an eviction interval. Between these times ids are noted only, and their rows are found.

Not run on a GPU yet: there, numbers of ids are waited for.
"""

import zlib
from collections.abc import Mapping
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
from lightning_distrec.sharding.mapping.spec import ANY_ID, MchSpec, RowsOfIds

_SEGMENTS = 1025
"""Length of torchrec's tensor of the ends of buckets."""


class MchMapping(RowsOfIds):
    """The buckets of one rank; ids without a row share the last one of their bucket. module: torchrec's."""

    def __init__(self, spec: MchSpec, first_bucket: int, num_buckets: int, device: torch.device, module: Any) -> None:
        super().__init__(spec, first_bucket, num_buckets)
        settings = mch_settings(module)
        self._module, self._interval, self._policy = module, settings["interval"], settings["policy"]
        self._draws, self._hash = settings["filters"], settings["hash_function"]
        self.ids = torch.full((self.num_rows, 1), ANY_ID, device=device)
        """The id that has each row; ANY_ID: none."""
        names = [name for name in mch_state(module) if name not in (MCH_IDS, MCH_ROWS)]
        self._metadata = {name: torch.zeros(self.num_rows, dtype=torch.int64, device=device) for name in names}
        """What the policy keeps for each row, by its name in the state_dict."""
        self._history: list[tuple[int, Tensor, Tensor]] = []
        """Of each lookup since the last update: its number, the distinct ids, and how often each occurs."""
        # Due: an eviction interval has ended. Wait: rows were looked up, and no optimizer has stepped since.
        self._is_due, self._rows_wait = False, False
        self._index()

    @property
    def num_taken(self) -> int:
        """How many rows an id has."""
        return len(self._sorted_ids)

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
        if hashed.shape != ids.shape or (hashed.numel() and not 0 <= int(hashed.min()) <= int(hashed.max()) < size):
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
    def learn(self, ids: Tensor) -> Tensor:
        """Note the ids, and once in an interval let them have rows. Return the rows that an id was evicted from."""
        self.num_lookups += 1
        distinct, times = torch.unique(ids, return_counts=True)
        self._history.append((self.num_lookups, distinct, times))
        self._is_due |= self.num_lookups % self._interval == 0
        evicted = ids.new_empty(0)
        # A second lookup of a step would evict rows that the first one has looked up: it leaves that to a later one.
        if self._is_due and not self._rows_wait:
            evicted = self._update()
            self._is_due = False
        self._rows_wait = True
        self.counts.looked_up += len(distinct)
        self.counts.shared += len(distinct) - int(self._own_rows(distinct)[1].sum())
        self.counts.evicted += len(evicted)
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
        buckets = self._bucket_of(self._sorted_ids)
        if not torch.equal(buckets, self._rows_of_sorted // self.spec.bucket_rows):
            return (
                f"some ids have rows outside of the bucket that they have with buckets={self.spec.num_buckets} and "
                f"input_hash_size={self.spec.num_ids or ANY_ID}. Use what it was trained with."
            )
        return ""

    def noted(self) -> dict[str, Any]:
        """Return the ids that were looked up since the last update, on this rank."""
        numbers, ids, times = zip(*self._history, strict=True) if self._history else ((), (), ())
        return {"lookups": list(numbers), "ids": list(ids), "times": list(times), "is_due": self._is_due}

    def note(self, noted: Mapping[str, Any]) -> None:
        """Continue with what `noted` has returned."""
        device, self._is_due = self.ids.device, bool(noted["is_due"])
        noted_lookups = zip(noted["lookups"], noted["ids"], noted["times"], strict=True)
        self._history = [(int(number), ids.to(device), times.to(device)) for number, ids, times in noted_lookups]

    def begin(self) -> str:
        """Take this rank's part of what the unsharded module has learned, and free it; return what is wrong, or ""."""
        learned = mch_state(self._module)
        if learned[MCH_IDS].is_meta or not len(learned[MCH_IDS]):
            return ""
        problem = self.load({**learned, MCH_LOOKUPS: self._module.state_dict()[MCH_LOOKUPS]})
        # Every rank has the unsharded module's ids, of all rows.
        empty = self.ids.new_empty(0)
        set_mch_state(self._module, dict.fromkeys(learned, empty), torch.tensor([self.num_lookups]))
        return problem

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
        """Sort the ids that have a row, for lookups."""
        ids = self.ids.view(-1)
        rows = (ids != ANY_ID).nonzero().view(-1)
        self._sorted_ids, order = torch.sort(ids[rows])
        self._rows_of_sorted = rows[order]

    def _own_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of ids, and which have one of their own; (num_ids,) each."""
        if not self.num_taken:
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        places = torch.searchsorted(self._sorted_ids, ids).clamp_(max=self.num_taken - 1)
        return self._rows_of_sorted[places], self._sorted_ids[places] == ids

    def _update(self) -> Tensor:
        """Let the module choose the ids of each bucket; return the rows that an id was evicted from."""
        # Policies count how often an id occurs. Numbers are read together: on a GPU the host waits for each read.
        counts = torch.stack([times.sum() for *_, times in self._history]).tolist()
        pairs = zip(self._history, counts, strict=True)
        ids = torch.cat([ids.repeat_interleave(times, output_size=count) for (_, ids, times), count in pairs])
        kinds = self._policy.metadata_info
        recorded = {kind.metadata_name: torch.zeros_like(ids) for kind in kinds if kind.is_history_metadata}
        first = 0
        for (number, *_), count in zip(self._history, counts, strict=True):
            part = slice(first, first + count)
            self._policy.record_history_metadata(number, ids[part], {k: v[part] for k, v in recorded.items()})
            first += count
        self._history = []
        had_id = self.ids.view(-1) != ANY_ID
        buckets, order = torch.sort(self._bucket_of(ids), stable=True)
        ids, recorded = ids[order], {name: values[order] for name, values in recorded.items()}
        numbers = torch.arange(self.num_rows // self.spec.bucket_rows, device=ids.device)
        ends = torch.searchsorted(buckets, numbers, right=True).tolist()
        evicted = []
        for bucket, part in enumerate(map(slice, [0, *ends], ends)):
            if part.start < part.stop:
                recorded_part = {name: values[part] for name, values in recorded.items()}
                evicted.append(self._update_bucket(bucket, ids[part], recorded_part))
        self._index()
        rows = torch.cat(evicted) if evicted else ids
        return rows[had_id[rows]]

    def _update_bucket(self, bucket: int, ids: Tensor, recorded: dict[str, Tensor]) -> Tensor:
        """Let the module choose the ids of one bucket; return the rows that another id has now."""
        size, device = self.spec.bucket_rows, self.ids.device
        rows = slice(bucket * size, (bucket + 1) * size)
        first_row = self.first_row + rows.start
        # A module for this bucket, which lives for the update only: what it learns is copied back.
        module = self._module.rebuild_with_output_id_range((first_row, first_row + size), [first_row, first_row + size])
        module.to(device)
        tensors = {MCH_IDS: self.ids.view(-1), **self._metadata}
        state = {name: value[rows].clone() for name, value in tensors.items()}
        numbers = torch.arange(first_row, first_row + size, device=device)
        set_mch_state(module, {**state, MCH_ROWS: numbers}, torch.tensor([self.num_lookups], device=device))
        # A policy that draws does so alike on any number of ranks, and leaves the draws of the run alone.
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=self._draws):
            if self._draws:
                torch.manual_seed(zlib.crc32(f"{self.num_lookups} {first_row}".encode()))
            update_mch(module, ids, recorded, self.num_lookups)
        learned = mch_state(module)
        # torchrec has sorted its tensors by id; here they are by row.
        order = learned[MCH_ROWS] - self.first_row
        for name, value in tensors.items():
            value[order] = learned[name]
        changed: Tensor = module.evict()
        return changed - self.first_row
