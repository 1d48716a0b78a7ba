"""Which ids a table without a fixed range of ids gives rows: its buckets, how it probes, and what
it evicts.

An id belongs to a bucket, a bucket owns a block of rows, and a rank owns whole buckets. The number
of buckets does not depend on the number of ranks, and ids compete for rows within their bucket
only: the mapping is that of one process.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule

from lightning_distrec._compat.torchrec_modules import (
    COLLISIONS,
    hash_zch_difference,
    hash_zch_settings,
    mch_difference,
    mch_settings,
    modules_of,
    returns_remapped_features,
)
from lightning_distrec.option_values import plain_fields

Policy = Literal["none", "lru", "lfu", "ttl", "ttl_lru"]

ANY_ID = 2**63 - 1
"""Ids are below it; -1 marks a row that no id has."""


@dataclass(frozen=True)
class MappingSpec:
    """How one table maps ids to rows."""

    num_rows: int
    num_buckets: int
    num_ids: int = 0
    """Ids are below it, and a bucket has a block of them; 0: any ids, and an id's bucket is its
    remainder."""
    max_probe: int = 128
    """How many rows of its bucket an id may have."""
    num_reserved: int = 0
    """The last rows of a bucket, which ids without a row of their own share. 0: they share the
    others' rows."""
    policy: Policy = "none"
    """lru, lfu: the least recently, or least often, used row goes to a new id. ttl: a row that was
    not used for `ttl_hours`, the first in probing order; ttl_lru: the one that was used longest
    ago."""
    ttl_hours: int = 0
    min_sights: int = 1
    """How often an id is looked up in training until it gets a row of its own."""
    managed: bool = False
    """Whether it is that of a ManagedCollisionCollection, whose names its state has."""

    def __post_init__(self) -> None:
        plain_fields(self)

    @property
    def bucket_rows(self) -> int:
        """Rows of one bucket."""
        return self.num_rows // self.num_buckets

    @property
    def own_rows(self) -> int:
        """Rows of one bucket that an id can have for itself."""
        return self.bucket_rows - self.num_reserved

    @property
    def counts_hours(self) -> bool:
        """Whether rows expire by the clock."""
        return self.policy in ("ttl", "ttl_lru")

    @property
    def limit(self) -> int:
        """Ids are below it."""
        return self.num_ids or ANY_ID

    @property
    def buckets_option(self) -> str:
        """What sets the number of buckets."""
        return (
            "total_num_buckets of its HashZchManagedCollisionModule" if self.managed else "buckets"
        )

    def buckets_obstacle(self, num_ranks: int) -> str:
        """Return why this number of ranks cannot own whole buckets; "" if they can."""
        if self.num_buckets % num_ranks == 0:
            return ""
        buckets = f"{self.num_buckets} buckets" if self.num_buckets > 1 else "one bucket"
        return (
            f"its ids have {buckets}, which {num_ranks} ranks cannot share evenly. Set "
            f"{self.buckets_option} to a multiple of {num_ranks}, for good: the mapping depends on "
            "it"
        )


@dataclass(frozen=True)
class MchSpec(MappingSpec):
    """The same of torchrec's MCHManagedCollisionModule, which has the rest: its eviction policy and
    interval."""

    hashes: bool = False
    """Whether a function of the user maps any id to one below `num_ids`."""

    @property
    def buckets_option(self) -> str:
        """What sets the number of buckets."""
        return "buckets of its MCHManagedCollisionModule"

    @property
    def limit(self) -> int:
        """Ids are below it."""
        return ANY_ID if self.hashes else super().limit


_BUCKETS = (20_160, 5_040, 720, 120, 12)
"""Numbers that many numbers of ranks divide."""
# As many rows as an id may probe (MappingSpec.max_probe).
_MIN_BUCKET_ROWS = 128
_RESERVED = 64
"""One of this number of rows of a bucket is shared by ids without a row of their own, and at least
one."""


