"""Copies of a KeyedJaggedTensor with something changed: ids, weights, padding, repeated ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_distrec.errors import IdsError
from lightning_distrec.gpu import kept_on_device, on_device_of

LookedUp: TypeAlias = KeyedTensor | dict[str, JaggedTensor]
"""Rows of a collection: bags, or rows for each id."""


def with_ids(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    """Return `features` with other ids, (num_ids,); lengths, weights and batch sizes stay."""
    return _like(features, ids, features.weights_or_none())


def contiguous(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return `features` with contiguous tensors, as exchanges want them."""
    weights = features.weights_or_none()
    if features.values().is_contiguous() and (weights is None or weights.is_contiguous()):
        return features
    if weights is not None:
        weights = weights.contiguous()
    return _like(features, features.values().contiguous(), weights)


def with_weights(features: KeyedJaggedTensor, weights: Tensor | None) -> KeyedJaggedTensor:
    """Return `features` with other weights, (num_ids,), or none."""
    return _like(features, features.values(), weights)


def in_order(features: KeyedJaggedTensor, keys: list[str]) -> KeyedJaggedTensor:
    """Return the features of these keys, in this order."""
    permuted = features.permute([features.keys().index(key) for key in keys])
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        return permuted
    # torchrec's permute loses them.
    return _like(permuted, permuted.values(), permuted.weights_or_none(), inverse)


def _like(
    features: KeyedJaggedTensor,
    ids: Tensor,
    weights: Tensor | None,
    inverse: tuple[list[str], Tensor] | None = None,
) -> KeyedJaggedTensor:
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=ids,
        weights=weights,
        lengths=features.lengths(),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        # These were computed when the batch was checked; to compute them again, a GPU would be
        # waited for.
        length_per_key=None if variable else features.length_per_key(),
        inverse_indices=inverse or features.inverse_indices_or_none(),
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

    def unpad(self, rows: LookedUp) -> LookedUp:
        """Return `rows` without those of the padding."""
        if isinstance(rows, KeyedTensor):
            return KeyedTensor(rows.keys(), rows.length_per_key(), rows.values()[: self.examples])
        # Padding has looked up no rows.
        return {
            n: JaggedTensor(values=r.values(), lengths=r.lengths()[: self.examples])
            for n, r in rows.items()
        }


