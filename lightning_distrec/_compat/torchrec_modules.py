"""Private names of torchrec: sharded collections, input dist, jagged tensors and managed collision
modules."""

import contextlib
import logging
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.modules.hash_mc_evictions import HashZchEvictionPolicyName

from lightning_distrec._compat.patches import Patches
from lightning_distrec._compat.torch import profiler_runs, without_torch_function

UNTOUCHED_BYTES = 2**20


def attach_fused_optimizer(parameter: nn.Parameter, arguments: dict[str, Any], group: str) -> None:
    """Set the in-backward optimizer that torchrec gives a table when it shards it.

    arguments: those of FBGEMM's kernel, "optimizer" (an EmbOptimType) and "learning_rate" among
    them.
    group: tables of different groups get separate kernels, and with them separate learning rates.
    """
    # Source: torchrec/distributed/embeddingbag.py, create_grouped_sharding_infos, reads these two
    # attributes; the key "_batch_key" only separates groups (embedding_sharding.py, group_tables).
    # torch's _apply_optimizer_in_backward sets them too, but it also registers hooks on the
    # unsharded parameter, which are of no use here.
    parameter._optimizer_classes = [None]  # type: ignore[attr-defined]
    # FBGEMM rounds what it writes to 16-bit tables at random by default, so that no run would be
    # reproducible.
    group_options = {"stochastic_rounding": False, "_batch_key": group}
    parameter._optimizer_kwargs = [{**arguments, **group_options}]  # type: ignore[attr-defined]


def detach_fused_optimizer(parameter: nn.Parameter) -> None:
    """Undo `attach_fused_optimizer`, so that the table can later be sharded with another
    optimizer."""
    for name in ("_optimizer_classes", "_optimizer_kwargs"):
        if hasattr(parameter, name):
            delattr(parameter, name)


def free_weights(collection: Any) -> None:
    """Free the weights of an unsharded collection by moving it to the meta device."""
    # `_device` is set too, which `to` does not change: a sharded collection that is made from one
    # with device "cuda" would copy the freed rows. Source: torchrec/modules/embedding_modules.py,
    # torchrec/distributed/embeddingbag.py.
    collection.to("meta")
    collection._device = torch.device("meta")


def note_device(collection: Any) -> None:
    """Let a collection that was built on meta, and has rows by now, know where they are."""
    # Its `reset_parameters` would do nothing. Source: torchrec/modules/embedding_modules.py.
    with without_torch_function():
        collection._device = next(collection.parameters()).device


def wrapped_optimizer(wrapper: Any) -> Any:
    """Return the optimizer inside of a KeyedOptimizerWrapper. Source: torchrec/optim/keyed.py."""
    return wrapper._optimizer


def fill_weight(collection: Any, key: str, weight: Any, learns: bool) -> None:
    """Give an unsharded collection a weight again, after `free_weights`. key: the weight's name in
    its state_dict."""
    path, _, name = key.rpartition(".")
    setattr(collection.get_submodule(path), name, nn.Parameter(weight, learns))
    collection._device = weight.device


def free_unsharded_tables(sharded: Any) -> None:
    """Free the unsharded tables that a sharded collection still refers to."""
    # Upstream keeps the unsharded parameters for their shapes alone: each rank would hold every
    # table twice. Can go when upstream keeps shapes only. Source: EmbeddingShardingInfo in
    # torchrec/distributed/embedding_sharding.py.
    for infos in getattr(sharded, "sharding_type_to_sharding_infos", {}).values():
        for info in infos:
            info.param = nn.Parameter(
                torch.empty_like(info.param, device="meta"), info.param.requires_grad
            )


def disable_mean_pooling_divisor(sharded: Any) -> None:
    """Stop torchrec from dividing the output of a sharded EmbeddingBagCollection by bag sizes."""
    # Wrong in torchrec 1.8: its callback, which divides the sums of row-wise tables, divides the
    # columns of table-wise and column-wise ones too, whose kernels have divided already
    # (embeddingbag.py, _create_mean_pooling_divisor). sharding/lookup/ divides what needs it. Can
    # go when that function leaves out every table that is not row-wise.
    sharded._has_mean_pooling_callback = False


def prepare_unequal_batches(sharded: Any) -> list[str]:
    """Let a sharded EmbeddingBagCollection take batch sizes per feature; return the order of its
    inverse indices."""
    # Upstream makes its permutation of inverse indices at its first call, by the order of that
    # call, and neither that nor an exchange of rows where that call has one batch size:
    # embeddingbag.py, _create_inverse_indices_permute_indices; sharding/tw_sharding.py,
    # _create_output_dist_module. Can go when both are made for each call.
    for output_dist in sharded._output_dists:
        if isinstance(output_dist, TwPooledEmbeddingDist) and output_dist._variable_dist is None:
            context = EmbeddingShardingContext(variable_batch_per_feature=True)
            output_dist._create_output_dist_module(context)
    return [name.split("@")[0] for name in sharded._uncombined_embedding_names]


