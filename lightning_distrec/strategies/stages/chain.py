"""Which blocks of a module are split into stages, and which parameters each stage has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_distrec.errors import ConfigError, UnsupportedError, did_you_mean
from lightning_distrec.strategies.stages.stage_options import StageOptions

NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS += (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
HINT = "Name an nn.Sequential or nn.ModuleList that forward goes through in order: chain='model.blocks'."


@dataclass(frozen=True)
class Chain:
    """The blocks that forward goes through one after the other."""

    path: str
    blocks: list[nn.Module]

    def path_of(self, block: int) -> str:
        """Return the path of a block in the module."""
        return f"{self.path}.{block}" if self.path else str(block)

    @property
    def paths(self) -> list[str]:
        """The paths of all blocks."""
        return [self.path_of(number) for number in range(len(self.blocks))]


@dataclass(frozen=True)
class StageLayout:
    """Where a chain is split, and what each stage has."""

    chain: Chain
    begins: tuple[int, ...]
    """The first block of each stage."""
    stage_of: dict[str, int]
    """Name of a parameter, or of a buffer of a block -> its stage."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.begins)

    def blocks_of(self, stage: int) -> range:
        """Return the numbers of the blocks of a stage."""
        ends = (*self.begins[1:], len(self.chain.blocks))
        return range(self.begins[stage], ends[stage])


def split_chain(
    module: nn.Module, options: StageOptions, num_stages: int, times: list[int] | None = None
) -> StageLayout:
    """Return where the chain of a module is split into `num_stages`. times: of each block; None: parameters count.

    Raises ConfigError: there is no such chain, or it has too few blocks; UnsupportedError: see `_refuse`.
    """
    _refuse_lazy(module)
    chain = find_chain(module, options.chain)
    _refuse(module, chain)
    outside = _outside_of_chain(module, chain, options)
    if times is not None:
        begins = balanced(times, num_stages)
    elif isinstance(options.split, str):
        costs = [sum(p.numel() for p in block.parameters()) for block in chain.blocks]
        parameters = dict(module.named_parameters())
        of_ends = [sum(parameters[name].numel() for name, is_last in outside.items() if is_last == i) for i in (0, 1)]
        costs[0] += of_ends[0]
        costs[-1] += of_ends[1]
        begins = balanced(costs, num_stages)
    else:
        begins = _begins_of(options.split, chain, num_stages)
    stage_of = {name: (num_stages - 1) * is_last for name, is_last in outside.items()}
    ends = (*begins[1:], len(chain.blocks))
    for stage, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        for number in range(begin, end):
            block, prefix = chain.blocks[number], f"{chain.path_of(number)}."
            for name, _ in [*block.named_parameters(prefix[:-1]), *block.named_buffers(prefix[:-1])]:
                stage_of[name] = stage
    return StageLayout(chain, begins, stage_of)


def find_chain(module: nn.Module, path: str) -> Chain:
    """Return the chain at a path; "auto": the one with the most parameters. Raises ConfigError: there is none."""
    containers = {
        name: submodule
        for name, submodule in module.named_modules()
        if name and isinstance(submodule, (nn.Sequential, nn.ModuleList)) and len(submodule) > 1
    }
    if path == "auto":
        if not containers:
            raise ConfigError(f"pipeline_parallel: the module has no chain of blocks. {HINT}")
        path = max(containers, key=lambda name: sum(p.numel() for p in containers[name].parameters()))
    if path not in containers:
        raise ConfigError(
            f"chain={path!r}: the module has no chain of blocks there{did_you_mean(path, containers)} {HINT}"
        )
    blocks = list(containers[path])
    if len({id(block) for block in blocks}) < len(blocks):
        raise UnsupportedError(f"chain={path!r}: a block is in it twice, and would be on two stages. Make two blocks.")
    return Chain(path, blocks)


