"""Private names of torchrec: how ids are sent to the ranks that have their rows.

torchrec sends lengths, ids and weights by an exchange each, of 64-bit numbers, for each collection
and sharding type. Here one exchange of 32-bit numbers takes all of them: half of the bytes, and the
latency of one.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import comm_ops, dist_data
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import (
    KJTAllToAll,
    KJTAllToAllTensorsAwaitable,
    SplitsAllToAllAwaitable,
)
from torchrec.distributed.embedding_sharding import (
    KJTListAwaitable,
    KJTSplitsAllToAllMeta,
    _set_sharding_context_intra_a2a,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec._compat.gloo import tables_dist

EXCHANGING_MODULES = (comm_ops, dist_data)
"""Those that call torch.distributed, by the name of `dist`, to exchange ids and rows."""
_MAX_SPLITS = 4
"""Of lengths, ids, batch sizes and weights. Source: KeyedJaggedTensor.dist_splits."""
MAX_PACKED_RANKS = 64
"""Above it, tensors travel one by one: packing takes a view for each rank and tensor on the
host."""


@contextlib.contextmanager
def defer_ids_exchange(sharded: Any, group: Any = None) -> Iterator[None]:
    """Inside of the context, input_dist of `sharded` prepares the exchange of ids and does not
    start it.

    group: the process group of all ranks for the exchange of ids; None: the one of the tables.
    """
    # Upstream starts an exchange of splits in input_dist of each module. torchrec's pipelines
    # replace KJTAllToAll.forward for good; then every call of the module, evaluation included, must
    # go through the pipeline. So it is replaced for this call only, in the instance's `__dict__`.
    # Source: KJTAllToAllForward in torchrec/distributed/train_pipeline/runtime_forwards.py.

    def defer() -> list[KJTAllToAll]:
        dists = [getattr(input_dist, "_dist", None) for input_dist in sharded._input_dists]
        exchanges = [exchange for exchange in dists if isinstance(exchange, KJTAllToAll)]
        for exchange in exchanges:
            exchange.__dict__["forward"] = KJTAllToAllForward(
                pg=group or exchange._pg, splits=exchange._splits, stagger=exchange._stagger
            )
        return exchanges

    def create(*args: Any, **options: Any) -> None:
        type(sharded)._create_input_dist(sharded, *args, **options)
        exchanges.extend(defer())

    exchanges = defer()
    if not exchanges:
        # The first input_dist makes the exchanges, and uses them: its method for that is replaced
        # in the same way.
        sharded.__dict__["_create_input_dist"] = create
    try:
        yield
    finally:
        sharded.__dict__.pop("_create_input_dist", None)
        for exchange in exchanges:
            del exchange.__dict__["forward"]


class FusedSplits:
    """Collective. One exchange for the splits (sizes) of several lookups' ids, and for numbers that
    ranks share.

    splits: what each sharded module's input_dist returned inside of `defer_ids_exchange`.
    contexts: the contexts of these calls, which torchrec creates.
    numbers: what this rank sends to all others in the same exchange.
    are_small: for each lookup, whether its ids fit into 32 bits.
    late_weights: for each lookup, weights that follow its ids later; None: they are sent along.
    Source: FusedKJTListSplitsAwaitable in torchrec/distributed/embedding_sharding.py, which sends
    the splits alone, and then the tensors one by one.
    """

    def __init__(
        self,
        splits: list[Any],
        contexts: Sequence[Any],
        numbers: tuple[int, ...],
        are_small: Sequence[bool],
        late_weights: Sequence[Any] | None = None,
    ) -> None:
        late = late_weights or [None] * len(splits)
        self._lookups = list(zip(splits, contexts, are_small, late, strict=True))
        awaitables = [meta for lookup_splits in splits for meta in lookup_splits.awaitables]
        metas = [meta for meta in awaitables if isinstance(meta, KJTSplitsAllToAllMeta)]
        tensors = list(chain.from_iterable(map(attrgetter("splits_tensors"), metas)))
        self._num_numbers = len(numbers)
        self._exchange: Any = None
        self._received: list[list[int]] | None = None
        if metas:
            num_ranks = metas[0].pg.size()
            # Ids with weights have more splits than others. Ranks that disagree must exchange as
            # much, to find out.
            unused = [torch.zeros_like(tensors[0])] * (_MAX_SPLITS * len(metas) - len(tensors))
            sent = [tensors[0].new_full((num_ranks,), number) for number in numbers]
            self._exchange = SplitsAllToAllAwaitable(tensors + unused + sent, metas[0].pg)

    def wait_for_numbers(self) -> list[list[int]] | None:
        """Collective. Wait for the exchange; return each rank's numbers, or None: there are no ids
        to exchange."""
        if self._exchange is not None:
            self._received = self._exchange.wait()
            self._exchange = None
        if self._received is None:
            return None
        numbers = self._received[len(self._received) - self._num_numbers :]
        return list(map(list, zip(*numbers, strict=True)))

    def start_ids(self) -> list[Any]:
        """Collective. Wait for the exchange, and start that of ids. Return an awaitable for each
        lookup."""
        self.wait_for_numbers()
        received = iter(self._received or ())
        started = []
        ids_sent = []
        for splits, context, is_small, late_weights in self._lookups:
            lookup_tensors: list[Any] = []
            for awaitable in splits.awaitables:
                if isinstance(awaitable, KJTSplitsAllToAllMeta):
                    sizes = list(islice(received, len(awaitable.splits_tensors)))
                    lookup_tensors.append(
                        _SentIds(awaitable, sizes, is_small, late_weights is not None)
                    )
                    ids_sent.append(lookup_tensors[-1])
                else:  # every rank has these tables' rows
                    lookup_tensors.append(awaitable.wait())
            _set_sharding_context_intra_a2a(lookup_tensors, context)
            started.append(KJTListAwaitable(lookup_tensors, context))
        _start(ids_sent)
        return started


@dataclass
class _Part:
    """A tensor of one lookup on its way, as 32-bit numbers."""

    numbers: Tensor
    sent: list[int]
    """How many of them go to each rank."""
    received: list[int]
    """How many come from each rank."""
    dtype: torch.dtype
    is_small: bool
    arrived: Tensor | None = None

    @classmethod
    def packed(
        cls, tensor: Tensor, sent: list[int], received: list[int], is_small: bool
    ) -> "_Part":
        """Exact: integers of 64 bits become one number where they are small, half precision becomes
        float32."""
        dtype = tensor.dtype
        if is_small and dtype == torch.int64:
            tensor = tensor.to(torch.int32)
        elif dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()
        numbers = tensor.contiguous().view(torch.int32)
        if tensor.element_size() == 8:
            sent = [2 * size for size in sent]
            received = [2 * size for size in received]
        return cls(numbers, sent, received, dtype, is_small)

    def take(self) -> Tensor:
        """Return the tensor that has arrived, in its own type."""
        assert self.arrived is not None
        arrived = self.arrived
        self.arrived = None
        if self.dtype in (torch.float16, torch.bfloat16):
            return arrived.view(torch.float32).to(self.dtype)
        return (
            arrived.to(self.dtype)
            if self.is_small and self.dtype == torch.int64
            else arrived.view(self.dtype)
        )


@dataclass
class WeightRoute:
    """Where the weights of a lookup are sent that follow their ids: where the ids of one sharding
    type were."""

    sent_places: Tensor
    """The bits of an int32 for each weight to be sent, in order: its place in this rank's call."""
    sent: list[int]
    """How many of them go to each rank."""
    received: list[int]
    """How many come from each rank."""

    def received_places(self) -> Tensor:
        """Return the places of the weights to come, as bits, in their order. torchrec brings them
        into that of ids."""
        places = torch.arange(sum(self.received), dtype=torch.int32, device=self.sent_places.device)
        return places.view(torch.float32)