def dynamic_spec(rows: int, buckets: int | None, policy: Policy, min_sights: int) -> MappingSpec:
    """Return the spec of a table of at least `rows` rows. buckets: None chooses a number by `rows`
    only."""
    if buckets is None:
        buckets = next(
            (number for number in _BUCKETS if rows >= number * _MIN_BUCKET_ROWS),
            min(12, -(-rows // 2)),
        )
    # One row for an id, and one that is shared.
    bucket_rows = max(2, -(-rows // buckets))
    return MappingSpec(
        num_rows=bucket_rows * buckets,
        num_buckets=buckets,
        num_reserved=max(1, bucket_rows // _RESERVED),
        policy=policy,
        min_sights=min_sights,
    )


def spec_of(module: Any, name: str) -> MappingSpec | str:
    """Return the spec of one of torchrec's managed collision modules, or why it is not sharded.
    name: its table's."""
    # By exact type: a subclass may map ids in another way, which buckets on several ranks would not
    # reproduce.
    if type(module) is MCHManagedCollisionModule:
        return _spec_of_mch(module)
    if type(module) is not HashZchManagedCollisionModule:
        return f"{type(module).__name__} may map ids in another way than TorchRec's own modules"
    reason = hash_zch_difference(module, name)
    if reason:
        return f"HashZchManagedCollisionModule with {reason} is not sharded"
    rows = module.output_size()
    buckets = module.buckets()
    settings = hash_zch_settings(module)
    policies: dict[str, Policy] = {"": "none", "LRU_EVICTION": "ttl_lru"}
    return MappingSpec(
        num_rows=rows,
        num_buckets=buckets,
        num_ids=module.input_size(),
        max_probe=settings["max_probe"],
        # As get_reserved_slots_per_bucket of torchrec's module.
        num_reserved=math.floor(rows * settings["percent_reserved"] / 100 / buckets),
        policy=policies.get(settings["policy"], "ttl"),
        ttl_hours=settings["ttl_hours"],
        managed=True,
    )


def _spec_of_mch(module: MCHManagedCollisionModule) -> MchSpec | str:
    rows = module.output_size()
    buckets = module.buckets()
    reason = mch_difference(module)
    if reason:
        return f"MCHManagedCollisionModule with {reason} is not sharded"
    # Buckets of equal size, and in each a row for ids beside the one that is shared.
    if rows % buckets or rows < 2 * buckets:
        return (
            f"zch_size={rows} must be a multiple of buckets={buckets}, and at least twice as much"
        )
    num_ids = 0 if module.input_size() == ANY_ID else module.input_size()
    return MchSpec(
        rows,
        buckets,
        num_ids,
        managed=True,
        hashes=mch_settings(module)["hash_function"] is not None,
    )


def specs_of(managed: nn.Module) -> dict[str, MappingSpec] | str:
    """Return the specs of a ManagedCollisionEmbedding(Bag)Collection by table, or why it stays
    unsharded."""
    if returns_remapped_features(managed):
        return (
            "return_remapped_features=True asks for rows' numbers, which the ranks that look up do "
            "not have"
        )
    collisions = managed.get_submodule(COLLISIONS)
    if type(collisions) is not ManagedCollisionCollection:
        return f"{type(collisions).__name__} may map ids in another way"
    specs: dict[str, MappingSpec] = {}
    for name, module in modules_of(collisions).items():
        spec = spec_of(module, name)
        if isinstance(spec, str):
            return f"table '{name}': {spec}"
        specs[name] = spec
    return specs


@dataclass
class MappingCounts:
    """What has happened on this rank since the start of the run."""

    looked_up: int = 0
    """Distinct ids of each lookup in training."""
    shared: int = 0
    """Those of them that had no row of their own."""
    evicted: int = 0
    """Rows that were taken from an id."""


class RowsOfIds(ABC):
    """The buckets of one rank. In training, ids are noted, numbers of them are read, and then they
    get rows.

    Between the two the host waits for the device: once, whatever the number of tables.
    """

    ids: Tensor
    """The id that has each row, (num_rows, 1)."""
    no_id: int
    """In `ids` where a row has none."""

    def __init__(
        self, spec: MappingSpec, first_bucket: int, num_buckets: int, device: torch.device
    ) -> None:
        self.spec = spec
        self.first_row = first_bucket * spec.bucket_rows
        self.num_rows = num_buckets * spec.bucket_rows
        self.initial_rows = torch.empty(0, 0)
        """What a row starts from when an id gets another's, alike on all ranks."""
        self.num_lookups = 0
        """Counts the lookups in training."""
        self._first_bucket = first_bucket
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)

    @property
    def counts(self) -> MappingCounts:
        """What has happened. The device is waited for."""
        return MappingCounts(*self._counts.tolist())

    @abstractmethod
    def note_lookup(self, ids: Tensor) -> Tensor:
        """Note the ids of a lookup in training. Return the numbers that `learn` needs."""

    @abstractmethod
    def learn(self, numbers: Sequence[int]) -> Tensor:
        """Let new ids have rows, and note the use of the others. Return rows that an id was evicted
        from, and -1s."""

    @abstractmethod
    def find(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, (num_ids,) each, counted from this rank's first one."""

    @abstractmethod
    def optimizer_stepped(self) -> None:
        """The rows that were used so far may be evicted from now on."""

    @property
    def num_taken(self) -> int:
        """How many rows an id has. The device is waited for."""
        return int((self.ids != self.no_id).sum())

    @property
    def changes_ids(self) -> bool:
        """Whether ids are not sent as they are."""
        return False

    def sent(self, ids: Tensor) -> Tensor:
        """Return ids, (num_ids,), as they are sent to the rank that owns their bucket."""
        return ids

    def _count(self, *numbers: Tensor) -> None:
        self._counts += torch.stack(numbers)

    def _bucket_of(self, ids: Tensor) -> Tensor:
        """Return the buckets of ids, (num_ids,) each, counted from this rank's first one."""
        return bucket_of(self.spec, ids) - self._first_bucket


def first_flags(values: Tensor) -> Tensor:
    """Return which of the ascending `values`, (num,), is not that before it."""
    is_first = torch.ones_like(values, dtype=torch.bool)
    is_first[1:] = values[1:] != values[:-1]
    return is_first


def bucket_of(spec: MappingSpec, ids: Tensor) -> Tensor:
    """Return the buckets of ids, (num_ids,) each."""
    # As torchrec's input dist sends them: by blocks of ids, rounded up, or by remainders where
    # there is no range.
    return ids // -(-spec.num_ids // spec.num_buckets) if spec.num_ids else ids % spec.num_buckets