def skip_idle_record_functions() -> Patches:
    """Let torchrec name its exchanges for a profiler only where one runs: a name costs 5 us, a step
    has 17."""
    # A profiler sees what it saw before. Every loaded module of torchrec has taken torch's
    # `record_function` into its own globals (torchrec/distributed/types.py, dist_data.py,
    # comm_ops.py and others). Can go when torch's record_function looks for a profiler first.
    patches = Patches()
    for name, module in list(sys.modules.items()):
        if name.startswith("torchrec.") and vars(module).get("record_function") is record_function:
            patches.replace(module, "record_function", _record_function)
    return patches


_NOT_RECORDED = contextlib.nullcontext()


def _record_function(name: str, args: str | None = None) -> Any:
    return record_function(name, args) if profiler_runs() else _NOT_RECORDED


def replace_train_pipelines(progress: Callable[..., Any]) -> Patches:
    """Put `progress` in the place of that method of torchrec's TrainPipelineBase,
    TrainPipelineSparseDist and kin."""
    # torchrec offers no hook around it, and a user may keep a pipeline anywhere: only its class can
    # be reached.
    patches = Patches()
    kinds: list[type] = [TrainPipelineBase, TrainPipelineSparseDist]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if "progress" in vars(kind):
            patches.replace(kind, "progress", progress)
    return patches


KEYED_TENSOR_VALUES = "_values"
"""The attribute of torchrec's KeyedTensor that holds its values. Source:
torchrec/sparse/jagged_tensor.py."""

JAGGED_TENSOR_FIELDS = ("_values", "_weights", "_lengths", "_offsets")
"""The attributes of JaggedTensor and KeyedJaggedTensor; lengths and offsets are computed on first
access."""


def jagged_fields(jagged: Any) -> dict[str, torch.Tensor | None]:
    """Return values, weights, lengths and offsets of a KeyedJaggedTensor; None for those that are
    not computed yet."""
    return {name.removeprefix("_"): getattr(jagged, name) for name in JAGGED_TENSOR_FIELDS}


def keep_length_per_key(features: Any, length_per_key: list[int]) -> bool:
    """Let a KeyedJaggedTensor know the number of ids of each key; return whether it knew no other
    numbers."""
    # Its method `length_per_key` would compute them and keep them in the same attribute, for which
    # a GPU is waited for once more. Source: torchrec/sparse/jagged_tensor.py.
    lengths = features._length_per_key
    features._length_per_key = length_per_key
    return lengths is None or lengths == length_per_key


@contextlib.contextmanager
def silence_torchrec() -> Iterator[None]:
    """Hide what torchrec's planner and sharders log below ERROR; they warn about what we decide
    ourselves."""
    # Source: Topology.__init__ warns that "the job will fail" unless it was made by a factory that
    # torchrec 1.6 lacks. Some of these warnings go to the root logger, so that its level is raised
    # too.
    levels = {
        logger: logger.level for logger in (logging.getLogger("torchrec"), logging.getLogger())
    }
    for logger, level in levels.items():
        logger.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextlib.contextmanager
def keep_rows_undrawn(release_pages: Callable[[int, int], bool]) -> Iterator[None]:
    """Make sharders leave the rows of new shards as memory has them, for who fills all of them
    afterwards.

    release_pages: gives full pages of (address, bytes) back to the machine; returns whether they
    read as zeros then.
    """
    # Else all rows are drawn twice or, where gradients are kept, three times. Source:
    # init_parameters in batched_embedding_kernel.py, reset_parameters in embedding.py and
    # embeddingbag.py, and torch.randn in fbgemm_gpu's DenseTableBatchedEmbeddingBagsCodegen. Its
    # torch.zeros would take the host's memory before old shards have left.
    from torchrec.distributed import batched_embedding_kernel, embedding, embeddingbag

    with Patches() as patches:
        for kind in (
            batched_embedding_kernel.BaseBatchedEmbedding,
            batched_embedding_kernel.BaseBatchedEmbeddingBag,
        ):
            patches.replace(kind, "init_parameters", lambda kernel: None)
        for kind in (
            embedding.ShardedEmbeddingCollection,
            embeddingbag.ShardedEmbeddingBagCollection,
        ):
            patches.replace(kind, "reset_parameters", lambda collection: None)
        with _Untouched(release_pages):
            yield


