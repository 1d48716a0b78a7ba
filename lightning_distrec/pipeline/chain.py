"""How a chain of blocks is split into stages, which ranks and parameters each stage has, and what
cannot be split.

Used in set-up, by `placement.py`, and by `advise`, which has no ranks.
"""

import inspect
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer

from lightning_distrec._compat.torch_distributed import split_ranks
from lightning_distrec.cluster.consensus import Consensus, RankFlags
from lightning_distrec.errors import ConfigError, OptimizerError, UnsupportedError, did_you_mean
from lightning_distrec.option_values import plain_fields
from lightning_distrec.strategies.data_parallel.gradient_exchange import sparse_weights
from lightning_distrec.strategies.fully_sharded.shard_blocks import refuse_lazy
from lightning_distrec.strategies.fully_sharded.shards import refuse_stale

# By name: older versions of torch lack some of them.
UPDATE_BY_PARAMETER = tuple(
    getattr(torch.optim, name)
    for name in (
        *(
            "ASGD",
            "Adadelta",
            "Adafactor",
            "Adagrad",
            "Adam",
            "AdamW",
            "Adamax",
            "Muon",
            "NAdam",
            "RAdam",
            "RMSprop",
        ),
        *("Rprop", "SGD"),
    )
    if hasattr(torch.optim, name)
)
"""Optimizers that update each parameter from its own gradient and state alone."""

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b"]
Split = Literal["parameters"] | list[str]


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How a chain of blocks is split, and in which order its stages compute: see
    PipelineParallelStrategy."""

    microbatches: int = 4
    schedule: Schedule = "gpipe"
    stages: int | None = None
    stages_per_rank: int = 1
    chain: str = "auto"
    split: Split = "parameters"
    first_stage: tuple[str, ...] = ()
    last_stage: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("microbatches", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1.")
        if (self.stages_per_rank > 1) != (self.schedule == "interleaved_1f1b"):
            raise ConfigError(
                f"stages_per_rank={self.stages_per_rank} and schedule={self.schedule!r}: a rank "
                "computes several stages with schedule='interleaved_1f1b', and one with the "
                "others. Set both, or neither."
            )
        if self.stages is not None and (self.stages < 2 or self.stages % self.stages_per_rank):
            raise ConfigError(
                f"stages={self.stages}: must be at least 2, and a multiple of "
                f"stages_per_rank={self.stages_per_rank}."
            )

    def num_parts(self, batch_size: int, num_ranks: int) -> int:
        """Return the largest number of equal micro-batches of a batch that a pipeline of
        `num_ranks` takes."""
        # Equal parts: the mean of their losses is then the mean over all examples. With several
        # stages on a rank a round has as many as ranks. Source: torch's ScheduleInterleaved1F1B.
        numbers = [
            n for n in range(1, min(self.microbatches, batch_size) + 1) if batch_size % n == 0
        ]
        return max(
            n for n in numbers if self.stages_per_rank == 1 or n % max(1, n // num_ranks) == 0
        )

    def idle_share(self, num_ranks: int, num_parts: int) -> float:
        """Return the share of a step in which ranks wait for each other, where all stages take the
        same time.

        Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2.
        """
        return (num_ranks - 1) / (self.stages_per_rank * num_parts + num_ranks - 1)


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
    """Return the number of ranks of each pipeline. Raises ConfigError: the ranks cannot be divided
    evenly."""
    num_ranks = world if options.stages is None else options.stages // options.stages_per_rank
    if num_ranks < 2 or world % num_ranks:
        raise ConfigError(
            f"pipeline_parallel: {world} ranks cannot be pipelines of {num_ranks} ranks each. Use "
            "at least 2 ranks, and a multiple of stages / stages_per_rank."
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
    # All ranks make all groups in this order, those that they are not in too: making a group is
    # collective. But on the host each rank makes its own ones: gloo groups of all ranks would split
    # NCCL's communicator, for nothing.
    return PipelineRanks(
        rank=pipeline_rank,
        num_ranks=num_ranks,
        replica=replica,
        num_replicas=world // num_ranks,
        # In turn, as ScheduleInterleaved1F1B expects: rank 0 has stages 0, n, 2n and so on.
        stages=tuple(pipeline_rank + i * num_ranks for i in range(options.stages_per_rank)),
        num_stages=num_ranks * options.stages_per_rank,
        pipeline=split_ranks(pipelines, timeout),
        same_stage=split_ranks(replicas, timeout),
        # A group on the host of its own: over NCCL a count would have to be read back from the GPU.
        same_stage_host=dist.new_group(
            replicas[pipeline_rank], timeout, "gloo", use_local_synchronization=True
        ),
        messages=Consensus(seconds, RankFlags(), pipelines[replica]),
    )


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
HINT = (
    "Name an nn.Sequential or nn.ModuleList that forward goes through in order: "
    "chain='model.blocks'. Or name a module whose forward calls its layers one after the other: "
    "chain='model', and '' for the LightningModule itself."
)


@dataclass(frozen=True)
class Chain:
    """The blocks that forward goes through one after the other."""

    path: str
    blocks: list[nn.Module]
    paths: list[str]
    """Of all blocks in the module."""
    caller: nn.Module | None = None
    """Whose forward calls the blocks and may compute between them; None: they are those of a
    container."""


@dataclass(frozen=True)
class StageLayout:
    """Where a chain is split, and what each stage has."""

    chain: Chain
    begins: tuple[int, ...]
    """The first block of each stage."""
    stage_by_name: dict[str, int]
    """Name of a parameter, or of a buffer of a block -> its stage."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.begins)

    def block_numbers(self, stage: int) -> range:
        """Return the numbers of the blocks of a stage."""
        return range(*(*self.begins, len(self.chain.blocks))[stage : stage + 2])


