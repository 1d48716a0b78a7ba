"""Trains an unchanged LightningModule with its embedding tables sharded over many ranks and nodes.

Importing this package registers the strategies with Lightning, and lets it read checkpoints that are folders. torchrec
and fbgemm load when a strategy that needs them is made, or when one of the names below that needs them is first used.
"""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_distrec._compat.lightning import override_environment_choice
from lightning_distrec._compat.lightning_checkpoints import read_folders_too

if TYPE_CHECKING:
    from lightning_distrec.callbacks.communication import Communication
    from lightning_distrec.callbacks.rank_monitor import RankMonitor
    from lightning_distrec.callbacks.scaled_learning_rate import ScaledLearningRate
    from lightning_distrec.callbacks.stage_schedule import StageSchedule
    from lightning_distrec.callbacks.table_callbacks import DynamicIds, NormalizeRows, PlanLogger
    from lightning_distrec.callbacks.throughput import Throughput
    from lightning_distrec.checkpoint.checkpoint_options import CheckpointOptions
    from lightning_distrec.prefetch.prefetcher import PrefetchOptions
    from lightning_distrec.sharding.collective_reads import sharded_l2
    from lightning_distrec.sharding.meta_tables import meta_tables
    from lightning_distrec.sharding.planning.bandwidths import Bandwidths
    from lightning_distrec.sharding.planning.table_options import PlanningOptions, TableOptions
    from lightning_distrec.sharding.sharders import QuantizedComms
    from lightning_distrec.sharding.sharding_groups import ShardingGroupOptions
    from lightning_distrec.strategies.data_parallel.gradient_exchange import PowerSGDOptions
    from lightning_distrec.strategies.ddp import TunedDDPStrategy
    from lightning_distrec.strategies.fsdp import TunedFSDPStrategy
    from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
    from lightning_distrec.strategies.pipeline import PipelineParallelStrategy
    from lightning_distrec.strategies.torchrec import TorchRecShardedStrategy

__version__ = "0.1.0"

__all__ = [
    "Bandwidths",
    "CheckpointOptions",
    "Communication",
    "DynamicIds",
    "FSDPOptions",
    "NormalizeRows",
    "PipelineParallelStrategy",
    "PlanLogger",
    "PlanningOptions",
    "PowerSGDOptions",
    "PrefetchOptions",
    "QuantizedComms",
    "RankMonitor",
    "ScaledLearningRate",
    "ShardingGroupOptions",
    "StageSchedule",
    "TableOptions",
    "Throughput",
    "TorchRecShardedStrategy",
    "TunedDDPStrategy",
    "TunedFSDPStrategy",
    "meta_tables",
    "sharded_l2",
]

_HOMES = {
    "Bandwidths": "lightning_distrec.sharding.planning.bandwidths",
    "PowerSGDOptions": "lightning_distrec.strategies.data_parallel.gradient_exchange",
    "CheckpointOptions": "lightning_distrec.checkpoint.checkpoint_options",
    "Communication": "lightning_distrec.callbacks.communication",
    "DynamicIds": "lightning_distrec.callbacks.table_callbacks",
    "FSDPOptions": "lightning_distrec.strategies.fully_sharded.fsdp_options",
    "NormalizeRows": "lightning_distrec.callbacks.table_callbacks",
    "PipelineParallelStrategy": "lightning_distrec.strategies.pipeline",
    "PlanLogger": "lightning_distrec.callbacks.table_callbacks",
    "PlanningOptions": "lightning_distrec.sharding.planning.table_options",
    "PrefetchOptions": "lightning_distrec.prefetch.prefetcher",
    "QuantizedComms": "lightning_distrec.sharding.sharders",
    "RankMonitor": "lightning_distrec.callbacks.rank_monitor",
    "ScaledLearningRate": "lightning_distrec.callbacks.scaled_learning_rate",
    "ShardingGroupOptions": "lightning_distrec.sharding.sharding_groups",
    "StageSchedule": "lightning_distrec.callbacks.stage_schedule",
    "TableOptions": "lightning_distrec.sharding.planning.table_options",
    "Throughput": "lightning_distrec.callbacks.throughput",
    "TorchRecShardedStrategy": "lightning_distrec.strategies.torchrec",
    "TunedDDPStrategy": "lightning_distrec.strategies.ddp",
    "TunedFSDPStrategy": "lightning_distrec.strategies.fsdp",
    "meta_tables": "lightning_distrec.sharding.meta_tables",
    "sharded_l2": "lightning_distrec.sharding.collective_reads",
}

_STRATEGIES = {
    "torchrec_sharded": (
        "TorchRecShardedStrategy",
        "Embedding tables sharded over the ranks by TorchRec, other layers as under DDP",
    ),
    "ddp_tuned": ("TunedDDPStrategy", "DDP tuned to the module, with crash-safe checkpoints"),
    "fsdp_tuned": ("TunedFSDPStrategy", "Parameters, gradients and optimizer state sharded over the ranks by FSDP2"),
    "pipeline_parallel": ("PipelineParallelStrategy", "A chain of blocks split into stages over the ranks"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_distrec' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _choose_environment() -> Any:
    return import_module("lightning_distrec.cluster.environment").choose_environment()


def _is_ours(strategy: Any) -> bool:
    return (isinstance(strategy, str) and strategy in _STRATEGIES) or getattr(strategy, "takes_launched_ranks", False)


# At import: a Trainer chooses its cluster environment before it makes the strategy that could ask for another.
override_environment_choice(_is_ours, _choose_environment)


def _is_folder(path: Any) -> bool:
    return isinstance(path, (str, Path)) and (Path(path) / "complete.json").is_file()


def _read_folder(path: Any, with_optimizers: bool, pickles: bool) -> Any:
    contents = import_module("lightning_distrec.checkpoint.contents")
    return contents.read_full(Path(path), with_optimizers, pickles)


# At import: load_from_checkpoint reads a folder without any Trainer or strategy.
read_folders_too(_is_folder, _read_folder)


def _make(class_name: str, **arguments: Any) -> Any:
    return __getattr__(class_name)(**arguments)


for _name, (_class_name, _description) in _STRATEGIES.items():
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, partial(_make, _class_name), description=_description)
