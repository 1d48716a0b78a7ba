"""Copies of a KeyedJaggedTensor with something changed: ids, weights, padding, repeated ids."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def with_ids(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    """Return `features` with other ids, (num_ids,); lengths, weights and batch sizes stay."""
    return _like(features, ids, features.weights_or_none())


def without_ids(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    """Return unweighted `features` with other ids, (num_ids,), without those below 0: their bags become shorter."""
    keeps = ids >= 0
    ends = torch.nn.functional.pad(keeps.cumsum(0), (1, 0))[features.offsets().long()]
    lengths = ends.diff().to(features.lengths().dtype)
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=ids[keeps],
        lengths=lengths,
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def contiguous(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return `features` with contiguous tensors, as exchanges want them."""
    weights = features.weights_or_none()
    if features.values().is_contiguous() and (weights is None or weights.is_contiguous()):
        return features
    return _like(features, features.values().contiguous(), None if weights is None else weights.contiguous())


def with_weights(features: KeyedJaggedTensor, weights: Tensor | None) -> KeyedJaggedTensor:
    """Return `features` with other weights, (num_ids,), or none."""
    return _like(features, features.values(), weights)


def _like(features: KeyedJaggedTensor, ids: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=ids,
        weights=weights,
        lengths=features.lengths(),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        # These were computed when the batch was checked; to compute them again, a GPU would be waited for.
        length_per_key=None if variable else features.length_per_key(),
        inverse_indices=features.inverse_indices_or_none(),
    )


@dataclass(frozen=True)
class Padding:
    """Empty bags at the end of a batch, so that all ranks have the same number."""

    examples: int
    """Without the padding."""
    padded: int

    def pad(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return `features`, of one batch size, with empty bags up to `padded` examples."""
        # Empty bags have no ids: ids and weights stay as they are, only lengths are added.
        lengths = features.lengths().view(len(features.keys()), self.examples)
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=features.weights_or_none(),
            lengths=torch.nn.functional.pad(lengths, (0, self.padded - self.examples)).flatten(),
            stride=self.padded,
        )

    def unpad(self, rows: KeyedTensor | dict[str, JaggedTensor]) -> KeyedTensor | dict[str, JaggedTensor]:
        """Return `rows` without those of the padding: bags, or rows for each id."""
        if isinstance(rows, KeyedTensor):
            return KeyedTensor(rows.keys(), rows.length_per_key(), rows.values()[: self.examples])
        # Padding has looked up no rows.
        return {n: JaggedTensor(values=r.values(), lengths=r.lengths()[: self.examples]) for n, r in rows.items()}


class DistinctIds:
    """Ids of a lookup of rows, each sent once however often a batch repeats it; its row comes back once, too.

    The rows are repeated where they arrive, and gradients of one id are summed there before they leave. A rank decides
    for itself: others see fewer ids. Not run on a GPU yet, where the host waits for the number of different ids.

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
        expanded = {}
        for name, distinct in rows.items():
            feature, values = feature_of[name], distinct.values()
            if feature in self._places:
                # Its backward adds up the gradients of equal ids, before they are sent.
                values = values.index_select(0, self._places[feature])
            # torchrec returns ids as weights where a collection has need_indices=True.
            weights = None if distinct.weights_or_none() is None else self._ids[feature]
            expanded[name] = JaggedTensor(values=values, lengths=self._lengths[feature], weights=weights)
        return expanded

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing the memory before `stream` has read it."""
        self.sent.record_stream(stream)
        for places in self._places.values():
            places.record_stream(stream)
