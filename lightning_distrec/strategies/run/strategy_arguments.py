"""Checks the arguments of strategies: their names, for which Lightning, FSDP1 and TorchRec have
others, and types."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, TypeVar

from lightning_distrec.checkpoint.checkpoint_options import CheckpointOptions
from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.option_values import check_types, type_hints
from lightning_distrec.prefetch.even_batches import UnevenInputs
from lightning_distrec.strategies.run.stopping import StopOptions

Init = TypeVar("Init", bound=Callable[..., None])
Backend = Literal["gloo", "nccl"]
MatmulPrecision = Literal["highest", "high", "medium"]


class RunOptions(TypedDict, total=False):
    """What DistRecStrategy takes: for type checkers and IDEs, which see no options in
    **run_options: Any."""

    uneven_inputs: UnevenInputs
    checkpoint: CheckpointOptions | dict[str, Any] | None
    stopping: StopOptions | dict[str, Any] | None
    process_group_backend: Backend | None
    float32_matmul_precision: MatmulPrecision | None
    timeout_seconds: float | None
    start_seconds: float
    watchdog_seconds: float
    deadlock_seconds: float


def any_at_run_time(init: Init) -> Init:
    """Let run_options of an __init__ be of type Any at run time."""
    # jsonargparse takes the options of an Unpack from its TypedDict, which has no defaults and no
    # help texts. Of Any it reads where the __init__ hands them on. Can go when it does so of an
    # Unpack too.
    init.__annotations__["run_options"] = Any
    return init


_COMMS = "quantized_comms, which takes a QCommsConfig, or {forward: fp16, backward: bf16}"
_GRADIENTS = "comm_dtype='bf16' or powersgd={'matrix_rank': 4} of ddp_tuned"
_DEVICE = "offload=True of fsdp_tuned; more ranks and activation_checkpointing free memory as well"
_GATHERED = "nothing: FSDP2 gathers the next block ahead by itself"
_LAUNCHED = "nothing: the ranks are those that were launched; devices and num_nodes of the Trainer"
_PLANNING = "planning (plan_file, bandwidths, reserve), tables and memory_bytes_per_rank"
_REPLICAS = (
    "replicas of fsdp_tuned: 1 for FULL_SHARD, 'nodes' for HYBRID_SHARD; ddp_tuned for NO_SHARD"
)

INSTEAD = {
    # Lightning's DDPStrategy, and torch's DistributedDataParallel
    "accelerator": "accelerator of the Trainer",
    "broadcast_buffers": "nothing: buffers are broadcast where they change",
    "checkpoint_io": "checkpoint, with options of CheckpointOptions",
    "cluster_environment": _LAUNCHED,
    "ddp_comm_hook": _GRADIENTS,
    "ddp_comm_state": _GRADIENTS,
    "ddp_comm_wrapper": _GRADIENTS,
    "find_unused_parameters": "nothing: only torchrec_sharded and ddp_tuned have it, and FSDP2 "
    "and stages need none",
    "gradient_as_bucket_view": "nothing: gradients are views of DDP's buckets always",
    "init_sync": "nothing: ranks begin with rank 0's weights always",
    "model_averaging_period": "nothing: ranks average gradients in every step; sharding_groups "
    "averages tables",
    "parallel_devices": "devices of the Trainer",
    "precision_plugin": "precision of the Trainer",
    "start_method": "nothing: the Trainer, torchrun, Slurm or mpirun starts the ranks",
    "static_graph": "nothing: only torchrec_sharded and ddp_tuned have it",
    "timeout": "timeout_seconds",
    # FSDP1, FSDP2, and Lightning's FSDPStrategy and ModelParallelStrategy
    "activation_checkpointing": "fsdp={'activation_checkpointing': ...} with dense='fsdp', or "
    "ddp_tuned or fsdp_tuned",
    "activation_checkpointing_policy": "activation_checkpointing, true or a list of class names",
    "auto_wrap_policy": "wrap of fsdp_tuned, a list of class names and paths",
    "backward_prefetch": _GATHERED,
    "cpu_offload": _DEVICE,
    "data_parallel_size": _REPLICAS,
    "device_mesh": _REPLICAS,
    "forward_prefetch": _GATHERED,
    "ignored_modules": "wrap of fsdp_tuned for other blocks; all parameters are sharded",
    "limit_all_gathers": _GATHERED,
    "mixed_precision": "precision of the Trainer; param_dtype and reduce_dtype of fsdp_tuned",
    "mp_policy": "precision of the Trainer; param_dtype and reduce_dtype of fsdp_tuned",
    "offload_policy": _DEVICE,
    "save_distributed_checkpoint": "checkpoint={'distributed': True}",
    "sharding_strategy": _REPLICAS,
    "state_dict_type": "checkpoint={'distributed': True} for a folder, False for one file",
    "sync_module_states": "nothing: ranks begin with rank 0's weights always",
    "tensor_parallel_size": "nothing: layers are not split; fsdp_tuned shards their parameters",
    "use_orig_params": "nothing: names and shapes of parameters stay",
    # TorchRec's DistributedModelParallel, planners and sharders
    "batch_size": "batch_size_per_rank",
    "constraints": "tables, which takes the same dict of ParameterConstraints, or plain options",
    "data_parallel_wrapper": "dense='ddp' or 'fsdp', bucket_cap_mb, static_graph and "
    "find_unused_parameters",
    "device": "accelerator and devices of the Trainer",
    "env": _LAUNCHED,
    "fused_params": "configure_optimizers or table_optimizer for optimizers, tables for caches",
    "plan": "planning={'plan_file': ...}, which takes a ShardingPlan or the path of a plan.json",
    "planner": _PLANNING,
    "qcomm_codecs_registry": _COMMS,
    "qcomms_config": _COMMS,
    "sharders": "tables and quantized_comms; the sharders of all collections are built in",
    "sharding_group_size": "sharding_groups={'size': ...}",
    "storage_reservation": "planning={'reserve': ...}",
    "topology": "memory_bytes_per_rank and planning={'bandwidths': ...}; ranks and nodes are "
    "those that were launched",
}
"""Name -> what to use in its place."""


def check_arguments(strategy: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError: a strategy has no such option, or a value has another type.

    strategy: its class. arguments: what its __init__ has for names, first of all.
    """
    base = next(kind for kind in strategy.__mro__[1:] if "__init__" in vars(kind))
    options = {
        name: value for name, value in arguments.items() if name in type_hints(strategy.__init__)
    }
    run_options = options.pop("run_options")
    known = type_hints(base.__init__)
    for name in run_options.keys() - known.keys():
        instead = (
            f". Use {INSTEAD[name]}." if name in INSTEAD else did_you_mean(name, [*options, *known])
        )
        raise ConfigError(f"{name}= is no option of {strategy.strategy_name}{instead}")
    check_types(options, strategy.__init__)
    check_types(run_options, base.__init__)
