"""What a sharded collection does when the user's code calls it.

In place of torchrec's forward: the ids are checked before they travel, the learning rate is the one of this step, and
what comes back has the types, the keys and the column order of the unsharded collection, whatever the plan.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_distrec._compat import fbgemm_iterations_kept, fbgemm_kernels, leave_mean_to_us
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.ids_check import IdsCheck
from lightning_distrec.sharding.tables import Table, feature_names, output_names

CUT_BY_ROWS = ("row_wise", "table_row_wise")


class ShardedLookup:
    """The forward of one sharded collection.

    sharded: torchrec's sharded module.
    tables: the collection's tables, in its order. cuts: name of a table -> how it is cut.
    check_ids: looks at the ids before they leave the rank.
    before_forward: called before every forward that may be followed by a backward.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        tables: list[Table],
        cuts: Mapping[str, str],
        check_ids: IdsCheck,
        before_forward: Callable[[], None],
    ) -> None:
        self._sharded = sharded
        self._path = tables[0].collection
        self._pooled = tables[0].pooled
        self._features = feature_names(tables)
        self._outputs = output_names(tables)
        self._summed_means = _summed_means(tables, cuts) if self._pooled else {}
        self._check_ids = check_ids
        self._before_forward = before_forward
        self._kernels = fbgemm_kernels(sharded)
        self._keys: list[str] | None = None
        if self._pooled:
            leave_mean_to_us(sharded)

    def __call__(self, features: KeyedJaggedTensor) -> KeyedTensor | dict[str, JaggedTensor]:
        """Collective. Look up `features`; returns what the unsharded collection would have returned.

        Raises ShardingError: a feature is missing, ids have weights that need a gradient, or features have unequal
        batch sizes where a mean-pooled table is cut by rows. Raises IdsError on every rank: an id on one rank is out
        of its table's range.
        """
        with self._counters():
            features = self._in_known_order(features)
            features, verdict = self._check_ids.start(features)
            context = self._sharded.create_context()
            ids = self._sharded.input_dist(context, features).wait().wait()
            if verdict is not None:
                verdict.wait()
            rows = self._sharded.compute_and_output_dist(context, ids).wait()
        return self._keyed_tensor(rows, features) if self._pooled else {name: rows[name] for name in self._outputs}

    def _counters(self) -> AbstractContextManager[None]:
        if torch.is_grad_enabled():
            self._before_forward()
            return nullcontext()
        return fbgemm_iterations_kept(self._kernels)

    def _in_known_order(self, features: Any) -> KeyedJaggedTensor:
        """Give torchrec the same keys in the same order at every call: it remembers those of its first call."""
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
        if self._summed_means and features.variable_stride_per_key():
            raise ShardingError(
                f"'{self._path}' was called with unequal batch sizes per feature, and a mean-pooled table of it is cut "
                "by rows. Set sharding_types=['table_wise', 'column_wise'] for its mean-pooled tables."
            )
        keys = features.keys()
        if keys == self._keys:
            return features
        missing = [name for name in self._features if name not in keys]
        if missing:
            raise ShardingError(
                f"'{self._path}' needs the features {missing}, but was called with {keys}. "
                "Give the KeyedJaggedTensor all features of the collection; empty bags are fine."
            )
        if self._keys is None:
            self._keys = list(keys) if set(keys) == set(self._features) else self._features
        return features if keys == self._keys else features.permute([keys.index(name) for name in self._keys])

    def _keyed_tensor(self, rows: KeyedTensor, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return `rows` with its columns in the unsharded order; sharding groups them by how tables are cut."""
        keys, lengths = rows.keys(), rows.length_per_key()
        if keys == self._outputs and not self._summed_means:
            return rows
        columns = dict(zip(keys, rows.values().split(lengths, dim=1), strict=True))
        widths = dict(zip(keys, lengths, strict=True))
        if self._summed_means:
            bag_sizes = features.lengths().view(len(features.keys()), -1).clamp(min=1)
            for name, feature in self._summed_means.items():
                columns[name] = columns[name] / bag_sizes[features.keys().index(feature)].unsqueeze(1)
        return KeyedTensor(
            keys=self._outputs,
            length_per_key=[widths[name] for name in self._outputs],
            values=torch.cat([columns[name] for name in self._outputs], dim=1),
        )


def _summed_means(tables: list[Table], cuts: Mapping[str, str]) -> dict[str, str]:
    """Return output -> feature for the outputs that arrive as sums over ranks and are to become means."""
    outputs = iter(output_names(tables))
    return {
        output: feature
        for table in tables
        for feature, output in zip(table.config.feature_names, outputs, strict=False)
        if table.config.pooling == PoolingType.MEAN and cuts[table.name] in CUT_BY_ROWS
    }