def weight_routes(awaitable: Any) -> list[WeightRoute | None]:
    """Return the route of each sharding type of a lookup that `FusedSplits.start_ids` returned;
    None: ids stay."""
    return [getattr(type_awaitable, "route", None) for type_awaitable in awaitable.awaitables]


class _Exchange:
    """Collective. One exchange of parts."""

    def __init__(self, parts: list[_Part], group: Any) -> None:
        self._parts = parts
        sent = parts[0].numbers
        sizes = parts[0].sent
        self._received_sizes = parts[0].received
        received_in_all = self._received_sizes
        if len(parts) > 1:  # map and chain: the host's time counts
            chunks = [part.numbers.split(part.sent) for part in parts]
            sent = torch.cat(list(chain.from_iterable(zip(*chunks, strict=True))))
            sizes = list(map(sum, zip(*map(attrgetter("sent"), parts), strict=True)))
            rank_parts = list(zip(*map(attrgetter("received"), parts), strict=True))
            self._received_sizes = list(chain.from_iterable(rank_parts))
            received_in_all = list(map(sum, rank_parts))
        self._received = sent.new_empty(sum(received_in_all))
        self._work = tables_dist.all_to_all_single(
            self._received, sent, received_in_all, sizes, group=group, async_op=True
        )

    def wait(self) -> None:
        """Wait for it, and give each part what has arrived, the first time it is called."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        parts = self._parts
        received = self._received
        if len(parts) == 1:
            parts[0].arrived = received
            return
        chunks = received.split(self._received_sizes)
        for i, part in enumerate(parts):
            part.arrived = torch.cat(chunks[i :: len(parts)])


class _SentIds(KJTAllToAllTensorsAwaitable):
    """The ids of one lookup and sharding type on their way. Source: KJTAllToAllTensorsAwaitable,
    with its own exchange.

    meta: what input_dist has prepared. sizes: how much comes from each rank, for each tensor; then
    batch sizes.
    """

    def __init__(
        self,
        meta: KJTSplitsAllToAllMeta,
        sizes: list[list[int]],
        is_small: bool,
        keeps_weights: bool,
    ) -> None:
        is_variable = meta._input.variable_stride_per_key()
        super().__init__(
            pg=meta.pg,
            input=meta._input,
            splits=meta.splits,
            # Upstream's constructor starts an exchange for each tensor; with none it starts
            # nothing.
            input_splits=[],
            output_splits=[],
            input_tensors=[],
            labels=[],
            keys=meta.keys,
            device=meta.device,
            stagger=meta.stagger,
            stride_per_rank=None if is_variable else sizes.pop(),
        )
        self._input_splits = dict(zip(meta.labels, meta.input_splits, strict=True))
        self._output_splits = dict(zip(meta.labels, sizes, strict=True))
        self.group = meta.pg
        tensors = zip(meta.input_tensors, meta.input_splits, sizes, meta.labels, strict=True)
        self.route: WeightRoute | None = None
        self.parts: list[_Part] = []
        for tensor, sent, received, label in tensors:
            if keeps_weights and label == "weights":  # the last one
                self.route = WeightRoute(tensor, sent, received) if self.group.size() > 1 else None
            else:
                self.parts.append(
                    _Part.packed(tensor, sent, received, is_small or label != "values")
                )
        self.exchanges: list[_Exchange] = []

    def _wait_impl(self) -> KeyedJaggedTensor:
        for exchange in self.exchanges:
            exchange.wait()
        if self.exchanges:
            self._output_tensors = [part.take() for part in self.parts]
            if self.route is not None:
                self._output_tensors.append(self.route.received_places())
        return super()._wait_impl()


def _start(ids_sent: list[_SentIds]) -> None:
    """Collective. Start the exchanges of ids, those of one process group together."""
    # In the order of lookups, which is the same on all ranks: a group's first member decides when
    # it exchanges.
    groups: dict[Any, list[_SentIds]] = {}
    for ids in ids_sent:
        groups.setdefault(ids.group, []).append(ids)
    for group, group_members in groups.items():
        if group.size() == 1:
            continue
        parts: list[_Part] = []
        for ids in group_members:
            parts += ids.parts
        if group.size() <= MAX_PACKED_RANKS:
            exchanges = [_Exchange(parts, group)]
        else:
            exchanges = [_Exchange([part], group) for part in parts]
        for ids in group_members:
            ids.exchanges = exchanges


def record_stream(ids: Any, context: Any, features: Any, stream: torch.cuda.Stream) -> None:
    """Keep the memory of a lookup's ids, context and features from being reused before `stream` has
    read them."""
    # Source: PipelinedForward in torchrec/distributed/train_pipeline/runtime_forwards.py. A
    # KeyedJaggedTensor's record_stream leaves its inverse indices out.
    ids.record_stream(stream)
    context.record_stream(stream)
    features.record_stream(stream)
    inverse = features.inverse_indices_or_none()
    if inverse is not None:
        inverse[1].record_stream(stream)


@dataclass(frozen=True)
class PooledSharding:
    """How torchrec has sharded a pooled collection of one sharding type, with at most one kernel on
    each rank."""

    group: Any
    features: list[list[str]]
    """Rank -> the features that its kernel looks up, in order."""
    names: list[str]
    """The outputs, in the order in which the ranks' columns are received."""
    widths: list[list[int]]
    """Rank -> the columns of each of its outputs; row-wise, all ranks have partial sums of the
    same."""
    num_rows: list[int] | None
    """Row-wise: the rows of each feature's table, of which rank r has the r-th block; None:
    table-wise."""
    divisor: int
    """By which gradients of rows are divided, for the mean over the ranks' losses."""

    @cached_property
    def rank_widths(self) -> list[int]:
        """The columns of each rank."""
        return list(map(sum, self.widths))

    @cached_property
    def held_widths(self) -> list[list[int]]:
        """The widths of the ranks that have outputs. Most of many ranks have none: the host's time
        is not for them."""
        return [rank_widths for rank_widths in self.widths if rank_widths]

    @cached_property
    def single_holder(self) -> int | None:
        """The rank that holds all tables, which gloo carries; None: several ranks, or another
        backend."""
        # gloo's all-to-all sends each rank a message, even an empty one: R (R - 1) for a table of
        # one rank, where a scatter and a gather send R - 1. NCCL's sends no empty ones, and is one
        # call.
        holders = [rank for rank, rank_widths in enumerate(self.widths) if rank_widths]
        is_single = (
            len(holders) == 1 and self.num_rows is None and dist.get_backend(self.group) == "gloo"
        )
        return holders[0] if is_single else None