class SharedBags:
    """Bags that features have once, and that several examples share: the batch size is that of the
    inverse indices.

    features: of one lookup. Raises IdsError: batch sizes are unequal without inverse indices, or
    these do not fit.
    """

    def __init__(self, path: str, features: KeyedJaggedTensor) -> None:
        keys = features.keys()
        sizes = features.stride_per_key()
        self._features = features
        self._sizes = sizes
        names, indices = features.inverse_indices_or_none() or (
            [],
            features.lengths().new_empty(0, 0),
        )
        # As the unsharded collection, which takes indices of no numbers for none.
        self.indices = dict(zip(names, indices.unbind(), strict=True)) if indices.numel() else {}
        """Feature -> the bag of each example, (num_examples,); empty: example i has bag i."""
        if not self.indices and len(set(sizes)) > 1:
            raise IdsError(
                f"'{path}' was called with unequal batch sizes per feature, {sizes} for {keys}, "
                "and no inverse_indices. Give the KeyedJaggedTensor inverse_indices, the number of "
                "each example's bag."
            )
        missing = [key for key in keys if self.indices and key not in self.indices]
        if missing:
            raise IdsError(
                f"'{path}' was called with inverse_indices that lack the features {missing}. Add "
                "them."
            )
        if self.indices:
            used = torch.stack([self.indices[key] for key in keys])
            limits = torch.tensor(sizes, device=used.device).unsqueeze(1)
            if bool(((used < 0) | (used >= limits)).any()):
                raise IdsError(
                    f"'{path}' was called with inverse_indices beyond the batch sizes {sizes} of "
                    f"{keys}. Each must be the number of a bag of its feature."
                )

    def ordered(self, keys: list[str]) -> KeyedJaggedTensor:
        """Return the features with inverse indices of these features, in this order."""
        features = self._features
        indices = torch.stack([self.indices[key] for key in keys])
        return _like(features, features.values(), features.weights_or_none(), (keys, indices))

    def padded(self) -> KeyedJaggedTensor:
        """Return the features with empty bags, so that all have one batch size."""
        features = self._features
        size = max([*self._sizes, *map(len, self.indices.values())], default=0)
        lengths = zip(features.lengths().split(self._sizes), self._sizes, strict=True)
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=features.weights_or_none(),
            lengths=torch.cat([
                torch.nn.functional.pad(part, (0, size - length)) for part, length in lengths
            ]),
            stride=size,
            length_per_key=features.length_per_key(),
        )

    def expand(
        self, columns: dict[str, Tensor], feature_of: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Return columns of all examples, of those of the bags. feature_of: output -> its
        feature."""
        if not self.indices:
            return columns
        return {
            name: rows.index_select(0, self.indices[feature_of[name]])
            for name, rows in columns.items()
        }

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing the memory before `stream` has read it."""
        for indices in self.indices.values():
            indices.record_stream(stream)


class DistinctIds:
    """Ids of a lookup of rows, each sent once however often a batch repeats it; its row comes back
    once, too.

    The rows are repeated where they arrive, and gradients of one id are summed there before they
    leave. A rank decides for itself: others see fewer ids. Not run on a GPU yet, where the host
    waits for the numbers of different ids.

    features: of one lookup, every id in range. num_rows: of those whose ids are sent once; others
    are as they were.
    """

    def __init__(self, features: KeyedJaggedTensor, num_rows: Mapping[str, int]) -> None:
        keys = features.keys()
        self._lengths = dict(
            zip(keys, features.lengths().split(features.stride_per_key()), strict=True)
        )
        self._ids = dict(zip(keys, features.values().split(features.length_per_key()), strict=True))
        self._places: dict[str, Tensor] = {}
        sent = dict(self._ids)
        once = [key for key in keys if key in num_rows]
        if once:
            # All features in one: the host waits for the number of different ids.
            first_rows = list(accumulate([num_rows[key] for key in once], initial=0))
            ends = tuple(first_rows[1:])
            ids = list(map(self._ids.__getitem__, once))
            shifted = [part.long() + row for part, row in zip(ids, first_rows, strict=False)]
            distinct, places = torch.unique(torch.cat(shifted), return_inverse=True)
            kept_ends = kept_on_device(ends, distinct.device)
            first_places = [0, *torch.searchsorted(distinct, kept_ends).tolist()]
            parts = places.split(list(map(len, ids)))
            for i, key in enumerate(once):
                self._places[key] = parts[i] - first_places[i]
                sent[key] = distinct[first_places[i] : first_places[i + 1]] - first_rows[i]
        counts = list(map(len, sent.values()))
        self.sent = KeyedJaggedTensor(
            keys=keys,
            values=torch.cat(list(sent.values())).to(features.values().dtype),
            lengths=on_device_of(features.lengths(), counts),
            stride=1,  # which rows belong to which example is known here
            length_per_key=counts,
        )
        """One bag for each feature."""

    def expand(
        self, rows: dict[str, JaggedTensor], feature_of: Mapping[str, str]
    ) -> dict[str, JaggedTensor]:
        """Return rows of what was sent as rows of all ids. feature_of: output -> its feature."""
        expanded = {}
        for name, distinct in rows.items():
            feature = feature_of[name]
            values = distinct.values()
            if feature in self._places:
                # Its backward adds up the gradients of equal ids, before they are sent.
                values = values.index_select(0, self._places[feature])
            # torchrec returns ids as weights where a collection has need_indices=True.
            weights = None if distinct.weights_or_none() is None else self._ids[feature]
            expanded[name] = JaggedTensor(
                values=values, lengths=self._lengths[feature], weights=weights
            )
        return expanded

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing the memory before `stream` has read it."""
        self.sent.record_stream(stream)
        for places in self._places.values():
            places.record_stream(stream)
