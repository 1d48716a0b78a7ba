"""One lookup in flight, from the features that user code gives to the ids whose rows this rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec._compat.torchrec_ids import WeightRoute
from lightning_distrec.sharding.lookup.distinct_ids import DistinctIds
from lightning_distrec.sharding.lookup.jagged import Padding

if TYPE_CHECKING:
    from lightning_distrec.sharding.lookup.sharded_lookup import ShardedLookup
    from lightning_distrec.sharding.lookup.short_path.ids import ShortIds


class LookupRequest:
    """One lookup in flight."""

    def __init__(
        self,
        lookup: ShardedLookup,
        features: KeyedJaggedTensor,
        problem: Exception | None,
        form: int,
        late_weights: Tensor | None = None,
    ) -> None:
        self.lookup = lookup
        """What prepared it."""
        self.features = features
        """In the order that torchrec knows, every id in range; with places for weights that come late."""
        self.late_weights = late_weights
        """Weights that follow the ids, in the order of the call, or what stands for them; see weights_exchange.py."""
        self.learns = False
        """Whether these need a gradient; known once it was looked up."""
        self.weight_routes: list[WeightRoute | None] = []
        """Where these are sent, for each sharding type, once the ids are."""
        self.distinct: DistinctIds | None = None
        """What is sent of them, where repeated ids are sent once."""
        self.problem = problem
        """What is wrong with the lookup on this rank, for all ranks to raise."""
        self.form = form
        """What must be alike on all ranks; see lookup_consensus.py."""
        self.num_examples = 0 if features.variable_stride_per_key() else features.stride()
        """This rank's number of examples, or of ids for an nn.Embedding; 0 where features have unequal batch sizes."""
        if lookup.counts_ids:
            self.num_examples = features.values().numel()
        self.sizes: tuple[int, int] | None = None
        """The minimum and maximum number of examples over ranks, where they are compared."""
        self.short: ShortIds | None = None
        """Its ids on the short path; None: torchrec's modules exchange them."""
        self.received: tuple[int, ...] | None = None
        """How many ids this rank gets from each rank, once that is known."""
        self.padding: Padding | None = None
        self.context: Any = None
        """torchrec's, from the input dist to the output dist."""
        self.ids: Any = None
        """torchrec's: the ids whose rows this rank has, once they have arrived."""

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
