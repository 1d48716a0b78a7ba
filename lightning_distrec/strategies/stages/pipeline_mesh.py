"""Which ranks are the stages of one pipeline, and which have the same stage of different replicas."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_distrec.cluster.consensus import Consensus, RankFlags
from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.stages.stage_options import StageOptions


@dataclass(frozen=True, kw_only=True)
class PipelineRanks:
    """The ranks as seen from one: consecutive ranks are one pipeline."""

    rank: int
    """This rank in its pipeline."""
    num_ranks: int
    """Ranks of a pipeline."""
    replica: int
    num_replicas: int
    stages: tuple[int, ...]
    """The stages that this rank computes."""
    num_stages: int
    pipeline: Any
    """Process group of this pipeline's ranks."""
    same_stage: Any
    """Process group of the ranks with the same stages."""
    same_stage_host: Any
    """The same ranks, on the host."""
    messages: Consensus
    """Of this pipeline's ranks, for what is sent once per step."""


def ranks_of_pipeline(options: StageOptions, world: int) -> int:
    """Return the number of ranks of each pipeline. Raises ConfigError: the ranks cannot be divided evenly."""
    num_ranks = world if options.stages is None else options.stages // options.stages_per_rank
    if num_ranks < 2 or world % num_ranks:
        raise ConfigError(
            f"pipeline_parallel: {world} ranks cannot be pipelines of {num_ranks} ranks each. Use at least 2 ranks, "
            "and a multiple of stages / stages_per_rank."
        )
    return num_ranks


def pipeline_ranks(options: StageOptions, rank: int, world: int, timeout: Any) -> PipelineRanks:
    """Collective. Return how the ranks are shared out.

    Raises ConfigError: they cannot be divided evenly among pipelines.
    """
    num_ranks = ranks_of_pipeline(options, world)
    replica, mine = divmod(rank, num_ranks)
    seconds = timeout.total_seconds()
    pipelines = [list(range(first, first + num_ranks)) for first in range(0, world, num_ranks)]
    same = [list(range(first, world, num_ranks)) for first in range(num_ranks)]
    return PipelineRanks(
        rank=mine,
        num_ranks=num_ranks,
        replica=replica,
        num_replicas=world // num_ranks,
        stages=tuple(mine + i * num_ranks for i in range(options.stages_per_rank)),
        num_stages=num_ranks * options.stages_per_rank,
        pipeline=dist.new_subgroups_by_enumeration(pipelines, timeout=timeout)[0],
        same_stage=dist.new_subgroups_by_enumeration(same, timeout=timeout)[0],
        same_stage_host=dist.new_subgroups_by_enumeration(same, timeout=timeout, backend="gloo")[0],
        messages=Consensus(seconds, RankFlags(), pipelines[replica]),
    )