def balanced(costs: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the first block of each stage, so that the largest sum of costs over a stage's blocks is smallest.

    Raises ConfigError: there are fewer blocks than stages.
    """
    if len(costs) < num_stages:
        raise ConfigError(
            f"pipeline_parallel: the chain has {len(costs)} blocks, which cannot be split into {num_stages} stages. "
            "Use fewer ranks per pipeline, stages=..., or another chain=..."
        )
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_greedy(costs, middle)) <= num_stages else (middle + 1, high)
    begins = _greedy(costs, low)
    while len(begins) < num_stages:  # the largest stage stays; split any other that has two blocks
        ends = (*begins[1:], len(costs))
        widest = max(range(len(begins)), key=lambda stage: ends[stage] - begins[stage])
        begins.insert(widest + 1, begins[widest] + (ends[widest] - begins[widest]) // 2)
    return tuple(begins)


def _greedy(costs: Sequence[int], limit: int) -> list[int]:
    """Return the first block of each stage when each takes as many blocks as cost no more than `limit` together."""
    begins, taken = [0], 0
    for number, cost in enumerate(costs):
        if taken + cost > limit and number > begins[-1]:
            begins.append(number)
            taken = 0
        taken += cost
    return begins


def _begins_of(split: Sequence[str], chain: Chain, num_stages: int) -> tuple[int, ...]:
    paths = [chain.path_of(number) for number in range(len(chain.blocks))]
    for name in split:
        if name not in paths[1:]:
            raise ConfigError(
                f"split: '{name}' is no block after the first of '{chain.path}'{did_you_mean(name, paths)}"
            )
    begins = (0, *sorted({paths.index(name) for name in split}))
    if len(begins) != num_stages:
        raise ConfigError(
            f"split names {len(begins) - 1} blocks, which makes {len(begins)} stages, and there are {num_stages}. Name "
            f"{num_stages - 1} blocks, or set stages={len(begins)}."
        )
    return begins


def _outside_of_chain(module: nn.Module, chain: Chain, options: StageOptions) -> dict[str, bool]:
    """Return name -> whether the last stage has it, for parameters outside of the chain. Raises ConfigError."""
    inside = {id(p) for block in chain.blocks for p in block.parameters()}
    names = [name for name, parameter in module.named_parameters() if id(parameter) not in inside]
    for option, paths in (("first_stage", options.first_stage), ("last_stage", options.last_stage)):
        for path in paths:
            if not any(_is_below(name, path) for name in names):
                raise ConfigError(
                    f"{option}: no parameter outside of '{chain.path}' is at '{path}'{did_you_mean(path, names)}"
                )
    order = [name for name, _ in module.named_parameters()]
    begin = next((i for i, name in enumerate(order) if _is_below(name, chain.path)), 0)
    found = {}
    for name in names:
        is_last = order.index(name) > begin
        if any(_is_below(name, path) for path in options.first_stage):
            is_last = False
        if any(_is_below(name, path) for path in options.last_stage):
            is_last = True
        found[name] = is_last
    return found


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _refuse_lazy(module: nn.Module) -> None:
    """Raise ConfigError: a parameter has no shape yet."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"'{name}' has no shape before the first forward (a lazy module). Run one batch through the module "
                "before fit, in configure_model for example, or give the layer its size."
            )


def _refuse(module: nn.Module, chain: Chain) -> None:
    """Raise UnsupportedError where stages would not have the numbers of one process."""
    for path, submodule in module.named_modules():
        if isinstance(submodule, NORMS) and submodule.track_running_stats:
            raise UnsupportedError(
                f"'{path}' ({type(submodule).__name__}) keeps the statistics of batches, and a stage sees "
                "micro-batches: the numbers would not be those of one process. Use GroupNorm or LayerNorm, or "
                "strategy='ddp_tuned'."
            )
    for names in _shared(module, chain):
        raise UnsupportedError(
            f"{' and '.join(map(repr, names))} are one parameter, in places that different stages may have. Untie "
            "them, or use strategy='fsdp_tuned'."
        )


def _shared(module: nn.Module, chain: Chain) -> Iterator[list[str]]:
    """Yield the names of each parameter that is in two blocks, or in the chain or before it and outside or after it."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    paths = [chain.path_of(number) for number in range(len(chain.blocks))]
    for shared in names.values():
        places = {next((path for path in paths if _is_below(name, path)), name.rpartition(".")[0]) for name in shared}
        if len(places) > 1:
            yield shared
