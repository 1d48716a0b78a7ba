"""Private names of torchrec: sharded collections, the exchange of ids, and jagged tensors."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def attach_fused_optimizer(parameter: nn.Parameter, arguments: dict[str, Any], group: str) -> None:
    """Tell torchrec which in-backward optimizer a table gets when it is sharded.

    arguments: FBGEMM's, with "optimizer" an EmbOptimType and "learning_rate" in place of "lr".
    group: tables of different groups get kernels of their own, and so learning rates of their own.
    Source: torchrec/distributed/embeddingbag.py, create_grouped_sharding_infos, reads these two attributes; the key
    "_batch_key" only separates groups (embedding_sharding.py, group_tables). torch's _apply_optimizer_in_backward sets
    the same attributes, and hooks that are of no use here.
    """
    parameter._optimizer_classes = [None]  # type: ignore[attr-defined]
    parameter._optimizer_kwargs = [{**arguments, "_batch_key": group}]  # type: ignore[attr-defined]


def detach_fused_optimizer(parameter: nn.Parameter) -> None:
    """Undo `attach_fused_optimizer`, so that the table can be sharded with another update later."""
    for name in ("_optimizer_classes", "_optimizer_kwargs"):
        if hasattr(parameter, name):
            delattr(parameter, name)


def free_weights(collection: Any) -> None:
    """Free the weights of an unsharded collection and keep its tables, on meta.

    Source: torchrec/modules/embedding_modules.py; `_device` is what the `device` property returns, and a sharded
    collection made from a CUDA one would load its rows (torchrec/distributed/embeddingbag.py, end of __init__).
    """
    collection.to("meta")
    collection._device = torch.device("meta")


def free_unsharded_tables(sharded: Any) -> None:
    """Let go of the whole tables that a sharded collection was made of; it keeps their parameters for their shapes.

    Source: EmbeddingShardingInfo in torchrec/distributed/embedding_sharding.py, kept by ShardedEmbeddingBagCollection.
    """
    for infos in getattr(sharded, "sharding_type_to_sharding_infos", {}).values():
        for info in infos:
            info.param = nn.Parameter(torch.empty_like(info.param, device="meta"), info.param.requires_grad)


def disable_mean_pooling_divisor(sharded: Any) -> None:
    """Stop torchrec from dividing the output of a sharded EmbeddingBagCollection by bag sizes.

    Rows of a mean-pooled table that is cut by rows are summed over ranks first and divided after. torchrec 1.8 then
    divides the columns of every table of the collection, but for sum-pooled tables that are cut by rows too: tables cut
    otherwise come out divided once too often (embeddingbag.py, _create_mean_pooling_divisor). sharding/lookup/
    divides the columns that need it.
    """
    sharded._has_mean_pooling_callback = False


class FusedSplits:
    """Collective. The sizes of several lookups' ids on their way, in one exchange.

    splits: what each sharded module's input_dist returned inside of `defer_ids_exchange`.
    contexts: the contexts of these calls, which torchrec creates.
    say: numbers that every rank tells every other one beside.
    Source: FusedKJTListSplitsAwaitable in torchrec/distributed/embedding_sharding.py. It is made without a process
    group, so that it exchanges nothing, and gets the sizes once the exchange that says more is over.
    """

    def __init__(self, splits: list[Any], contexts: list[Any], say: tuple[int, ...]) -> None:
        from torchrec.distributed.dist_data import SplitsAllToAllAwaitable
        from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable, KJTSplitsAllToAllMeta

        self._fused = FusedKJTListSplitsAwaitable(requests=splits, contexts=contexts, pg=None)
        metas = [meta for meta in self._fused._awaitables if isinstance(meta, KJTSplitsAllToAllMeta)]
        tensors = [tensor for meta in metas for tensor in meta.splits_tensors]
        self._num_said = len(say)
        self._sizes: Any = None
        if metas:
            num_ranks = metas[0].pg.size()
            said = [tensors[0].new_full((num_ranks,), number) for number in say]
            self._sizes = SplitsAllToAllAwaitable(tensors + said, metas[0].pg)

    def wait(self) -> tuple[list[Any], list[list[int]] | None]:
        """Collective. Let the ids travel. Return what to wait for, for each lookup, and what each rank has said.

        Nobody has said anything where nothing is exchanged.
        """
        if self._sizes is None:
            return self._fused.wait(), None
        rows = self._sizes.wait()
        sizes, said = rows[: len(rows) - self._num_said], rows[len(rows) - self._num_said :]
        self._fused._splits_awaitable = _Ready(sizes)
        return self._fused.wait(), [list(of_rank) for of_rank in zip(*said, strict=True)]

    def drop(self) -> None:
        """Wait for the exchange of sizes and send no ids."""
        if self._sizes is not None:
            self._sizes.wait()


class _Ready:
    """What needs no wait any more."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


