"""One lookup in flight, from the features that user code gives to the ids whose rows this rank has.

Before ids are sent ranks agree that all can send them, in one form. That travels along with the
sizes of the ids, or in one small all-reduce where these must be known before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec import errors
from lightning_distrec._compat.torchrec_ids import WeightRoute, record_stream
from lightning_distrec.ranks import Ranks
from lightning_distrec.sharding.lookup.jagged import DistinctIds, LookedUp, Padding, SharedBags
from lightning_distrec.sharding.lookup.lookup_setup import LookupSetup

if TYPE_CHECKING:
    from lightning_distrec.sharding.lookup.short_path import ShortIds, ShortPath

_TYPES = (
    None,
    torch.int64,
    torch.int32,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
)
_LEARNED = "any type that need a gradient"
_FORMS = list(product(_TYPES, _TYPES, (*_TYPES, _LEARNED), (False, True)))
"""Type of ids, of lengths, of weights, whether batch sizes are unequal."""
NO_FORM = 0


@dataclass(kw_only=True, eq=False)
class LookupRequest:
    """One lookup in flight."""

    setup: LookupSetup
    features: KeyedJaggedTensor
    """In the order that torchrec knows, every id in range; with places for weights that come
    late."""
    problem: Exception | None = None
    """What is wrong with the lookup on this rank, for all ranks to raise."""
    form: int = NO_FORM
    late_weights: Tensor | None = None
    """Weights that follow the ids, in the order of the call, or what stands for them; see
    weights_exchange.py."""
    learns: bool = False
    """Whether these need a gradient; known once it was looked up."""
    weight_routes: list[WeightRoute | None] = field(default_factory=list)
    """Where these are sent, for each sharding type, once the ids are."""
    distinct: DistinctIds | None = None
    """What is sent of them, where repeated ids are sent once."""
    bags: SharedBags | None = None
    """How bags are expanded to examples here; None: each example has its own, or torchrec's module
    does it."""
    sizes: tuple[int, int] | None = None
    """The minimum and maximum number of examples over ranks, where they are compared."""
    short: ShortIds | None = None
    """Its ids on the short path; None: torchrec's modules exchange them."""
    received: tuple[int, ...] | None = None
    """How many ids this rank gets from each rank, once that is known."""
    padding: Padding | None = None
    context: Any = None
    """torchrec's, from the input dist to the output dist."""
    ids: Any = None
    """torchrec's: the ids whose rows this rank has, once they have arrived."""
    num_examples: int = field(init=False)
    """This rank's number of examples, or of ids for an nn.Embedding; 0 where it is not known."""

    def __post_init__(self) -> None:
        features = self.features
        # nn.Embedding has one bag for a call of any shape: its ids are counted in place of
        # examples.
        is_variable = features.variable_stride_per_key()
        self.num_examples = (
            0 if is_variable and features.inverse_indices_or_none() is None else features.stride()
        )
        if self.setup.counts_ids:
            self.num_examples = features.values().numel()

    @property
    def counts(self) -> list[int] | None:
        """How many ids each rank gets from this one; None: that is exchanged with the ids."""
        return None if self.short is None else self.short.counts

    @property
    def padded_features(self) -> KeyedJaggedTensor:
        """The features as they are sent."""
        if self.distinct is not None:
            return self.distinct.sent
        return self.features if self.padding is None else self.padding.pad(self.features)

    def pad(self) -> None:
        """Pad this rank's batch to the largest of all ranks where it must be; `sizes` is known
        then."""
        features = self.features
        sizes = self.sizes
        if not self.setup.pooled:
            # torchrec cannot reshape the rows of no examples.
            if not self.distinct and features.stride() == 0:
                self.padding = Padding(0, 1)
        elif self.setup.needs_equal_batches and sizes is not None and sizes[0] != sizes[1]:
            self.padding = Padding(features.stride(), sizes[1])

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing the memory of what has arrived before `stream` has read
        it."""
        # The features too: pooling of means and padding read their lengths in the step.
        if self.short is None:
            record_stream(self.ids, self.context, self.features, stream)
        else:
            self.features.record_stream(stream)
            for tensor in self.short.arrived:
                tensor.record_stream(stream)
        for part in (self.distinct, self.bags):
            if part is not None:
                part.record_stream(stream)
        for route in filter(None, self.weight_routes):
            route.sent_places.record_stream(stream)

    def restore(self, rows: Any, features: dict[str, str]) -> LookedUp:
        """Return rows of what was sent as rows of the features. features: output -> its feature."""
        if self.distinct is not None:
            rows = self.distinct.expand(rows, features)
        return rows if self.padding is None else self.padding.unpad(rows)


def form_of(features: KeyedJaggedTensor, learns_weights: bool = False) -> int:
    """Return a number for what must be alike on all ranks: types of ids, lengths and weights, and
    equal batch sizes.

    learns_weights: whether the weights need a gradient; their type does not count then, float32 is
    sent.
    """
    weights = features.weights_or_none()
    weights_type: Any = None if weights is None else weights.dtype
    if learns_weights:
        weights_type = _LEARNED
    parts = (
        features.values().dtype,
        features.lengths().dtype,
        weights_type,
        features.variable_stride_per_key(),
    )
    return _number_form(parts)


@cache
def _number_form(parts: Any) -> int:
    return _FORMS.index(parts)


def _describe_form(form: int) -> str:
    ids, lengths, weights, is_unequal = _FORMS[form]
    words = [
        f"ids of {ids}",
        f"lengths of {lengths}",
        "no weights" if weights is None else f"weights of {weights}",
    ]
    return ", ".join(words + (["a batch size for each feature"] if is_unequal else []))


class LookupConsensus:
    """What ranks agree on about each lookup of the collection at `path`."""

    def __init__(self, path: str, ranks: Ranks) -> None:
        self._path = path
        self._ranks = ranks

    def agree(self, request: LookupRequest, path: ShortPath | None = None) -> tuple[int, int]:
        """Collective. Return the minimum and maximum of examples over ranks. All ranks raise what
        is wrong on one.

        path: brings `request.received` too, also where the request cannot go it on this rank: the
        others do not know of that yet.
        """
        # A separate exchange, for lookups whose sizes must be known before ids are sent.
        fine, examples, form = self._values(request)
        # The minima of a form and of its negative are opposite only where all ranks have one form.
        values = (fine, examples, -examples, form, -form)
        if path is None:
            pending = self._ranks.start_all_reduce_min(*values)
        else:
            counts = [[count] for count in request.counts or [0] * path.num_ranks]
            place = path.sharding.group, request.setup.device
            pending = self._ranks.start_min_and_exchange(values, counts, *place)
        fine, smallest, negated, form, negated_form = pending.wait()
        request.received = tuple(chain.from_iterable(pending.received))
        if not fine or form != -negated_form:
            self._raise(request)
        return smallest, -negated

    def values_to_send(self, request: LookupRequest) -> tuple[int, ...]:
        """Return what this rank sends along with its sizes, for `agree_on`."""
        return self._ranks.with_flags(*self._values(request))

    def agree_on(self, gathered: list[list[int]] | None, request: LookupRequest) -> tuple[int, int]:
        """Return as `agree` does, given every rank's values; None: nothing was exchanged, and ranks
        agree now."""
        if gathered is None:
            return self.agree(request)
        fine, examples, forms = zip(*self._ranks.take_flags(gathered), strict=True)
        if not all(fine) or len(set(forms)) > 1:
            self._raise(request)
        return min(examples), max(examples)

    def _values(self, request: LookupRequest) -> tuple[int, int, int]:
        return int(request.problem is None), request.num_examples, request.form

    def _raise(self, request: LookupRequest) -> None:
        # Every rank comes here: it has decided by what all have exchanged.
        problem = request.problem
        # Name and text, no pickle: an exception of the user's may not be picklable, or not be made
        # from a text.
        described = None if problem is None else (type(problem).__name__, str(problem))
        per_rank = self._ranks.all_gather((described, request.form))
        for rank, (error, _) in enumerate(per_rank):
            if error is None:
                continue
            # This rank's own exception has the traceback of where it failed.
            if rank == self._ranks.rank and problem is not None:
                raise problem
            name, text = error
            kind = getattr(errors, name, None)
            if kind is None:
                raise errors.RankError(
                    f"rank {rank} failed in a lookup of '{self._path}': {name}: {text}"
                )
            raise kind(text if kind is errors.IdsError else f"rank {rank}: {text}")
        forms = "; ".join(
            f"rank {rank}: {_describe_form(form)}" for rank, (_, form) in enumerate(per_rank)
        )
        raise errors.IdsError(
            f"ranks called '{self._path}' with ids that cannot be exchanged with each other: "
            f"{forms}. Give all ranks the same types, for example by .long() in the collate "
            "function."
        )
