"""Copies of a KeyedJaggedTensor with something changed: ids, weights, padding."""

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
    before = torch.nn.functional.pad(keeps.cumsum(0), (1, 0))[features.offsets().long()]
    lengths = before.diff().to(features.lengths().dtype)
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
        lengths = features.lengths().view(len(features.keys()), self.examples)
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=features.weights_or_none(),
            lengths=torch.nn.functional.pad(lengths, (0, self.padded - self.examples)).flatten(),
            stride=self.padded,
        )

    def unpad_rows(self, rows: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return `rows`, one for each id, without the empty bags of the padding."""
        return {
            name: JaggedTensor(values=of.values(), lengths=of.lengths()[: self.examples]) for name, of in rows.items()
        }

    def unpad(self, bags: KeyedTensor) -> KeyedTensor:
        """Return `bags` without those of the padding."""
        return KeyedTensor(bags.keys(), bags.length_per_key(), bags.values()[: self.examples])
