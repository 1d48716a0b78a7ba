"""The rows that ids have on one rank. FBGEMM's kernel finds them; ids get and lose rows here.

FBGEMM's own kernel for training has no CPU version, and on a GPU the row of an id depends on which
thread comes first. Here the outcome depends on the ids alone: those of a step are taken in
ascending order, and each bucket by itself. Whatever this writes, `fbgemm::zero_collision_hash`
reads, so that TorchRec's modules can serve it.

Not run on a GPU yet: there, the host waits for one number in a lookup, and flags say which places
of tensors count. On a CPU, where nothing waits, only these places are kept.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from lightning_distrec import gpu
from lightning_distrec.sharding.mapping.spec import MappingSpec, RowsOfIds, first_flags

FREE = -1
_63_BITS = 2**63 - 1
_PROBED_AT_ONCE = 16
_ROUNDS = 8
"""How often ids that want the same row may choose again in a step; then they share one until a
later step."""


class IdMapping(RowsOfIds):
    """The buckets of one rank."""

    no_id = FREE

    def __init__(
        self, spec: MappingSpec, first_bucket: int, num_buckets: int, device: torch.device
    ) -> None:
        super().__init__(spec, first_bucket, num_buckets, device)
        self.protected_from = 1
        """Rows that were used since this lookup wait for the optimizer, and are not evicted."""
        self.ids = torch.full((self.num_rows, 1), FREE, dtype=torch.int64, device=device)
        self.used = torch.full((self.num_rows, 1), -1, dtype=torch.int32, device=device)
        """The lookup that used each row last; where rows expire by the clock, the hour when they
        do. -1: it is free."""
        self.sights = self.used.new_zeros(self.used.shape if spec.policy == "lfu" else (0, 1))
        """How often the id of each row was looked up."""
        self.newcomers = self.used.new_zeros(self.used.shape if spec.min_sights > 1 else (0, 1))
        """How often ids without a row were looked up, by the row that they would probe first."""
        self._noted: tuple[Tensor, ...] = ()
        """Of the lookup: ids, ascending; which is the first of equal ones; their rows; which has
        none so far."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is kept for each row, (num_rows, 1) each, by name."""
        tensors = {
            "ids": self.ids,
            "used": self.used,
            "sights": self.sights,
            "newcomers": self.newcomers,
        }
        if self.spec.managed and self.spec.policy == "none":
            del tensors["used"]
        return {name: tensor for name, tensor in tensors.items() if tensor.numel()}

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

    def rows_were_set(self) -> None:
        """Others have written to `tensors`."""
        self.used.copy_(torch.where(self.ids == FREE, -1, self.used.clamp(min=0)))

    def find(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, (num_ids,) each, counted from this rank's first one."""
        return self._probe(ids, self.spec.max_probe, may_share=True)

    @torch.no_grad()
    def note_lookup(self, ids: Tensor) -> Tensor:
        """Note the ids of a lookup in training. Return the number of those that are not found soon,
        (1,)."""
        self.num_lookups += 1
        # Ascending, each once: the outcome does not depend on the order of examples, nor on their
        # ranks.
        ids = ids.sort().values
        is_first = first_flags(ids)
        rows = self._probe(ids, _PROBED_AT_ONCE, may_share=False)
        is_far = is_first & (rows < 0)
        self._noted = ids, is_first, rows, is_far
        return is_far.sum().view(1)

    @torch.no_grad()
    def learn(self, numbers: Sequence[int]) -> Tensor:
        """Let new ids have rows, and note the use of the others. Return rows that an id was evicted
        from, and -1s."""
        (num_far,) = numbers
        (ids, is_first, rows, is_far) = self._noted
        self._noted = ()
        spec = self.spec
        hour = current_hour()
        stamp = hour + spec.ttl_hours if spec.counts_hours else self.num_lookups
        limit = hour
        if not spec.counts_hours:
            limit = 0 if spec.policy == "none" else self.protected_from
        num_sights = is_first.int()
        if self.sights.numel() or self.newcomers.numel():
            num_sights = _run_lengths(is_first)
        num_ids = is_first.sum()
        none = ids.new_zeros(())
        if not num_far:  # as in most steps, once a table knows its ids
            self.used.view(-1).index_fill_(0, rows, stamp)
            self._note_sights(rows, is_first, num_sights)
            self._count(num_ids, none, none)
            return rows[:0]
        # What the kernel does not find soon is compared with all that it would probe, which takes
        # less time.
        places = is_far.nonzero_static(size=num_far).squeeze(1)
        ids = ids[places]
        num_sights_far = num_sights[places]
        windows = self._windows(self._probe(ids, 1, may_share=True, among_own=True))
        is_known, probe_places = (
            (_read(self.ids, windows) == ids.unsqueeze(1)).byte().max(1, keepdim=True)
        )
        is_new = is_known.squeeze(1) == 0
        rows.index_copy_(
            0, places, windows.gather(1, probe_places).squeeze(1).long().masked_fill(is_new, -1)
        )
        is_present = is_first & (rows >= 0)
        _set(self.used, rows, stamp, is_present)
        self._note_sights(rows, is_present, num_sights)
        num_new = is_new.sum()
        unmapped = flagged(is_new)
        ids, windows, waiting, num_sights = (
            values[unmapped] for values in (ids, windows, is_new, num_sights_far)
        )
        if self.newcomers.numel():
            num_sights, waiting = self._admitted(windows[:, 0], num_sights, waiting)
        rows, evicted = self._take_rows(windows, waiting, stamp, limit)
        has_row = rows >= 0
        _set(self.ids, rows, ids, has_row)
        if self.sights.numel():
            _set(self.sights, rows, num_sights, has_row)
        self._count(num_ids, num_new - has_row.sum(), (evicted >= 0).sum())
        return evicted[:0] if spec.policy == "none" else evicted

    def _probe(
        self, ids: Tensor, max_probe: int, may_share: bool, among_own: bool = False
    ) -> Tensor:
        return probe(
            self.spec, ids, self.ids, self._bucket_of(ids), max_probe, may_share, among_own
        )

    def _note_sights(self, rows: Tensor, flags: Tensor, num_sights: Tensor) -> None:
        if self.sights.numel():
            self.sights.view(-1).index_add_(0, rows.clamp(min=0), num_sights * flags)

    def _admitted(
        self, first: Tensor, num_sights: Tensor, waiting: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return how often ids were seen, by the row that each probes `first`, and which wait,
        often enough seen."""
        # By rows, since there is no bound to ids: those that share a row may be admitted earlier.
        counts = self.newcomers.view(-1)
        first = first.long()
        counts.index_add_(0, first, num_sights * waiting)
        sights = counts[first]
        waiting = waiting & (sights >= self.spec.min_sights)
        # Those that are admitted begin at 0; for others this is more than any number.
        counts.scatter_reduce_(0, first, (~waiting).int() * torch.iinfo(torch.int32).max, "amin")
        return sights, waiting

    def _windows(self, first: Tensor) -> Tensor:
        """Return the rows that ids probe, in order, (num_ids, num_probes). first: the row that each
        probes first."""
        spec = self.spec
        # Half of the bytes, and of the time, where the numbers of rows allow it.
        kind = torch.int32 if self.num_rows < 2**31 else torch.int64
        num_probes = min(spec.max_probe, spec.own_rows)
        in_order = (
            torch.arange(spec.own_rows + num_probes, dtype=kind, device=first.device)
            % spec.own_rows
        )
        rows = in_order.unfold(0, num_probes, 1).index_select(0, first % spec.bucket_rows)
        return rows.add_((first // spec.bucket_rows * spec.bucket_rows).to(kind).unsqueeze(1))

    def _take_rows(
        self, windows: Tensor, waiting: Tensor, stamp: int, limit: int
    ) -> tuple[Tensor, Tensor]:
        """Return a row for each id that waits, and that row where it was another id's; -1 for none.

        windows: the rows that the ids probe; ids are in ascending order. It is the first free row,
        else one that was not used since `limit`, by the policy. Rows that are taken count as used
        from now on.
        """
        rows = torch.full((len(windows),), -1, dtype=torch.int64, device=windows.device)
        evicted = rows.clone()
        places = torch.arange(len(rows), device=rows.device)
        for _ in range(min(_ROUNDS, len(rows))):
            if not len(places):
                break
            used = _read(self.used, windows)
            # A lookup's number, or an hour: the smallest was used, or expires, first. Those of free
            # rows are below all.
            best = used.argmin(1, keepdim=True)  # the first of equal ones
            if self.spec.policy in ("lfu", "ttl"):
                full = flagged(used.gather(1, best).squeeze(1) >= 0)
                last_uses = used[full]
                # Free rows have no sights.
                key = (
                    _read(self.sights, windows[full])
                    if self.spec.policy == "lfu"
                    else last_uses.clamp(max=0)
                )
                best[full] = key.masked_fill(last_uses >= limit, torch.iinfo(key.dtype).max).argmin(
                    1, keepdim=True
                )
            targets = windows.gather(1, best).squeeze(1).long()
            last_use = used.gather(1, best).squeeze(1)
            has_choice = waiting & (last_use < limit)
            # num_rows is above all rows. Of ids that want the same row, the first has it.
            in_order, order = torch.sort(
                targets.masked_fill(~has_choice, self.num_rows), stable=True
            )
            wins = has_choice & torch.empty_like(has_choice).index_copy_(
                0, order, first_flags(in_order)
            )
            _set(self.used, targets, stamp, wins)
            rows[places] = torch.where(wins, targets, rows[places])
            evicted[places] = torch.where(wins & (last_use >= 0), targets, evicted[places])
            waiting = has_choice & ~wins
            contested = flagged(waiting)
            places = places[contested]
            windows = windows[contested]
            waiting = waiting[contested]
        return rows, evicted


def probe(
    spec: MappingSpec,
    ids: Tensor,
    ids_of_rows: Tensor,
    buckets: Tensor,
    max_probe: int,
    may_share: bool = True,
    among_own: bool = False,
) -> Tensor:
    """Return the rows of ids, as FBGEMM's kernel finds them; -1 for those without a row, where they
    may not share one.

    ids, buckets: (num_ids,). ids_of_rows: (num_rows, 1). among_own: whether reserved rows are left
    out.
    """
    if guard_or_false(ids.numel() == 0):  # torch.export does not know the number
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


def flagged(flags: Tensor) -> Tensor | slice:
    """Return the index of flagged places; of all places on a GPU, where the host would wait for
    their number."""
    return slice(None) if gpu.is_on_gpu(flags) else flags.nonzero().squeeze(1)


def _run_lengths(is_first: Tensor) -> Tensor:
    """Return how often the value of each place occurs. is_first: where equal ones begin, (num,)."""
    run = is_first.cumsum(0) - 1
    return torch.zeros_like(run, dtype=torch.int32).index_add_(
        0, run, torch.ones_like(run, dtype=torch.int32)
    )[run]


def _set(values: Tensor, rows: Tensor, new: Tensor | int, flags: Tensor) -> None:
    """Write integers to flagged rows, which must differ; other rows may be any."""
    values = values.view(-1)
    rows = rows.clamp(min=0)
    # By adding, since nothing is added where there is no flag, whatever is written to that row at
    # the same time.
    values.index_add_(0, rows, (new - _read(values, rows)).mul_(flags))


def _read(values: Tensor, rows: Tensor) -> Tensor:
    return values.view(-1).index_select(0, rows.reshape(-1)).view(rows.shape)


def mixed(ids: Tensor) -> Tensor:
    """Return other numbers for ids from 0 to 2^63 - 1, each for one: their remainders are even,
    whatever the ids are.

    Ids often have structure, such as a kind in their upper bits, by which a few buckets would get
    them all. The steps are those of splitmix64 (Steele et al. 2014), on 63 bits.
    """
    # The multipliers are 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers; products wrap
    # around.
    ids = (ids ^ (ids >> 30)) * -0x40A7B892E31B1A47 & _63_BITS
    ids = (ids ^ (ids >> 27)) * -0x6B2FB644ECCEEE15 & _63_BITS
    return ids ^ (ids >> 31)


def unmixed(numbers: Tensor) -> Tensor:
    """Return the ids of which these numbers are `mixed`."""
    # The inverses of the multipliers modulo 2^63, and of the shifts: the steps backwards.
    numbers = numbers ^ (numbers >> 31) ^ (numbers >> 62)
    numbers = numbers * 0x319642B2D24D8EC3 & _63_BITS
    numbers = numbers ^ (numbers >> 27) ^ (numbers >> 54)
    numbers = numbers * 0x16DE1B173F119089 & _63_BITS
    return numbers ^ (numbers >> 30) ^ (numbers >> 60)


def current_hour() -> int:
    """Return the hours since 1970, in which torchrec counts how long a row is not used."""
    return int(time.time() / 3600)
