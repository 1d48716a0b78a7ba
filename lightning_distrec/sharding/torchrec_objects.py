"""TorchRec's own objects in the place of our options: taken where both say the same, refused by name where not."""

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, NoReturn

from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import CacheParams

from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.sharders import PRECISIONS

_QCOMMS = "quantized_comms, which takes a QCommsConfig, or {forward: fp16, backward: bf16}"
KEYWORDS = {
    "plan": "planning={'plan_file': ...}, which takes a ShardingPlan or the path of a plan.json",
    "constraints": "tables, which takes the same dict of ParameterConstraints, or plain options",
    "planner": "planning (plan_file, bandwidths, reserve), tables and memory_bytes_per_rank",
    "topology": "memory_bytes_per_rank and planning={'bandwidths': ...}; ranks and nodes are those that were launched",
    "batch_size": "batch_size_per_rank",
    "storage_reservation": "planning={'reserve': ...}",
    "sharders": "tables and quantized_comms; the sharders of all collections are built in",
    "fused_params": "configure_optimizers or table_optimizer for optimizers, tables for caches",
    "qcomm_codecs_registry": _QCOMMS,
    "qcomms_config": _QCOMMS,
    "data_parallel_wrapper": "dense='ddp' or 'fsdp', bucket_cap_mb, static_graph and find_unused_parameters",
    "sharding_group_size": "sharding_groups={'size': ...}",
    "env": "nothing: the ranks are those that were launched",
    "device": "accelerator and devices of the Trainer",
}
"""Arguments of TorchRec's DistributedModelParallel, planners and sharders -> where ours are set."""

_INSTEAD = {
    "batch_sizes": "batch_size_per_rank of the strategy",
    "bounds_check_mode": "check_ids of the strategy",
    "device_group": "accelerator of the Trainer",
    "output_dtype": "precision of the Trainer",
}


def refuse_keywords(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError where an argument of the strategy has a name that TorchRec gives it."""
    for name in arguments:
        if name in KEYWORDS:
            raise ConfigError(f"{name}= is TorchRec's name. Use {KEYWORDS[name]}.")


def plain_names(values: Any) -> Any:
    """Return a list of names for one of ShardingType or EmbeddingComputeKernel; other values as they are."""
    if isinstance(values, (list, tuple)):
        return [value.value if isinstance(value, Enum) else value for value in values]
    return values


def as_table_options(constraints: ParameterConstraints) -> dict[str, Any]:
    """Return options of one table that say the same. Raises ConfigError: there are none."""
    default = ParameterConstraints()
    names = ("sharding_types", "compute_kernels", "min_partition", "pooling_factors", "cache_params")
    for name in _changed(constraints, default, names):
        _refuse("ParameterConstraints", name, getattr(constraints, name))
    options = {name: getattr(constraints, name) for name in names[:3]}
    factors = constraints.pooling_factors
    if len(set(factors)) > 1:
        raise ConfigError(
            f"pooling_factors={factors}: one pooling_factor is for all features of a table. Set their mean."
        )
    if factors != default.pooling_factors:
        options["pooling_factor"] = factors[0]
    if (cache := constraints.cache_params) is not None:
        for name in _changed(cache, CacheParams(), ("load_factor", "stats")):
            _refuse("CacheParams", name, getattr(cache, name))
        options["cache_load_factor"] = cache.load_factor
    return options


def as_comms(value: Any) -> Any:
    """Return a QCommsConfig as a dict of our options; other values as they are.

    Raises ConfigError: it rounds in a way that quantized_comms has no option for.
    """
    if not isinstance(value, QCommsConfig):
        return value
    names = ("forward_precision", "backward_precision")
    for name in _changed(value, QCommsConfig(), names):
        _refuse("quantized_comms: QCommsConfig", name, getattr(value, name))
    words = {precision: word for word, precision in PRECISIONS.items()}
    # An unknown precision keeps its own word, which the options refuse.
    forward, backward = (words.get(p := getattr(value, name), p.value) for name in names)
    return {"forward": forward, "backward": backward}


def _changed(value: Any, default: Any, but: tuple[str, ...]) -> list[str]:
    names = [field.name for field in fields(value) if field.name not in but]
    return [name for name in names if getattr(value, name) != getattr(default, name)]


def _refuse(kind: str, name: str, value: Any) -> NoReturn:
    instead = f"set {_INSTEAD[name]} instead" if name in _INSTEAD else "there is no option that does the same"
    raise ConfigError(f"{kind} has {name}={value!r}. Leave it out: {instead}.")
