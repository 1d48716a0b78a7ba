"""What user code calls a sharded collection with, made into what torchrec takes, or refused.

torchrec's sharded modules remember the keys of their first call, use weights that the unsharded collection would
ignore, and ignore what they do not support; here each call is brought into one form.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec.errors import ShardingError
from lightning_distrec.late_weights import LateWeights
from lightning_distrec.sharding.calls.batch_check import check_batch
from lightning_distrec.sharding.lookup.jagged import contiguous, with_weights
from lightning_distrec.sharding.lookup.weights_exchange import with_places
from lightning_distrec.sharding.tables import Table, feature_names, smallest_tables


class LookupInputs:
    """The features of one collection's calls.

    tables: the collection's tables, in its order.
    replicated: full names of those that are data_parallel. summed_means: outputs that arrive as sums over ranks and
    are to become means.
    known_keys: collection -> the features in the order of its first call, which adds it. torchrec's module remembers
    that order for its life, which may be longer than one run.
    """

    def __init__(
        self,
        tables: list[Table],
        replicated: list[str],
        summed_means: Mapping[str, str],
        known_keys: dict[str, list[str]],
    ) -> None:
        self._path = tables[0].collection
        self._name = f"'{self._path}'"
        self._features = feature_names(tables)
        self._replicated = replicated
        self._summed_means = summed_means
        self.is_weighted = bool(getattr(tables[0].module, "is_weighted", lambda: False)())
        """Whether the collection is weighted."""
        self._keeps_weights = self.is_weighted or (tables[0].plain is not None and tables[0].pooled)
        self._known_keys = known_keys
        self._limits = {feature: table.num_ids for feature, table in smallest_tables(tables).items()}

    def prepare(self, features: Any) -> tuple[KeyedJaggedTensor, int, int, torch.Tensor | None]:
        """Return the features with the weights that count, in the order that torchrec knows, and the extreme ids.

        Weights that follow their ids are returned last, and the features have their places; see weights_exchange.py.
        Raises ShardingError: no KeyedJaggedTensor, a feature is missing, weights are missing, or features have unequal
        batch sizes where a table cannot take them. Raises IdsError: lengths, offsets, weights or
        types do not fit the ids.
        """
        weights = self._weights(features)
        smallest, largest = check_batch(self._name, features, weights, self._limits)
        # Only now: what makes a copy of the features, or permutes them, trusts their lengths.
        if weights is None and features.weights_or_none() is not None:
            features = with_weights(features, None)
        learned = weights if weights is not None and (weights.requires_grad or type(weights) is LateWeights) else None
        if learned is not None:
            features = with_places(features)
        return self._in_known_order(contiguous(features)), smallest, largest, learned

    def nothing(self, device: torch.device) -> KeyedJaggedTensor:
        """Return features of one example without ids."""
        keys = self._known_keys.get(self._path) or self._features
        lengths = torch.zeros(len(keys), dtype=torch.int64, device=device)
        weights = lengths.new_empty(0, dtype=torch.float32) if self.is_weighted else None
        return KeyedJaggedTensor(keys=keys, values=lengths.new_empty(0), lengths=lengths, weights=weights, stride=1)

    def _weights(self, features: Any) -> torch.Tensor | None:
        """Return the weights that count."""
        if not isinstance(features, KeyedJaggedTensor):
            raise ShardingError(
                f"'{self._path}' was called with a {type(features).__name__}; sharded tables take a KeyedJaggedTensor."
            )
        weights = features.weights_or_none()
        if weights is None and self.is_weighted:
            raise ShardingError(
                f"'{self._path}' is weighted, and was called with ids that have no weights. Give the KeyedJaggedTensor "
                "weights, of 1 for example."
            )
        return weights if self._keeps_weights else None

    def _in_known_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if features.variable_stride_per_key():
            self._refuse_unequal_sizes(features.values().device)
        keys = features.keys()
        known = self._known_keys.get(self._path)
        if keys == known:
            return features
        if len(set(keys)) < len(keys):
            raise ShardingError(f"'{self._path}' was called with features of the same name: {keys}.")
        missing = [name for name in self._features if name not in keys]
        if missing:
            raise ShardingError(
                f"'{self._path}' needs the features {missing}, but was called with {keys}. "
                "Give the KeyedJaggedTensor all features of the collection; empty bags are fine."
            )
        if known is None:
            known = list(keys) if set(keys) == set(self._features) else self._features
            self._known_keys[self._path] = known
        return features if keys == known else features.permute([keys.index(name) for name in known])

    def _refuse_unequal_sizes(self, device: torch.device) -> None:
        if self._replicated and device.type == "cpu":
            raise ShardingError(
                f"'{self._path}' was called with unequal batch sizes per feature, which FBGEMM on CPU cannot "
                f"look up in table '{self._replicated[0]}', because it is data_parallel. Set another sharding type."
            )
        if self._summed_means:
            raise ShardingError(
                f"'{self._path}' was called with unequal batch sizes per feature, and a mean-pooled table of it is "
                "sharded by rows. Set sharding_types=['table_wise', 'column_wise'] for its mean-pooled tables."
            )