def pooled_sharding(sharded: Any) -> PooledSharding | None:
    """Return how a collection is sharded; None: not in the simple way that `PooledSharding`
    describes."""
    # Source: ShardedEmbeddingBagCollection, TwPooledEmbeddingSharding and
    # RwPooledEmbeddingSharding; comm_ops.py divides the gradients. The result is the same on all
    # ranks.
    if type(sharded) is not ShardedEmbeddingBagCollection or len(sharded._embedding_shardings) != 1:
        return None
    (sharding,) = sharded._embedding_shardings
    (kind,) = sharded._sharding_types
    if kind not in ("table_wise", "row_wise") or sharding.qcomm_codecs_registry:
        return None
    configs_by_rank = sharding._grouped_embedding_configs_per_rank
    configs = [config for rank_configs in configs_by_rank for config in rank_configs]
    if max(map(len, configs_by_rank)) > 1 or any(map(_is_special, configs)):
        return None
    rows = None
    if kind == "row_wise":
        rows = []
        for table in configs[0].embedding_tables:
            for _ in table.feature_names:
                rows.append(table.num_embeddings)
    return PooledSharding(
        group=sharding._pg,
        features=list(map(_feature_names, configs_by_rank)),
        names=sharding.embedding_names(),
        widths=list(map(_widths, configs_by_rank)),
        num_rows=rows,
        divisor=sharding._pg.size() if get_gradient_division() else 1,
    )


def _feature_names(configs: list[Any]) -> list[str]:
    return [name for config in configs for name in config.feature_names()]


def _widths(configs: list[Any]) -> list[int]:
    return [width for config in configs for width in config.embedding_dims()]


def _is_special(config: Any) -> bool:
    is_fused = config.compute_kernel == EmbeddingComputeKernel.FUSED
    in_buckets = any(
        table.total_num_buckets or table.use_virtual_table for table in config.embedding_tables
    )
    return config.is_weighted or config.has_feature_processor or in_buckets or not is_fused