def split_chain(module: nn.Module, options: StageOptions, num_stages: int) -> StageLayout:
    """Return where the chain of a module is split into `num_stages`.

    Raises ConfigError: there is no such chain, or it has too few blocks, or a parameter has no
    shape yet;
    UnsupportedError: stages would not have the numbers of one process.
    """
    _refuse_layers(module)
    chain = find_chain(module, options.chain)
    _refuse_shared(module, chain)
    is_last_by_name = _outer_parameters(module, chain, options)
    if isinstance(options.split, str):
        costs = list(map(num_parameters, chain.blocks))
        parameters = dict(module.named_parameters())
        for name, is_last in is_last_by_name.items():
            # Layers around the chain count with the first or the last block, whose stage computes
            # them too.
            costs[-1 if is_last else 0] += parameters[name].numel()
        begins = balance_stages(costs, num_stages)
    else:
        begins = _named_begins(options.split, chain, num_stages)
    # Buffers outside of the chain are on every rank, as all ranks run the user's step up to the
    # chain.
    stage_by_name = {name: (num_stages - 1) * is_last for name, is_last in is_last_by_name.items()}
    for stage, (begin, end) in enumerate(pairwise((*begins, len(chain.blocks)))):
        for path, block in zip(chain.paths[begin:end], chain.blocks[begin:end], strict=True):
            stage_by_name |= {
                name: stage
                for name, _ in (*block.named_parameters(path), *block.named_buffers(path))
            }
    return StageLayout(chain, begins, stage_by_name)


