"""The rows that ids have on one rank. FBGEMM's kernel finds them; ids get and lose rows here.

FBGEMM's own kernel for training has no CPU version, and on a GPU the row of an id depends on which thread comes first.
Here the outcome depends on the ids alone: those of a step are taken in ascending order, and each bucket by itself.
Whatever this writes, `fbgemm::zero_collision_hash` reads, so that TorchRec's modules can serve it.

Not run on a GPU yet: there, numbers of new ids are waited for.
"""

import time

import torch
from torch import Tensor

from lightning_distrec.sharding.mapping.rows_of_ids import RowsOfIds
from lightning_distrec.sharding.mapping.spec import MappingSpec

FREE = -1
_63_BITS = 2**63 - 1
_PROBED_AT_ONCE = 16
_EVICTION_ROUNDS = 8
"""How often ids that want the same row may choose again in a step; then they share one until a later step."""


class IdMapping(RowsOfIds):
    """The buckets of one rank.

    first_bucket, num_buckets: those that the rank owns.
    """

    def __init__(self, spec: MappingSpec, first_bucket: int, num_buckets: int, device: torch.device) -> None:
        super().__init__(spec, first_bucket, num_buckets)
        self.protected_from = 1
        """Rows that were used since this lookup wait for the optimizer, and are not evicted."""
        self.ids = torch.full((self.num_rows, 1), FREE, dtype=torch.int64, device=device)
        """The id that has each row."""
        self.used = torch.full((self.num_rows, 1), -1, dtype=torch.int32, device=device)
        """The lookup that used each row last; where rows expire by the clock, the hour when they do."""
        self.sights = self.used.new_zeros(self.used.shape if spec.policy == "lfu" else (0, 1))
        """How often the id of each row was looked up."""
        self.newcomers = self.used.new_zeros(self.used.shape if spec.min_sights > 1 else (0, 1))
        """How often ids without a row were looked up, by the row that they would probe first."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is kept for each row, (num_rows, 1) each, by name."""
        named = {"ids": self.ids, "used": self.used, "sights": self.sights, "newcomers": self.newcomers}
        unused = {"used"} if self.spec.managed and self.spec.policy == "none" else set()
        return {name: tensor for name, tensor in named.items() if tensor.numel() and name not in unused}

    @property
    def num_taken(self) -> int:
        """How many rows an id has."""
        return int((self.ids >= 0).sum())

    @property
    def changes_ids(self) -> bool:
        """Whether ids are not sent as they are."""
        return not self.spec.managed

    def sent(self, ids: Tensor) -> Tensor:
        """Return ids, (num_ids,), as they are sent: spread evenly over the buckets."""
        return mixed(ids) if self.changes_ids else ids

    def optimizer_stepped(self) -> None:
        """The rows that were used so far may be evicted from now on."""
        self.protected_from = self.now + 1

    def find(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, (num_ids,) each, counted from this rank's first one."""
        return self._probe(ids, self.spec.max_probe, may_share=True)

    @torch.no_grad()
    def learn(self, ids: Tensor) -> Tensor:
        """Let new ids have rows, and note the use of the others. Return the rows that an id was evicted from."""
        spec = self.spec
        self.now += 1
        hour = current_hour()
        stamp = hour + spec.ttl_hours if spec.counts_hours else self.now
        ids, num_sights = torch.unique(ids, return_counts=True)
        num_sights = num_sights.int()
        rows = self._probe(ids, spec.max_probe, may_share=False)
        known = rows >= 0
        self._note_use(rows[known], stamp, num_sights[known])
        new, num_sights = ids[~known], num_sights[~known]
        evicted = rows.new_empty(0)
        admitted = new
        if new.numel():
            first = self._probe(new, 1, may_share=True, among_own=True)
            if spec.min_sights > 1:
                admitted, first, num_sights = self._admitted(new, first, num_sights)
            waiting = self._take_free_rows(admitted, first, num_sights, stamp)
            if spec.policy != "none" and waiting.numel():
                before = hour if spec.counts_hours else self.protected_from
                left = (admitted[waiting], first[waiting], num_sights[waiting])
                evicted, waiting = self._evict(*left, stamp, before)
            self.counts.shared += new.numel() - admitted.numel() + waiting.numel()
        self.counts.looked_up += ids.numel()
        self.counts.evicted += evicted.numel()
        return evicted

    def _probe(self, ids: Tensor, max_probe: int, may_share: bool, among_own: bool = False) -> Tensor:
        spec = self.spec
        if not ids.numel():
            return ids.new_empty(0)
        offsets = self._bucket_of(ids) * spec.bucket_rows
        size = spec.own_rows if among_own else spec.bucket_rows
        reserves = spec.num_reserved > 0 and not among_own
        rows, _ = torch.ops.fbgemm.zero_collision_hash(
            input=ids,
            identities=self.ids,
            max_probe=min(max_probe, spec.own_rows),
            circular_probe=True,
            exp_hours=-1,
            readonly=True,
            local_sizes=torch.full_like(ids, size),
            offsets=offsets,
            disable_fallback=not may_share,
            opt_in_prob=100 if reserves else -1,
            num_reserved_slots=spec.num_reserved if reserves else -1,
        )
        return rows  # type: ignore[no-any-return]

    def _note_use(self, rows: Tensor, stamp: int, num_sights: Tensor) -> None:
        self.used.view(-1).index_fill_(0, rows, stamp)
        if self.sights.numel():
            self.sights.view(-1).index_add_(0, rows, num_sights)

    def _admitted(self, ids: Tensor, first: Tensor, num_sights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts = self.newcomers.view(-1)
        counts.index_add_(0, first, num_sights)
        sights = counts[first]
        enough = sights >= self.spec.min_sights
        counts.index_fill_(0, first[enough], 0)
        return ids[enough], first[enough], sights[enough]

    def _window(self, first: Tensor, begin: int, end: int) -> Tensor:
        """Return the rows that ids probe, (num_ids, end - begin). first: the row that each probes first."""
        offsets = first // self.spec.bucket_rows * self.spec.bucket_rows
        probed = (first - offsets).unsqueeze(1) + torch.arange(begin, end, device=first.device)
        return offsets.unsqueeze(1) + probed % self.spec.own_rows

    def _take_free_rows(self, ids: Tensor, first: Tensor, num_sights: Tensor, stamp: int) -> Tensor:
        """Give each id the first free row that it probes. Return which ids, by place, have found none."""
        waiting = torch.arange(len(ids), device=ids.device)
        num_probes = min(self.spec.max_probe, self.spec.own_rows)
        for begin in range(0, num_probes, _PROBED_AT_ONCE):
            while waiting.numel():
                window = self._window(first[waiting], begin, min(begin + _PROBED_AT_ONCE, num_probes))
                is_free = self.ids.view(-1)[window] == FREE
                finds = is_free.any(1)
                rows = window.gather(1, is_free.byte().argmax(1, keepdim=True)).squeeze(1)
                taken = self._give(ids, num_sights, waiting[finds], rows[finds], stamp)
                if not taken.numel():
                    break
                waiting = _without(waiting, taken)
        return waiting

    def _evict(
        self, ids: Tensor, first: Tensor, num_sights: Tensor, stamp: int, before: int
    ) -> tuple[Tensor, Tensor]:
        """Give ids rows that were not used since `before`. Return these rows, and which ids, by place, have found none.

        Ids that want one row choose again, as often as `_EVICTION_ROUNDS`.
        """
        waiting = torch.arange(len(ids), device=ids.device)
        num_probes = min(self.spec.max_probe, self.spec.own_rows)
        order = torch.arange(num_probes, device=ids.device)
        evicted = []
        for _ in range(_EVICTION_ROUNDS):
            window = self._window(first[waiting], 0, num_probes)
            used = self.used.view(-1)[window].long()
            ages = {"lru": used, "ttl_lru": used, "ttl": torch.zeros_like(used)}
            key = self.sights.view(-1)[window].long() if self.spec.policy == "lfu" else ages[self.spec.policy]
            key = key * num_probes + order  # the first of equal ones
            key.masked_fill_(used >= before, torch.iinfo(torch.int64).max)
            best = key.min(1, keepdim=True)
            finds = best.values.squeeze(1) < torch.iinfo(torch.int64).max
            rows = window.gather(1, best.indices).squeeze(1)
            taken = self._give(ids, num_sights, waiting[finds], rows[finds], stamp)
            if not taken.numel():
                break
            evicted.append(rows[torch.isin(waiting, taken)])
            waiting = _without(waiting, taken)
        return torch.cat(evicted) if evicted else ids.new_empty(0), waiting

    def _give(self, ids: Tensor, num_sights: Tensor, places: Tensor, rows: Tensor, stamp: int) -> Tensor:
        """Give the ids at `places` these rows; of those that want one row, the first gets it. Return their places."""
        if not places.numel():
            return places
        rows, order = torch.sort(rows, stable=True)
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = rows[1:] != rows[:-1]
        rows, places = rows[is_first], places[order[is_first]]
        self.ids.view(-1)[rows] = ids[places]
        self.used.view(-1).index_fill_(0, rows, stamp)
        if self.sights.numel():
            self.sights.view(-1)[rows] = num_sights[places]
        return places


def mixed(ids: Tensor) -> Tensor:
    """Return other numbers for ids from 0 to 2^63 - 1, each for one: their remainders are even, whatever the ids are.

    Ids often have structure, such as a kind in their upper bits, by which a few buckets would get them all. The steps
    are those of splitmix64 (Steele et al. 2014), on 63 bits.
    """
    ids = (ids ^ (ids >> 30)) * -0x40A7B892E31B1A47 & _63_BITS
    ids = (ids ^ (ids >> 27)) * -0x6B2FB644ECCEEE15 & _63_BITS
    return ids ^ (ids >> 31)


def current_hour() -> int:
    """Return the hours since 1970, in which torchrec counts how long a row is not used."""
    return int(time.time() / 3600)


def _without(places: Tensor, taken: Tensor) -> Tensor:
    return places[~torch.isin(places, taken)]
