"""Private names of torchrec: sharded collections, input dist, and jagged tensors."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function


def attach_fused_optimizer(parameter: nn.Parameter, arguments: dict[str, Any], group: str) -> None:
    """Set the in-backward optimizer that torchrec gives a table when it shards it.

    arguments: those of FBGEMM's kernel, "optimizer" (an EmbOptimType) and "learning_rate" among them.
    group: tables of different groups get separate kernels, and with them separate learning rates.
    Source: torchrec/distributed/embeddingbag.py, create_grouped_sharding_infos, reads these two attributes; the key
    "_batch_key" only separates groups (embedding_sharding.py, group_tables). torch's _apply_optimizer_in_backward sets
    them too, but it also registers hooks on the unsharded parameter, which are of no use here.
    """
    parameter._optimizer_classes = [None]  # type: ignore[attr-defined]
    # FBGEMM rounds what it writes to 16-bit tables at random by default, so that no run would be reproducible.
    own = {"stochastic_rounding": False, "_batch_key": group}
    parameter._optimizer_kwargs = [{**arguments, **own}]  # type: ignore[attr-defined]


def detach_fused_optimizer(parameter: nn.Parameter) -> None:
    """Undo `attach_fused_optimizer`, so that the table can later be sharded with another optimizer."""
    for name in ("_optimizer_classes", "_optimizer_kwargs"):
        if hasattr(parameter, name):
            delattr(parameter, name)


def free_weights(collection: Any) -> None:
    """Free the weights of an unsharded collection by moving it to the meta device.

    `_device` is set too: `to` does not change it, and the `device` property returns it. A sharded collection that is
    made from one with device "cuda" would copy the freed rows (torchrec/distributed/embeddingbag.py, end of __init__).
    Source: torchrec/modules/embedding_modules.py.
    """
    collection.to("meta")
    collection._device = torch.device("meta")


def fill_weight(collection: Any, key: str, weight: Any, learns: bool) -> None:
    """Give an unsharded collection a weight again, after `free_weights`. key: the weight's name in its state_dict."""
    path, _, name = key.rpartition(".")
    setattr(collection.get_submodule(path), name, nn.Parameter(weight, learns))
    collection._device = weight.device


def free_unsharded_tables(sharded: Any) -> None:
    """Free the unsharded tables that a sharded collection still refers to.

    Upstream keeps the unsharded parameters for their shapes alone, as long as the module lives: each rank would hold
    every table twice. Parameters on meta have the same shapes. Can go when upstream keeps shapes only.
    Source: EmbeddingShardingInfo in torchrec/distributed/embedding_sharding.py, kept by ShardedEmbeddingBagCollection.
    """
    for infos in getattr(sharded, "sharding_type_to_sharding_infos", {}).values():
        for info in infos:
            info.param = nn.Parameter(torch.empty_like(info.param, device="meta"), info.param.requires_grad)


def disable_mean_pooling_divisor(sharded: Any) -> None:
    """Stop torchrec from dividing the output of a sharded EmbeddingBagCollection by bag sizes.

    Upstream: rows of a mean-pooled row-wise table are summed over ranks first and divided afterwards, by a callback.
    Wrong in torchrec 1.8: the callback divides the columns of all tables of the collection except sum-pooled row-wise
    ones, so that table-wise and column-wise tables, whose kernels have divided already, are divided twice
    (embeddingbag.py, _create_mean_pooling_divisor). sharding/lookup/ divides the columns that need it.
    Can go when that function leaves out every table that is not row-wise.
    """
    sharded._has_mean_pooling_callback = False


