"""The rows that ids have on one rank. FBGEMM's kernel finds them; ids get and lose rows here.

FBGEMM's own kernel for training has no CPU version, and on a GPU the row of an id depends on which thread comes first.
Here the outcome depends on the ids alone: those of a step are taken in ascending order, and each bucket by itself.
Whatever this writes, `fbgemm::zero_collision_hash` reads, so that TorchRec's modules can serve it.

Not run on a GPU yet: there, the host waits wherever a number of ids decides a shape (docs/how_to/dynamic_ids.md).
"""

import time

import torch
from torch import Tensor

from lightning_distrec.sharding.mapping.spec import MappingSpec, RowsOfIds

FREE = -1
_63_BITS = 2**63 - 1
_PROBED_AT_ONCE = 16
_EVICTION_ROUNDS = 8
"""How often ids that want the same row may choose again in a step; then they share one until a later step."""


class IdMapping(RowsOfIds):
    """The buckets of one rank."""

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
        self._num_free: Tensor | None = None
        """Rows of each bucket that an id can have and none has; None: not counted since others wrote to `ids`."""

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
        self.protected_from = self.num_lookups + 1

    def ids_were_set(self) -> None:
        """Others than `learn` have written to `ids`."""
        self._num_free = None

    def find(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, (num_ids,) each, counted from this rank's first one."""
        return self._probe(ids, self.spec.max_probe, may_share=True)

    @torch.no_grad()
    def learn(self, ids: Tensor) -> Tensor:
        """Let new ids have rows, and note the use of the others. Return the rows that an id was evicted from."""
        spec = self.spec
        self.num_lookups += 1
        hour = current_hour()
        stamp = hour + spec.ttl_hours if spec.counts_hours else self.num_lookups
        # Ascending, each once: the outcome does not depend on the order of examples, nor on their ranks.
        ids, num_sights = torch.unique(ids, return_counts=True)
        num_sights = num_sights.int()
        rows, new, windows = self._look_for(ids)
        self.counts.looked_up += ids.numel()
        if not new.numel():
            self._note_use(rows, stamp, num_sights)
            return new
        present = (rows >= 0).nonzero().squeeze(1)
        self._note_use(rows[present], stamp, num_sights[present])
        ids, num_sights = ids[new], num_sights[new]
        if spec.min_sights > 1:
            num_sights, admitted = self._admitted(windows[:, 0], num_sights)
            ids, windows, num_sights = (values[admitted] for values in (ids, windows, num_sights))
        rows, evicted = self._take_rows(ids, windows, stamp, hour)
        has_row = (rows >= 0).nonzero().squeeze(1)
        rows = rows[has_row]
        self.ids.view(-1).index_copy_(0, rows, ids[has_row])
        self._note_use(rows, stamp, num_sights[has_row], first_use=True)
        self.counts.evicted += evicted.numel()
        self.counts.shared += new.numel() - rows.numel()
        return evicted

    def _look_for(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of ids, -1 for none; the places of these; the rows that they probe, (num_new, num_probes)."""
        # What the kernel does not find soon is compared with all that it would probe, which takes less time.
        rows = self._probe(ids, _PROBED_AT_ONCE, may_share=False)
        far = (rows < 0).nonzero().squeeze(1)
        if not far.numel():  # as in most steps, once a table knows its ids; each number below is waited for
            return rows, far, far.new_empty(0, 1)
        windows = self._windows(self._probe(ids[far], 1, may_share=True, among_own=True))
        places, probe = (_read(self.ids, windows) == ids[far].unsqueeze(1)).nonzero().unbind(1)
        rows[far[places]] = windows[places, probe].long()
        is_new = torch.ones_like(far, dtype=torch.bool).index_fill_(0, places, False).nonzero().squeeze(1)
        return rows, far[is_new], windows.index_select(0, is_new)

    def _probe(self, ids: Tensor, max_probe: int, may_share: bool, among_own: bool = False) -> Tensor:
        return probe(self.spec, ids, self.ids, self._bucket_of(ids), max_probe, may_share, among_own)

    def _note_use(self, rows: Tensor, stamp: int, num_sights: Tensor, first_use: bool = False) -> None:
        self.used.view(-1).index_fill_(0, rows, stamp)
        if self.sights.numel():
            sights = self.sights.view(-1)
            sights.index_copy_(0, rows, num_sights) if first_use else sights.index_add_(0, rows, num_sights)

    def _admitted(self, first: Tensor, num_sights: Tensor) -> tuple[Tensor, Tensor]:
        """Return how often ids were seen, by the row that each probes `first`, and which, by place, often enough."""
        # By rows, since there is no bound to ids: those that share a row may be admitted earlier.
        counts = self.newcomers.view(-1)
        counts.index_add_(0, first, num_sights)
        sights = counts[first]
        enough = sights >= self.spec.min_sights
        counts[first] = sights.masked_fill(enough, 0)
        return sights, enough.nonzero().squeeze(1)

    def _windows(self, first: Tensor) -> Tensor:
        """Return the rows that ids probe, in order, (num_ids, num_probes). first: the row that each probes first."""
        spec = self.spec
        # Half of the bytes, and of the time, where the numbers of rows allow it.
        kind = torch.int32 if self.num_rows < 2**31 else torch.int64
        num_probes = min(spec.max_probe, spec.own_rows)
        in_order = torch.arange(spec.own_rows + num_probes, dtype=kind, device=first.device) % spec.own_rows
        rows = in_order.unfold(0, num_probes, 1).index_select(0, first % spec.bucket_rows)
        return rows.add_((first // spec.bucket_rows * spec.bucket_rows).to(kind).unsqueeze(1))

    def _take_rows(self, ids: Tensor, windows: Tensor, stamp: int, hour: int) -> tuple[Tensor, Tensor]:
        """Return the row of each id, in ascending order, -1 for none, and those that were taken from another id."""
        rows = self._take_free_rows(ids, windows)
        self.used.view(-1).index_fill_(0, rows[rows >= 0], stamp)  # so that none of them is evicted at once
        waiting = (rows < 0).nonzero().squeeze(1)
        if self.spec.policy == "none" or not waiting.numel():
            return rows, rows.new_empty(0)
        limit = hour if self.spec.counts_hours else self.protected_from
        evicted = self._evict(windows.index_select(0, waiting), stamp, limit)
        rows[waiting] = evicted
        return rows, evicted[evicted >= 0]

    def _take_free_rows(self, ids: Tensor, windows: Tensor) -> Tensor:
        """Return the first free row that each id probes, -1 for none. It has the id from now on."""
        spec = self.spec
        if self._num_free is None:
            self._num_free = (self.ids.view(-1, spec.bucket_rows)[:, : spec.own_rows] == FREE).sum(1)
        free = torch.full_like(ids, -1)
        buckets = windows[:, 0] // spec.bucket_rows
        # Full buckets are not searched.
        waiting = (self._num_free[buckets] > 0).nonzero().squeeze(1)
        # Most ids find a free row among the first few; the window of max_probe rows would be read for no use.
        for block in windows.split(_PROBED_AT_ONCE, 1) if waiting.numel() else ():
            trying = waiting
            while trying.numel():
                window = block.index_select(0, trying)
                is_free = _read(self.ids, window) == FREE
                rows = window.gather(1, is_free.byte().argmax(1, keepdim=True)).squeeze(1).long()
                finds = is_free.any(1).nonzero().squeeze(1)
                trying, rows = trying[finds], rows[finds]
                first, losers = _first_of_each(rows, self.num_rows)
                # Written at once. Ids that wanted the same row see it taken, and try the next one.
                self.ids.view(-1).index_copy_(0, rows[first], ids[trying[first]])
                free[trying[first]] = rows[first]
                trying = trying[losers]
            waiting = waiting[free[waiting] < 0]
        self._num_free.index_add_(0, buckets, -(free >= 0).long())
        return free

    def _evict(self, windows: Tensor, stamp: int, limit: int) -> Tensor:
        """Return a row of each window that was not used since `limit`, -1 for none; it counts as used from now on."""
        evicted = torch.full((len(windows),), -1, device=windows.device)
        waiting = torch.arange(len(windows), device=windows.device)
        for _ in range(_EVICTION_ROUNDS):
            used = _read(self.used, windows)
            # A lookup's number, or an hour: the smallest was used, or expires, first.
            key = used
            if self.spec.policy not in ("lru", "ttl_lru"):
                key = _read(self.sights, windows) if self.spec.policy == "lfu" else torch.zeros_like(used)
                key = key.masked_fill(used >= limit, torch.iinfo(key.dtype).max)
            best = key.argmin(1, keepdim=True)  # the first of equal ones
            rows = windows.gather(1, best).squeeze(1).long()
            # num_rows is above all rows: it marks that none may be evicted.
            rows.masked_fill_(used.gather(1, best).squeeze(1) >= limit, self.num_rows)
            first, losers = _first_of_each(rows, self.num_rows)
            self.used.view(-1).index_fill_(0, rows[first], stamp)
            evicted[waiting[first]] = rows[first]
            if not losers.numel() or not first.numel():
                break
            waiting, windows = waiting[losers], windows.index_select(0, losers)
        return evicted


def probe(
    spec: MappingSpec,
    ids: Tensor,
    ids_of_rows: Tensor,
    buckets: Tensor,
    max_probe: int,
    may_share: bool = True,
    among_own: bool = False,
) -> Tensor:
    """Return the rows of ids, as FBGEMM's kernel finds them; -1 for those without a row, where they may not share one.

    ids, buckets: (num_ids,). ids_of_rows: (num_rows, 1). among_own: whether reserved rows are left out.
    """
    if not ids.numel():
        return ids.new_empty(0)
    reserves = spec.num_reserved > 0 and not among_own
    rows, _ = torch.ops.fbgemm.zero_collision_hash(
        input=ids,
        identities=ids_of_rows,
        max_probe=min(max_probe, spec.own_rows),
        circular_probe=True,
        exp_hours=-1,
        readonly=True,
        local_sizes=torch.full_like(ids, spec.own_rows if among_own else spec.bucket_rows),
        offsets=buckets * spec.bucket_rows,
        disable_fallback=not may_share,
        opt_in_prob=100 if reserves else -1,
        num_reserved_slots=spec.num_reserved if reserves else -1,
    )
    return rows  # type: ignore[no-any-return]


def _first_of_each(rows: Tensor, none: int) -> tuple[Tensor, Tensor]:
    """Return the places of the first of equal numbers below `none`, and those of the others, in ascending order."""
    in_order, order = torch.sort(rows, stable=True)
    is_first = in_order < none
    is_first[1:] &= in_order[1:] != in_order[:-1]
    first = order[is_first]
    losers = torch.ones_like(is_first).index_fill_(0, first, False)
    return first, losers.nonzero().squeeze(1)


def _read(values: Tensor, rows: Tensor) -> Tensor:
    return values.view(-1).index_select(0, rows.reshape(-1)).view(rows.shape)


def mixed(ids: Tensor) -> Tensor:
    """Return other numbers for ids from 0 to 2^63 - 1, each for one: their remainders are even, whatever the ids are.

    Ids often have structure, such as a kind in their upper bits, by which a few buckets would get them all. The steps
    are those of splitmix64 (Steele et al. 2014), on 63 bits.
    """
    # The multipliers are 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers; products wrap around.
    ids = (ids ^ (ids >> 30)) * -0x40A7B892E31B1A47 & _63_BITS
    ids = (ids ^ (ids >> 27)) * -0x6B2FB644ECCEEE15 & _63_BITS
    return ids ^ (ids >> 31)


def current_hour() -> int:
    """Return the hours since 1970, in which torchrec counts how long a row is not used."""
    return int(time.time() / 3600)
