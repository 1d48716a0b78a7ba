"""What user code calls a sharded collection with, made into what torchrec takes, or refused.

torchrec's sharded modules remember the keys of their first call, use weights that the unsharded collection would
ignore, and leave out what they cannot do; here each call is brought into one form.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.lookup.jagged import contiguous, without_weights
from lightning_distrec.sharding.tables import Table, feature_names


class InputDist:
    """The features of one collection's calls.

    tables: the collection's tables, in its order.
    dense_copies: full names of those that are data_parallel. summed_means: outputs that arrive as sums over ranks and
    are to become means. known_keys: the features in the order in which torchrec got them so far, if it did.
    """

    def __init__(
        self,
        tables: list[Table],
        dense_copies: list[str],
        summed_means: Mapping[str, str],
        known_keys: list[str] | None,
    ) -> None:
        self._path = tables[0].collection
        self._features = feature_names(tables)
        self._dense_copies = dense_copies
        self._summed_means = summed_means
        self._needs_weights = bool(getattr(tables[0].module, "is_weighted", lambda: False)())
        self._keeps_weights = self._needs_weights or tables[0].plain is not None or not tables[0].pooled
        self.keys = known_keys
        """The features in the order in which torchrec gets them; None before the first call."""

    def bring_in(self, features: Any) -> KeyedJaggedTensor:
        """Return the features with the weights that count, in the order that torchrec knows.

        Raises ShardingError: no KeyedJaggedTensor, a feature is missing, weights are missing or need a gradient, or
        features have unequal batch sizes where a table cannot take them.
        """
        return self._in_known_order(contiguous(self._with_right_weights(features)))

    def _with_right_weights(self, features: Any) -> KeyedJaggedTensor:
        if not isinstance(features, KeyedJaggedTensor):
            raise ShardingError(
                f"'{self._path}' was called with a {type(features).__name__}; sharded tables take a KeyedJaggedTensor."
            )
        weights = features.weights_or_none()
        if weights is not None and weights.requires_grad:
            raise ShardingError(
                f"'{self._path}' was called with ids whose weights need a gradient, which does not travel back across "
                "ranks. Detach the weights, or multiply the looked up vectors instead."
            )
        if weights is None and self._needs_weights:
            raise ShardingError(
                f"'{self._path}' is weighted, and was called with ids that have no weights. Give the KeyedJaggedTensor "
                "weights, of 1 for example."
            )
        return features if weights is None or self._keeps_weights else without_weights(features)

    def _in_known_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if features.variable_stride_per_key():
            self._refuse_unequal_sizes(features.values().device)
        keys = features.keys()
        if keys == self.keys:
            return features
        missing = [name for name in self._features if name not in keys]
        if missing:
            raise ShardingError(
                f"'{self._path}' needs the features {missing}, but was called with {keys}. "
                "Give the KeyedJaggedTensor all features of the collection; empty bags are fine."
            )
        if self.keys is None:
            self.keys = list(keys) if set(keys) == set(self._features) else self._features
        return features if keys == self.keys else features.permute([keys.index(name) for name in self.keys])

    def _refuse_unequal_sizes(self, device: torch.device) -> None:
        if self._dense_copies and device.type == "cpu":
            raise ShardingError(
                f"'{self._path}' was called with unequal batch sizes per feature, which FBGEMM on CPU cannot "
                f"look up in table '{self._dense_copies[0]}', because it is data_parallel. Cut it otherwise."
            )
        if self._summed_means:
            raise ShardingError(
                f"'{self._path}' was called with unequal batch sizes per feature, and a mean-pooled table of it is cut "
                "by rows. Set sharding_types=['table_wise', 'column_wise'] for its mean-pooled tables."
            )
