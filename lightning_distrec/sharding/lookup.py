"""What a sharded collection does when the user's code calls it.

In place of torchrec's forward: the ids are checked before they travel, the learning rate is the one of this step, and
what comes back has the types, the keys and the column order of the unsharded collection, whatever the plan.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_distrec._compat import fbgemm_iterations_kept, fbgemm_kernels, leave_mean_to_us
from lightning_distrec.errors import OptimizerError, ShardingError
from lightning_distrec.sharding.ids_check import IdsCheck, Verdict
from lightning_distrec.sharding.jagged import Padding, without_weights
from lightning_distrec.sharding.tables import Table, feature_names, output_names
from lightning_distrec.sharding.whole_tables import HeldStill

CUT_BY_ROWS = ("row_wise", "table_row_wise")


@dataclass(frozen=True)
class TableUse:
    """What a lookup needs to know of a table's place and update."""

    cut: str
    learns: Callable[[], bool]
    """Whether the table's weight needs a gradient now."""
    adds_up: bool
    """Whether two updates inside of one backward are one with the sum of their gradients."""


class ShardedLookup:
    """The forward of one sharded collection.

    sharded: torchrec's sharded module.
    tables: the collection's tables, in its order.
    uses: name of a table -> how it is cut and updated.
    check_ids: looks at the ids before they leave the rank.
    before_forward: called before every forward that may be followed by a backward.
    output_dtype: the type of what is returned; None for the kernels' own.
    note_use: told, before a lookup of an EmbeddingCollection, where the names of tables that get gradients will be.
    compare_examples: told this rank's number of examples, and the least and most of all ranks; None: not compared.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        tables: list[Table],
        uses: Mapping[str, TableUse],
        check_ids: IdsCheck,
        before_forward: Callable[[], None],
        output_dtype: torch.dtype | None = None,
        compare_examples: Callable[[int, int, int], None] | None = None,
        note_use: Callable[[set[str] | None], None] | None = None,
    ) -> None:
        self._sharded = sharded
        self._path = tables[0].collection
        self._pooled = tables[0].pooled
        self._features = feature_names(tables)
        self._outputs = output_names(tables)
        self._summed_means = _summed_means(tables, uses) if self._pooled else {}
        self._uses = uses
        self._table_of = _tables_of_outputs(tables)
        self._needs_weights = bool(getattr(tables[0].module, "is_weighted", lambda: False)())
        self._weighted = self._needs_weights or tables[0].plain is not None
        self._output_dtype = output_dtype
        # gloo cannot gather the gradients of unequal batches (torchrec/distributed/comm_ops.py, ReduceScatterV_Wait).
        self._equal_batches = (
            self._pooled and dist.get_backend() == "gloo" and any(use.cut in CUT_BY_ROWS for use in uses.values())
        )
        # The ids of an nn.Embedding may have any shape: they do not tell the number of examples.
        self._compare_examples = None if isinstance(tables[0].plain, torch.nn.Embedding) else compare_examples
        self._note_use = None if self._pooled else note_use
        self._whole = _outputs_of(tables, lambda table: uses[table.name].cut == "data_parallel")
        self._dense_copies = [table.full_name for table in tables if uses[table.name].cut == "data_parallel"]
        self._once = [table.full_name for table in tables if not uses[table.name].adds_up]
        self._arrived: set[object] = set()
        self._check_ids = check_ids
        self._before_forward = before_forward
        self._kernels = fbgemm_kernels(sharded)
        # torchrec remembers the keys of the first call for the life of its module, which may be longer than ours.
        before = sharded.__dict__.get("forward")
        self.keys: list[str] | None = before.keys if isinstance(before, ShardedLookup) else None
        """The features in the order in which torchrec gets them; None before the first call."""
        if self._pooled:
            leave_mean_to_us(sharded)

    @torch.compiler.disable
    def __call__(self, features: KeyedJaggedTensor) -> KeyedTensor | dict[str, JaggedTensor]:
        """Collective. Look up `features`; returns what the unsharded collection would have returned.

        Raises ShardingError: a feature is missing, ids have weights that need a gradient, or features have unequal
        batch sizes where a mean-pooled table is cut by rows. Raises IdsError on every rank: an id on one rank is out
        of its table's range.
        """
        frozen = self._frozen()
        with self._gradients(frozen):
            features = self._in_known_order(self._with_right_weights(features))
            features, verdict = self._check_ids.start(features, self._examples(features))
            padding = self._padding(features, verdict)
            sent = features if padding is None else padding.put_on(features)
            context = self._sharded.create_context()
            ids = self._sharded.input_dist(context, sent).wait().wait()
            self._agree(features, verdict)
            used: set[str] = set()
            if self._note_use is not None:
                self._note_use(used)
            rows = self._sharded.compute_and_output_dist(context, ids).wait()
            if padding is not None:
                rows = padding.take_off(rows) if self._pooled else padding.take_off_rows(rows)
        if self._pooled:
            pooled = self._keyed_tensor(rows, features, frozen)
            self._watch([pooled.values()])
            return pooled
        jagged = self._dict(rows, frozen)
        self._watch([rows.values() for rows in jagged.values()])
        for name, of in jagged.items():
            if of.values().requires_grad:
                of.values().register_hook(partial(_add, used, self._table_of[name]))
        return jagged

    def _examples(self, features: KeyedJaggedTensor) -> int | None:
        """Return the number of examples to compare over ranks; 0 where features have unequal batch sizes."""
        if self._compare_examples is None and not self._equal_batches:
            return None
        return 0 if features.variable_stride_per_key() else features.stride()

    def _padding(self, features: KeyedJaggedTensor, verdict: Verdict | None) -> Padding | None:
        """Collective where batches must be equal. Return what makes this rank's batch as large as the largest."""
        if not self._pooled:
            # torchrec cannot reshape the rows of no examples.
            return Padding(0, 1) if not features.variable_stride_per_key() and features.stride() == 0 else None
        if not self._equal_batches or verdict is None:
            return None
        least, most = verdict.wait()
        return None if least == most else Padding(features.stride(), most)

    def _agree(self, features: KeyedJaggedTensor, verdict: Verdict | None) -> None:
        """Collective. Raise on every rank what any found in its ids, and compare the sizes of batches."""
        if verdict is None:
            return
        least, most = verdict.wait()
        if self._compare_examples is not None:  # in any mode: a reentrant checkpoint looks up without gradients first
            self._compare_examples(self._examples(features) or 0, least, most)

    def _watch(self, outputs: list[torch.Tensor]) -> None:
        """Notice when gradients come back to more than one lookup of a step, where their updates do not add up."""
        if not self._once or not any(output.requires_grad for output in outputs):
            return
        call = object()

        def arrived(gradient: torch.Tensor) -> None:
            self._arrived.add(call)
            if len(self._arrived) > 1:
                raise OptimizerError(
                    f"gradients came to more than one lookup of '{self._path}' in a step, and table '{self._once[0]}' "
                    "is updated inside of backward, once for each lookup, which is not one update with their sum. Set "
                    "embedding_update='sparse' ('dense' for RowWiseAdagrad), or look all ids up at once."
                )

        for output in outputs:
            if output.requires_grad:
                output.register_hook(arrived)

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._arrived.clear()

    def _frozen(self) -> set[str]:
        """Return the outputs of the tables that do not learn now."""
        tables = {name for name, use in self._uses.items() if not use.learns()}
        return {output for output, table in self._table_of.items() if table in tables}

    @contextmanager
    def _gradients(self, frozen: set[str]) -> Iterator[None]:
        """Let gradients flow where a table learns, and leave the kernels' step counters alone where none does."""
        if not torch.is_grad_enabled() or len(frozen) == len(self._outputs):
            with torch.no_grad(), fbgemm_iterations_kept(self._kernels):
                yield
            return
        self._before_forward()
        yield

    def _with_right_weights(self, features: Any) -> KeyedJaggedTensor:
        """Leave out weights that the unsharded collection would ignore; torchrec's kernels take what they get."""
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
        if weights is None or self._weighted or not self._pooled:
            return features
        return without_weights(features)

    def _in_known_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Give torchrec the same keys in the same order at every call: it remembers those of its first call."""
        if self._dense_copies and features.variable_stride_per_key() and features.values().device.type == "cpu":
            raise ShardingError(
                f"'{self._path}' was called with unequal batch sizes per feature, which FBGEMM on CPU cannot "
                f"look up in table '{self._dense_copies[0]}', because it is data_parallel. Cut it otherwise."
            )
        if self._summed_means and features.variable_stride_per_key():
            raise ShardingError(
                f"'{self._path}' was called with unequal batch sizes per feature, and a mean-pooled table of it is cut "
                "by rows. Set sharding_types=['table_wise', 'column_wise'] for its mean-pooled tables."
            )
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

    def _dict(self, rows: dict[str, JaggedTensor], frozen: set[str]) -> dict[str, JaggedTensor]:
        """Return `rows` in the unsharded order; no gradient goes back into frozen tables."""
        if not frozen and self._output_dtype is None:
            return {name: rows[name] for name in self._outputs}
        return {
            name: _with_values(rows[name], self._typed(self._held_still(name, values) if name in frozen else values))
            for name in self._outputs
            for values in [rows[name].values()]
        }

    def _keyed_tensor(self, rows: KeyedTensor, features: KeyedJaggedTensor, frozen: set[str]) -> KeyedTensor:
        """Return `rows` with its columns in the unsharded order; sharding groups them by how tables are cut."""
        keys, lengths = rows.keys(), rows.length_per_key()
        if keys == self._outputs and not self._summed_means and not frozen:
            if self._output_dtype is None:
                return rows
            return KeyedTensor(keys=keys, length_per_key=lengths, values=self._typed(rows.values()))
        columns = dict(zip(keys, rows.values().split(lengths, dim=1), strict=True))
        widths = dict(zip(keys, lengths, strict=True))
        if self._summed_means:
            bag_sizes = features.lengths().view(len(features.keys()), -1).clamp(min=1)
            for name, feature in self._summed_means.items():
                columns[name] = columns[name] / bag_sizes[features.keys().index(feature)].unsqueeze(1)
        # A gradient that is not finite must not reach a frozen table: its kernel multiplies it by a rate of 0.
        columns |= {name: self._held_still(name, columns[name]) for name in frozen}
        return KeyedTensor(
            keys=self._outputs,
            length_per_key=[widths[name] for name in self._outputs],
            values=self._typed(torch.cat([columns[name] for name in self._outputs], dim=1)),
        )

    def _held_still(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if name in self._whole:
            held: torch.Tensor = HeldStill.apply(values)
            return held
        return values.detach()

    def _typed(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._output_dtype is None else values.to(self._output_dtype)


def _summed_means(tables: list[Table], uses: Mapping[str, TableUse]) -> dict[str, str]:
    """Return output -> feature for the outputs that arrive as sums over ranks and are to become means."""

    def summed(table: Table) -> bool:
        return table.config.pooling == PoolingType.MEAN and uses[table.name].cut in CUT_BY_ROWS

    return _outputs_of(tables, summed)


def _tables_of_outputs(tables: list[Table]) -> dict[str, str]:
    """Return output -> name of its table."""
    names = [table.name for table in tables for _ in table.config.feature_names]
    return dict(zip(output_names(tables), names, strict=True))


def _outputs_of(tables: list[Table], chosen: Callable[[Table], bool]) -> dict[str, str]:
    """Return output -> feature for the tables that are chosen."""
    outputs = iter(output_names(tables))
    pairs = [(table, feature, next(outputs)) for table in tables for feature in table.config.feature_names]
    return {output: feature for table, feature, output in pairs if chosen(table)}


def _add(used: set[str], table: str, gradient: torch.Tensor | None) -> None:
    if gradient is not None:  # torch calls the hooks of all outputs of a split when any of them gets a gradient
        used.add(table)


def _with_values(jagged: JaggedTensor, values: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(values=values, lengths=jagged.lengths(), weights=jagged.weights_or_none())
