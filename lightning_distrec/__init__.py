"""Trains an unchanged LightningModule with its embedding tables sharded over many ranks and nodes.

Importing this package registers the strategies with Lightning, and lets it read checkpoints that
are folders (registration.py). torchrec and fbgemm load when a strategy that needs them is made, or
when one of the names below that needs them is first used.
"""

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_distrec.callbacks.prediction_writer import PredictionWriter
    from lightning_distrec.callbacks.scaled_learning_rate import ScaledLearningRate
    from lightning_distrec.callbacks.table_callbacks import DynamicIds, NormalizeRows, PlanLogger
    from lightning_distrec.checkpoint.checkpoint_options import CheckpointOptions
    from lightning_distrec.cluster.environment import LaunchedRanks
    from lightning_distrec.observe.communication import Communication
    from lightning_distrec.observe.data_report import DataReport
    from lightning_distrec.observe.rank_monitor import RankMonitor
    from lightning_distrec.observe.throughput import Throughput
    from lightning_distrec.pipeline.pipeline_parallel import PipelineParallelStrategy
    from lightning_distrec.pipeline.stage_schedule import StageSchedule
    from lightning_distrec.prefetch.prefetcher import PrefetchOptions
    from lightning_distrec.serving.publishing.publish_rows import PublishRows
    from lightning_distrec.sharding.meta_tables import meta_tables
    from lightning_distrec.sharding.planning.bandwidths import Bandwidths
    from lightning_distrec.sharding.planning.table_options import PlanningOptions, TableOptions
    from lightning_distrec.sharding.sharders import QuantizedComms
    from lightning_distrec.sharding.sharding_groups import ShardingGroupOptions
    from lightning_distrec.sharding.weights.collective_reads import sharded_l2
    from lightning_distrec.strategies.data_parallel.gradient_exchange import PowerSGDOptions
    from lightning_distrec.strategies.ddp import TunedDDPStrategy
    from lightning_distrec.strategies.fsdp import TunedFSDPStrategy
    from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
    from lightning_distrec.strategies.run.stopping import StopOptions
    from lightning_distrec.strategies.torchrec import TorchRecShardedStrategy

__version__ = "0.1.0"

__all__ = [
    "Bandwidths",
    "CheckpointOptions",
    "Communication",
    "DataReport",
    "DynamicIds",
    "FSDPOptions",
    "LaunchedRanks",
    "NormalizeRows",
    "PipelineParallelStrategy",
    "PlanLogger",
    "PlanningOptions",
    "PowerSGDOptions",
    "PredictionWriter",
    "PrefetchOptions",
    "PublishRows",
    "QuantizedComms",
    "RankMonitor",
    "ScaledLearningRate",
    "ShardingGroupOptions",
    "StageSchedule",
    "StopOptions",
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
    "Communication": "lightning_distrec.observe.communication",
    "DataReport": "lightning_distrec.observe.data_report",
    "DynamicIds": "lightning_distrec.callbacks.table_callbacks",
    "FSDPOptions": "lightning_distrec.strategies.fully_sharded.fsdp_options",
    "LaunchedRanks": "lightning_distrec.cluster.environment",
    "NormalizeRows": "lightning_distrec.callbacks.table_callbacks",
    "PipelineParallelStrategy": "lightning_distrec.pipeline.pipeline_parallel",
    "PlanLogger": "lightning_distrec.callbacks.table_callbacks",
    "PlanningOptions": "lightning_distrec.sharding.planning.table_options",
    "PredictionWriter": "lightning_distrec.callbacks.prediction_writer",
    "PrefetchOptions": "lightning_distrec.prefetch.prefetcher",
    "PublishRows": "lightning_distrec.serving.publishing.publish_rows",
    "QuantizedComms": "lightning_distrec.sharding.sharders",
    "RankMonitor": "lightning_distrec.observe.rank_monitor",
    "ScaledLearningRate": "lightning_distrec.callbacks.scaled_learning_rate",
    "ShardingGroupOptions": "lightning_distrec.sharding.sharding_groups",
    "StageSchedule": "lightning_distrec.pipeline.stage_schedule",
    "StopOptions": "lightning_distrec.strategies.run.stopping",
    "TableOptions": "lightning_distrec.sharding.planning.table_options",
    "Throughput": "lightning_distrec.observe.throughput",
    "TorchRecShardedStrategy": "lightning_distrec.strategies.torchrec",
    "TunedDDPStrategy": "lightning_distrec.strategies.ddp",
    "TunedFSDPStrategy": "lightning_distrec.strategies.fsdp",
    "meta_tables": "lightning_distrec.sharding.meta_tables",
    "sharded_l2": "lightning_distrec.sharding.weights.collective_reads",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_distrec' has no attribute {name!r}")
    return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _is_console() -> bool:
    words = _sys.orig_argv[1:3]
    return (
        words == ["-m", __name__]
        or _os.path.basename(words[0] if words else "") == "lightning-distrec"
    )


# Lightning takes seconds to load, which the console's help, lists and complaints need not wait for:
# its commands register where they need it. Children that multiprocessing spawns have another
# command line, and register here.
if not _is_console():
    _import_module("lightning_distrec.registration").register()