def skip_idle_record_functions() -> None:
    """Let torchrec name its exchanges for a profiler only where one runs: a name costs 5 microseconds, a step has 17.

    For the whole process; a profiler sees what it saw before. Every module of torchrec has taken torch's
    `record_function` into its own globals (torchrec/distributed/types.py, dist_data.py, comm_ops.py and others).
    Can go when torch's record_function looks for a profiler first.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("torchrec.") and getattr(module, "record_function", None) is record_function:
            module.record_function = _record_function  # type: ignore[attr-defined]


_NOT_RECORDED = contextlib.nullcontext()


def _record_function(name: str, args: str | None = None) -> Any:
    return record_function(name, args) if torch._C._autograd._profiler_enabled() else _NOT_RECORDED


_MAX_SPLITS = 4
"""Of lengths, ids, batch sizes and weights. Source: KeyedJaggedTensor.dist_splits."""


class FusedSplits:
    """Collective. One exchange for the splits (sizes) of several lookups' ids, and for numbers that ranks share.

    splits: what each sharded module's input_dist returned inside of `defer_ids_exchange`.
    contexts: the contexts of these calls, which torchrec creates.
    numbers: what this rank sends to all others in the same exchange.
    Source: FusedKJTListSplitsAwaitable in torchrec/distributed/embedding_sharding.py. It would exchange the splits, and
    nothing else, in an exchange of its own. Without a process group it exchanges nothing; it is given the splits when
    our exchange has ended. A second exchange per step would cost its latency on every rank.
    """

    def __init__(self, splits: list[Any], contexts: list[Any], numbers: tuple[int, ...]) -> None:
        from torchrec.distributed.dist_data import SplitsAllToAllAwaitable
        from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable, KJTSplitsAllToAllMeta

        self._fused = FusedKJTListSplitsAwaitable(requests=splits, contexts=contexts, pg=None)
        metas = [meta for meta in self._fused._awaitables if isinstance(meta, KJTSplitsAllToAllMeta)]
        tensors = [tensor for meta in metas for tensor in meta.splits_tensors]
        self._num_splits, self._num_numbers = len(tensors), len(numbers)
        self._exchange: Any = None
        self._received: list[list[int]] | None = None
        if metas:
            num_ranks = metas[0].pg.size()
            # Ids with weights have more splits than others. Ranks that disagree must exchange as much, to find out.
            unused = [torch.zeros_like(tensors[0])] * (_MAX_SPLITS * len(metas) - len(tensors))
            sent = [tensors[0].new_full((num_ranks,), number) for number in numbers]
            self._exchange = SplitsAllToAllAwaitable(tensors + unused + sent, metas[0].pg)

    def wait_for_numbers(self) -> list[list[int]] | None:
        """Collective. Wait for the exchange; return each rank's numbers, or None: there are no ids to exchange."""
        if self._exchange is not None:
            self._received, self._exchange = self._exchange.wait(), None
        if self._received is None:
            return None
        numbers = self._received[len(self._received) - self._num_numbers :]
        return [list(of_rank) for of_rank in zip(*numbers, strict=True)]

    def start_ids(self) -> list[Any]:
        """Collective. Wait for the exchange, and start that of ids. Return an awaitable for each lookup."""
        self.wait_for_numbers()
        if self._received is not None:
            self._fused._splits_awaitable = _Ready(self._received[: self._num_splits])
        started: list[Any] = self._fused.wait()
        return started


class _Ready:
    """An awaitable whose value is already there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


@contextlib.contextmanager
def defer_ids_exchange(sharded: Any, group: Any = None) -> Iterator[None]:
    """Inside of the context, input_dist of `sharded` prepares the exchange of ids and does not start it.

    group: the process group of all ranks for the exchange of ids; None: the one of the tables.
    Upstream starts an exchange of splits in input_dist of each module. torchrec's pipelines avoid that by replacing
    KJTAllToAll.forward permanently; then every call of the module, evaluation included, must go through the pipeline.
    So it is replaced for this call only: written into the instance's `__dict__`, which takes precedence over the class.
    Source: KJTAllToAllForward in torchrec/distributed/train_pipeline/runtime_forwards.py.
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


def record_stream(ids: Any, context: Any, features: Any, stream: torch.cuda.Stream) -> None:
    """Keep the allocator from reusing the memory of a lookup's ids, context and features before `stream` has read them.

    Source: PipelinedForward in torchrec/distributed/train_pipeline/runtime_forwards.py. A KeyedJaggedTensor's
    record_stream leaves its inverse indices out.
    """
    ids.record_stream(stream)
    context.record_stream(stream)
    features.record_stream(stream)
    if (inverse := features.inverse_indices_or_none()) is not None:
        inverse[1].record_stream(stream)


KEYED_TENSOR_VALUES = "_values"
"""The attribute of torchrec's KeyedTensor that holds its values. Source: torchrec/sparse/jagged_tensor.py."""

JAGGED_TENSOR_FIELDS = ("_values", "_weights", "_lengths", "_offsets")
"""The attributes of JaggedTensor and KeyedJaggedTensor; lengths and offsets are computed on first access."""


def jagged_fields(jagged: Any) -> dict[str, torch.Tensor | None]:
    """Return values, weights, lengths and offsets of a KeyedJaggedTensor; None for those that are not computed yet."""
    return {name.removeprefix("_"): getattr(jagged, name) for name in JAGGED_TENSOR_FIELDS}


def keep_length_per_key(features: Any, length_per_key: list[int]) -> bool:
    """Let a KeyedJaggedTensor know the number of ids of each key; return whether it knew no other numbers.

    Its method `length_per_key` would compute them and keep them in the same attribute, for which a GPU is waited for
    once more. Source: torchrec/sparse/jagged_tensor.py.
    """
    known = features._length_per_key
    features._length_per_key = length_per_key
    return known is None or known == length_per_key


@contextlib.contextmanager
def silence_torchrec() -> Iterator[None]:
    """Hide what torchrec's planner and sharders log below ERROR; they warn about what we decide ourselves.

    Source: Topology.__init__ warns that "the job will fail" unless it was made by a factory that torchrec 1.6 lacks.
    Some of these warnings go to the root logger, so that its level is raised too.
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
    """Return the DistributedDataParallel modules in which torchrec wraps a collection's data-parallel tables.

    Source: init_data_parallel in torchrec/distributed/embeddingbag.py and embedding.py; `_lookups` is a plain list.
    """
    from torch.nn.parallel import DistributedDataParallel

    return [lookup for lookup in sharded._lookups if isinstance(lookup, DistributedDataParallel)]
