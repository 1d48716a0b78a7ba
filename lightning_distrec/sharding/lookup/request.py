"""One lookup under way, from the features that user code gives to the ids whose rows this rank has."""

from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec.sharding.lookup.jagged import Padding


class LookupRequest:
    """One lookup under way."""

    def __init__(self, lookup: Any, features: KeyedJaggedTensor, problem: str | None) -> None:
        self.lookup = lookup
        """The ShardedLookup that prepared it."""
        self.features = features
        """In the order that torchrec knows, every id in range."""
        self.problem = problem
        """What is wrong with the ids on this rank, for all ranks to raise."""
        self.examples = 0 if features.variable_stride_per_key() else features.stride()
        """This rank's number of examples; 0 where features have unequal batch sizes."""
        self.sizes: tuple[int, int] | None = None
        """The least and the most examples of any rank, where they are compared."""
        self.padding: Padding | None = None
        self.context: Any = None
        """torchrec's, from the ids' way out to the rows' way back."""
        self.ids: Any = None
        """torchrec's, the ids whose rows this rank has; once they have arrived."""

    @property
    def sent(self) -> KeyedJaggedTensor:
        """The features as they travel."""
        return self.features if self.padding is None else self.padding.put_on(self.features)