class _Untouched(TorchFunctionMode):
    def __init__(self, release_pages: Callable[[int, int], bool]) -> None:
        super().__init__()
        self._release_pages = release_pages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.randn:
            return torch.empty(*args, **options)
        if func is torch.zeros and str(options.get("device")) == "cpu" and "out" not in options:
            memory = torch.empty(*args, **options)
            if memory.nbytes >= UNTOUCHED_BYTES and self._is_zeroed(memory):
                return memory
        return func(*args, **options)

    def _is_zeroed(self, memory: torch.Tensor) -> bool:
        """Make a new tensor zeros without taking the machine's memory, which a write takes; False:
        it cannot be."""
        if (
            sys.platform != "linux"
            or memory.is_pinned()
            or not self._release_pages(memory.data_ptr(), memory.nbytes)
        ):
            return False
        # The first and last pages are not this tensor's alone, and stay.
        for part in (slice(0, mmap.PAGESIZE), slice(-mmap.PAGESIZE, None)):
            memory.view(-1).view(torch.uint8)[part].zero_()
        return True


def lookups_of(sharded: Any) -> list[nn.Module]:
    """Return what looks up the ids of a sharded collection, one for each sharding type. Source: as
    below."""
    return list(sharded._lookups)


def ddp_of_data_parallel_tables(sharded: Any) -> list[Any]:
    """Return the DistributedDataParallel modules in which torchrec wraps a collection's
    data-parallel tables."""
    # Source: init_data_parallel in torchrec/distributed/embeddingbag.py and embedding.py;
    # `_lookups` is a plain list.
    from torch.nn.parallel import DistributedDataParallel

    return [lookup for lookup in sharded._lookups if isinstance(lookup, DistributedDataParallel)]


def row_wise_sharding(sharded: Any) -> tuple[int, Any]:
    """Return the row-wise sharding of a sharded collection, and the place of its ids among those
    that arrive."""
    # Source: torchrec/distributed/embeddingbag.py and embedding.py: one KeyedJaggedTensor for each
    # sharding, in order.
    shardings = getattr(sharded, "_embedding_shardings", None)
    if shardings is None:
        shardings = list(sharded._sharding_type_to_sharding.values())
    for place, sharding in enumerate(shardings):
        if hasattr(sharding, "create_input_dist") and type(sharding).__name__.startswith("Rw"):
            return place, sharding
    raise AssertionError("the collection has no row-wise table")


def route_by_bucket(sharding: Any, buckets: dict[str, tuple[int, int]], is_sequence: bool) -> None:
    """Let the input dist of a row-wise sharding send ids, as they are, to the rank that owns their
    bucket.

    buckets: name of a table -> its number of ids (0: any ids, by their remainder) and of buckets.
    """
    # As ManagedCollisionCollection does: torchrec/distributed/mc_modules.py. The collection makes
    # its input dists at its first call: `create_input_dist` is hidden by one of the instance.
    # It warns at the first call that ids are above the number of rows, which they may be;
    # LookupInputs has seen them.
    logging.getLogger("torchrec.sparse.jagged_tensor_validator").setLevel(logging.ERROR)
    feature_buckets = [
        buckets[table.name] for table in sharding.embedding_tables() for _ in table.feature_names
    ]

    def create_input_dist(device: torch.device | None = None) -> RwSparseFeaturesDist:
        return RwSparseFeaturesDist(
            pg=sharding._pg,
            num_features=len(feature_buckets),
            feature_hash_sizes=[num_ids for num_ids, _ in feature_buckets],
            feature_total_num_buckets=[num_buckets for _, num_buckets in feature_buckets],
            device=device if device is not None else sharding._device,
            is_sequence=is_sequence,
            keep_original_indices=True,
        )

    sharding.create_input_dist = create_input_dist


IDENTITIES = "_hash_zch_identities"
METADATA = "_hash_zch_metadata"
BUCKETS = "_hash_zch_bucket"
"""Names in the state_dict of HashZchManagedCollisionModule."""
COLLISIONS = "_managed_collision_collection"
EMBEDDINGS = "_embedding_module"
MODULES = "_managed_collision_modules"
"""Names in the state_dict of ManagedCollisionEmbedding(Bag)Collection. Source:
torchrec/modules/mc_*.py."""


def modules_of(collisions: Any) -> dict[str, nn.Module]:
    """Return the managed collision module of each table of a ManagedCollisionCollection, by
    name."""
    return dict(collisions._managed_collision_modules.items())


def returns_remapped_features(managed: Any) -> bool:
    """Whether calls return the rows' numbers too."""
    return bool(managed._return_remapped_features)


