"""Ids of a lookup of rows, each sent once however often a batch repeats it; its row comes back once, too.

The rows are repeated where they arrive, and gradients of one id are summed there before they leave. A rank decides for
itself: others see fewer ids. Not run on a GPU yet, where the host waits for the number of different ids.
"""

from collections.abc import Mapping, Set

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class DistinctIds:
    """The distinct ids of some features.

    features: of one lookup, of one batch size. deduplicated: those whose ids are sent once; others are as they were.
    """

    def __init__(self, features: KeyedJaggedTensor, deduplicated: Set[str]) -> None:
        keys = features.keys()
        self._lengths = dict(zip(keys, features.lengths().view(len(keys), -1), strict=True))
        self._ids = dict(zip(keys, features.values().split(features.length_per_key()), strict=True))
        self._places: dict[str, Tensor] = {}
        sent = []
        for key, ids in self._ids.items():
            if key in deduplicated:
                ids, self._places[key] = torch.unique(ids, return_inverse=True)
            sent.append(ids)
        counts = list(map(len, sent))
        self.sent = KeyedJaggedTensor(
            keys=keys,
            values=torch.cat(sent),
            lengths=torch.tensor(counts, dtype=features.lengths().dtype, device=features.values().device),
            stride=1,  # which rows belong to which example is known here
            length_per_key=counts,
        )
        """One bag for each feature."""

    def expand(self, rows: dict[str, JaggedTensor], feature_of: Mapping[str, str]) -> dict[str, JaggedTensor]:
        """Return rows of what was sent as rows of all ids. feature_of: output -> its feature."""
        found = {}
        for name, of in rows.items():
            feature, values = feature_of[name], of.values()
            if feature in self._places:
                values = values.index_select(0, self._places[feature])
            weights = None if of.weights_or_none() is None else self._ids[feature]
            found[name] = JaggedTensor(values=values, lengths=self._lengths[feature], weights=weights)
        return found

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing the memory before `stream` has read it."""
        self.sent.record_stream(stream)
        for places in self._places.values():
            places.record_stream(stream)