def num_parameters(module: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def find_chain(module: nn.Module, path: str) -> Chain:
    """Return the chain at a path; "auto": the one with the most parameters. Raises ConfigError:
    there is none."""
    containers = {
        name: submodule
        for name, submodule in module.named_modules()
        if name and isinstance(submodule, (nn.Sequential, nn.ModuleList)) and len(submodule) > 1
    }
    if path == "auto":
        if not containers:
            raise ConfigError(f"pipeline_parallel: the module has no chain of blocks. {HINT}")
        path = max(containers, key=lambda name: num_parameters(containers[name]))
    if path in containers:
        caller = None
        blocks = list(containers[path])
        paths = [f"{path}.{number}" for number in range(len(blocks))]
    else:
        caller = dict(module.named_modules()).get(path, nn.Identity())
        layers = [
            (name, layer) for name, layer in caller.named_children() if list(layer.parameters())
        ]
        blocks = [layer for _, layer in layers]
        paths = [f"{path}.{name}".lstrip(".") for name, _ in layers]
    if len(blocks) < 2:
        hint = did_you_mean(path, containers)
        raise ConfigError(f"chain={path!r}: the module has no chain of blocks there{hint} {HINT}")
    if len(set(map(id, blocks))) < len(blocks):
        raise UnsupportedError(
            f"chain={path!r}: a block is in it twice, and would be on two stages. Make two blocks."
        )
    return Chain(path, blocks, paths, caller)


def balance_stages(costs: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the first block of each stage, so that the largest sum of costs over a stage's blocks
    is smallest.

    Raises ConfigError: there are fewer blocks than stages.
    """
    if len(costs) < num_stages:
        raise ConfigError(
            f"the chain has {len(costs)} blocks, which cannot be split into {num_stages} stages. "
            "Set stages or chain."
        )
    # The larger the limit, the fewer stages it takes: bisection finds the smallest limit for which
    # there are enough stages. No limit below the costliest block can be met.
    limits = range(max(costs), sum(costs) + 1)
    index = bisect_left(
        limits, True, key=lambda limit: len(_greedy_begins(costs, limit)) <= num_stages
    )
    begins = _greedy_begins(costs, limits[index])
    while len(begins) < num_stages:  # the largest stage stays; split any other that has two blocks
        ends = (*begins[1:], len(costs))
        widest = max(range(len(begins)), key=lambda stage: ends[stage] - begins[stage])
        begins.insert(widest + 1, begins[widest] + (ends[widest] - begins[widest]) // 2)
    return tuple(begins)


def _greedy_begins(costs: Sequence[int], limit: int) -> list[int]:
    """Return the first block of each stage when each takes as many blocks as cost no more than
    `limit` together."""
    begins = [0]
    stage_cost = 0
    for number, cost in enumerate(costs):
        if stage_cost + cost > limit and number > begins[-1]:
            begins.append(number)
            stage_cost = 0
        stage_cost += cost
    return begins


def _named_begins(split: Sequence[str], chain: Chain, num_stages: int) -> tuple[int, ...]:
    for name in split:
        if name not in chain.paths[1:]:
            hint = did_you_mean(name, chain.paths)
            raise ConfigError(
                f"split: '{name}' is no block after the first of '{chain.path}'{hint}"
            )
    begins = (0, *sorted(set(map(chain.paths.index, split))))
    if len(begins) != num_stages:
        num = len(begins)
        raise ConfigError(
            f"split names {num - 1} blocks, which makes {num} stages, and there are {num_stages}."
        )
    return begins


def _outer_parameters(module: nn.Module, chain: Chain, options: StageOptions) -> dict[str, bool]:
    """Return name -> whether the last stage has it, for parameters outside of the chain. Raises
    ConfigError."""
    inner_ids = {id(p) for block in chain.blocks for p in block.parameters()}
    outer: dict[str, bool] = {}
    is_after = False  # named_parameters yields them in the order of registration
    for name, parameter in module.named_parameters():
        if id(parameter) not in inner_ids:
            outer[name] = is_after
        is_after = is_after or id(parameter) in inner_ids
    for option, paths in (("first_stage", options.first_stage), ("last_stage", options.last_stage)):
        for path in paths:
            names = [name for name in outer if _is_below(name, path)]
            if not names:
                hint = did_you_mean(path, outer)
                raise ConfigError(
                    f"{option}: no parameter outside of '{chain.path}' is at '{path}'{hint}"
                )
            outer.update(dict.fromkeys(names, option == "last_stage"))
    return outer


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _refuse_layers(module: nn.Module) -> None:
    """Raise ConfigError: a parameter has no shape yet; UnsupportedError: a layer's numbers depend
    on micro-batches."""
    refuse_lazy(module)
    for path, submodule in module.named_modules():
        # InstanceNorm without running statistics looks at each example alone; BatchNorm never does.
        keeps_statistics = isinstance(submodule, INSTANCE_NORMS) and submodule.track_running_stats
        if keeps_statistics or isinstance(submodule, BATCH_NORMS):
            raise UnsupportedError(
                f"'{path}' ({type(submodule).__name__}) uses the statistics of batches, and a "
                "stage sees micro-batches. Use GroupNorm or LayerNorm, or strategy='ddp_tuned'."
            )


def _refuse_shared(module: nn.Module, chain: Chain) -> None:
    """Raise UnsupportedError: a parameter is in several blocks, or modules outside of them."""
    # With remove_duplicate=True torch would name a tied parameter once, and the tie would go
    # unnoticed.
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    for names in names_by_id.values():
        places = {_place_of(name, chain) for name in names}
        if len(places) > 1:
            raise UnsupportedError(
                f"{' and '.join(map(repr, names))} are one parameter, in places that different "
                "stages may have. Untie them, or use strategy='fsdp_tuned'."
            )


def _place_of(name: str, chain: Chain) -> str:
    """Return the block that a parameter is in, or its module where it is in none."""
    for path in chain.paths:
        if _is_below(name, path):
            return path
    return name.rpartition(".")[0]


def refuse_run(trainer: Trainer, module: LightningModule) -> None:
    """Raise UnsupportedError: the module, or a setting of the Trainer, cannot be exact in
    stages."""
    if not module.automatic_optimization:
        raise UnsupportedError(
            "automatic_optimization=False: stages run backward in the order of their schedule. Use "
            "'fsdp_tuned'."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UnsupportedError(
            "training_step(dataloader_iter): a rank runs it more than once. Take a batch."
        )
    if str(trainer.precision) not in PRECISIONS:
        raise UnsupportedError(
            f"Trainer(precision={trainer.precision!r}): pipeline_parallel supports "
            f"{', '.join(map(repr, PRECISIONS))}. Backward runs before the loss is scaled: use "
            "'bf16-mixed'."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            kind = type(callback).__name__
            raise UnsupportedError(
                f"{kind} averages all weights on every rank. Use strategy='fsdp_tuned'."
            )
    sparse = list(sparse_weights(module).values())
    if sparse:
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which micro-batches do not add up. Set "
            "sparse=False for it, or use strategy='torchrec_sharded'."
        )


def refuse_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise OptimizerError: an optimizer needs more than each parameter's own gradient, or holds
    others' parameters."""
    for optimizer in optimizers:
        if not _updates_by_parameter(optimizer):
            names = ", ".join(optimizer_type.__name__ for optimizer_type in UPDATE_BY_PARAMETER)
            raise OptimizerError(
                f"pipeline_parallel: {type(optimizer).__name__} is not known to update each "
                "parameter from its own gradient alone, and a rank has those of its stage. Use one "
                f"of {names}."
            )
    refuse_stale(optimizers, module, OptimizerError)


def _updates_by_parameter(optimizer: Optimizer) -> bool:
    # torch wraps `step` of each class once more, for its hooks and profiler.
    step = inspect.unwrap(type(optimizer).step)
    is_known = step in [inspect.unwrap(kind.step) for kind in UPDATE_BY_PARAMETER]
    # Lightning has one without groups where there is no optimizer
    return is_known or not optimizer.param_groups