def hash_zch_settings(module: Any) -> dict[str, Any]:
    """Return what a HashZchManagedCollisionModule was built with. Source:
    torchrec/modules/hash_mc_modules.py."""
    config = module._eviction_config
    reserves = module._opt_in_prob != -1
    return {
        "policy": ""
        if module._eviction_policy_name is None
        else module._eviction_policy_name.value,
        "ttl_hours": 0 if config is None else int(config.single_ttl or 0),
        "percent_reserved": module._percent_reserved_slots if reserves else 0.0,
        "max_probe": module._max_probe,
    }


def hash_zch_difference(module: Any, name: str) -> str:
    """Return the setting by which a HashZchManagedCollisionModule maps ids as `IdMapping` does not;
    "" for none."""
    rows = module.output_size()
    buckets = module.buckets()
    divides = module.input_mapper._inference_dispatch_div_train_world_size
    reasons = {
        "output_segments of unequal size": module._output_segments
        != [rows // buckets * bucket for bucket in range(buckets + 1)],
        "opt_in_prob below 100, which draws ids at random,": 0 < module._opt_in_prob < 100,
        "disable_fallback=True": module._disable_fallback,
        "PER_FEATURE_TTL_EVICTION": module._eviction_policy_name
        == HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION,
        "track_id_freq or write_runtime_meta_dim": module._hash_zch_runtime_meta is not None,
        "inference_dispatch_div_train_world_size=True": divides,
        "is_inference=True": module._is_inference,
        f"a table whose name, '{name}', makes it read-only,": name.lower().endswith(
            module._read_only_suffix
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def hash_zch_state(module: Any) -> tuple[Tensor, Tensor | None]:
    """Return the identities and the metadata, (zch_size, 1) each; no metadata: nothing is
    evicted."""
    metadata = module._hash_zch_metadata
    has_metadata = metadata is not None and metadata.numel() == module._hash_zch_identities.numel()
    return module._hash_zch_identities.data, metadata if has_metadata else None


def set_hash_zch_state(module: Any, identities: Tensor, metadata: Tensor | None) -> None:
    """Set the identities and the metadata; those without rows free their memory."""
    module._hash_zch_identities.data = identities
    if metadata is not None:
        module._hash_zch_metadata = metadata


MCH_IDS = "_mch_sorted_raw_ids"
MCH_ROWS = "_mch_remapped_ids_mapping"
MCH_SEGMENTS = "_output_segments_tensor"
MCH_LOOKUPS = "_current_iter_tensor"
"""Names in the state_dict of MCHManagedCollisionModule. Source: torchrec/modules/mc_modules.py."""


def mch_settings(module: Any) -> dict[str, Any]:
    """Return what an MCHManagedCollisionModule was built with."""
    policy = module._eviction_policy
    return {
        "interval": module._eviction_interval,
        "hash_function": module._input_hash_func,
        "policy": policy,
        "filters": policy._threshold_filtering_func is not None,
    }


def mch_difference(module: Any) -> str:
    """Return the setting by which an MCHManagedCollisionModule is a part of another; "" for
    none."""
    if module._output_global_offset:
        return f"output_global_offset={module._output_global_offset}"
    segments = module._output_segments_tensor
    last = module.output_size() if segments.is_meta else int(segments.max())
    return "" if last == module.output_size() else f"output_segments that end at {last}"


def mch_state(module: Any) -> dict[str, Tensor]:
    """Return what an MCHManagedCollisionModule keeps of each id, (zch_size,) each, sorted by id;
    and its row."""
    return {MCH_IDS: module._mch_sorted_raw_ids, MCH_ROWS: module._mch_remapped_ids_mapping} | {
        f"_mch_{name}": values for name, values in module._mch_metadata.items()
    }


def set_mch_state(module: Any, state: dict[str, Tensor], lookups: Tensor) -> None:
    """Set what `mch_state` returns, in any order. lookups: how many there were in training,
    (1,)."""
    _set_sorted(module, state)
    module._current_iter_tensor = lookups
    module._sort_mch_buffers()


def _set_sorted(module: Any, state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        setattr(module, name, value)
    module._mch_metadata = {name: getattr(module, f"_mch_{name}") for name in module._mch_metadata}


def update_mch(
    module: Any, state: dict[str, Tensor], ids: Tensor, history: dict[str, Tensor], step: int
) -> None:
    """Let an MCHManagedCollisionModule choose which ids have rows, as it does once in an eviction
    interval.

    state: what `mch_state` returns, sorted by id; it is changed, and sorted again. ids: those that
    were looked up since the last time. history: what the policy has recorded of each, by name.
    step: the number of this lookup.
    """
    _set_sorted(module, state)
    module._current_iter = step
    module._history_accumulator = ids
    module._history_metadata = history
    module._current_history_buffer_offset = len(ids)
    module._coalesce_history()