@contextlib.contextmanager
def defer_ids_exchange(sharded: Any, group: Any = None) -> Iterator[None]:
    """Inside of the context input_dist of `sharded` prepares the exchange of ids and starts none.

    group: of all ranks, that the ids are to travel on; None: that of the tables.
    Source: KJTAllToAllForward, in torchrec/distributed/train_pipeline/runtime_forwards.py, which torchrec's pipelines
    put in the place of KJTAllToAll.forward for good; here only for the call, so that other calls stay what they are.
    """
    from torchrec.distributed.dist_data import KJTAllToAll
    from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward

    exchanges = [dist._dist for dist in sharded._input_dists if isinstance(getattr(dist, "_dist", None), KJTAllToAll)]
    for exchange in exchanges:
        exchange.__dict__["forward"] = KJTAllToAllForward(
            pg=group or exchange._pg, splits=exchange._splits, stagger=exchange._stagger
        )
    try:
        yield
    finally:
        for exchange in exchanges:
            del exchange.__dict__["forward"]


def record_stream(ids: Any, context: Any, stream: torch.cuda.Stream) -> None:
    """Keep the memory of a lookup's ids and of its context until `stream` has used them.

    Source: PipelinedForward in torchrec/distributed/train_pipeline/runtime_forwards.py.
    """
    ids.record_stream(stream)
    context.record_stream(stream)


KEYED_TENSOR_VALUES = "_values"
"""Where torchrec's KeyedTensor keeps its values, and reads them. Source: torchrec/sparse/jagged_tensor.py."""

JAGGED_TENSOR_FIELDS = ("_values", "_weights", "_lengths", "_offsets")
"""The same of JaggedTensor and KeyedJaggedTensor, which compute lengths and offsets when they are first asked for."""


def jagged_fields(jagged: Any) -> dict[str, torch.Tensor | None]:
    """Return what a KeyedJaggedTensor was made of, and computed since: values, weights, lengths, offsets."""
    return {name.removeprefix("_"): getattr(jagged, name) for name in JAGGED_TENSOR_FIELDS}


@contextlib.contextmanager
def silence_torchrec() -> Iterator[None]:
    """Silence torchrec's planner and sharders below ERROR: their warnings speak of what we decide ourselves.

    Source: Topology.__init__ warns that "the job will fail" unless it was made by a factory that torchrec 1.6 lacks.
    """
    logger = logging.getLogger("torchrec")
    root = logging.getLogger()
    levels = logger.level, root.level
    logger.setLevel(logging.ERROR)
    root.setLevel(max(root.level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(levels[0])
        root.setLevel(levels[1])


def ddp_of_data_parallel_tables(sharded: Any) -> list[Any]:
    """Return the DDPs in which torchrec wraps a sharded collection's data_parallel tables.

    Source: init_data_parallel in torchrec/distributed/embeddingbag.py and embedding.py; `_lookups` is a plain list.
    """
    from torch.nn.parallel import DistributedDataParallel

    return [lookup for lookup in sharded._lookups if isinstance(lookup, DistributedDataParallel)]
