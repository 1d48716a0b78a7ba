"""Options for a chain of blocks that is split into stages, and which ranks are the stages of one pipeline."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist

from lightning_distrec.cluster.consensus import Consensus, RankFlags
from lightning_distrec.errors import ConfigError
from lightning_distrec.option_values import check_choice

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b"]
Split = Literal["parameters"] | list[str]


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How a chain of blocks is split, and in which order its stages compute: see PipelineParallelStrategy."""

    microbatches: int = 4
    schedule: Schedule = "gpipe"
    stages: int | None = None
    stages_per_rank: int = 1
    chain: str = "auto"
    split: Split = "parameters"
    first_stage: tuple[str, ...] = ()
    last_stage: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("microbatches", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1.")
        check_choice("schedule", self.schedule, get_args(Schedule))
        if (self.stages_per_rank > 1) != (self.schedule == "interleaved_1f1b"):
            raise ConfigError(
                f"stages_per_rank={self.stages_per_rank} and schedule={self.schedule!r}: a rank computes several "
                "stages with schedule='interleaved_1f1b', and one with the others. Set both, or neither."
            )
        if isinstance(self.split, str) and self.split != "parameters":
            raise ConfigError(f"split={self.split!r} is not known. Use 'parameters', or paths of blocks.")
        if self.stages is not None and (self.stages < 2 or self.stages % self.stages_per_rank):
            raise ConfigError(
                f"stages={self.stages}: must be at least 2, and a multiple of stages_per_rank={self.stages_per_rank}."
            )


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
    replica, pipeline_rank = divmod(rank, num_ranks)
    seconds = timeout.total_seconds()
    pipelines = [list(range(first, first + num_ranks)) for first in range(0, world, num_ranks)]
    replicas = [list(range(first, world, num_ranks)) for first in range(num_ranks)]
    # All ranks make all groups in this order, those that they are not in too: making a group is collective.
    return PipelineRanks(
        rank=pipeline_rank,
        num_ranks=num_ranks,
        replica=replica,
        num_replicas=world // num_ranks,
        # In turn, as ScheduleInterleaved1F1B expects: rank 0 has stages 0, n, 2n and so on.
        stages=tuple(pipeline_rank + i * num_ranks for i in range(options.stages_per_rank)),
        num_stages=num_ranks * options.stages_per_rank,
        pipeline=dist.new_subgroups_by_enumeration(pipelines, timeout=timeout)[0],
        same_stage=dist.new_subgroups_by_enumeration(replicas, timeout=timeout)[0],
        # A group on the host of its own: over NCCL a count would have to be read back from the GPU.
        same_stage_host=dist.new_subgroups_by_enumeration(replicas, timeout=timeout, backend="gloo")[0],
        messages=Consensus(seconds, RankFlags(), pipelines[replica]),
    )
