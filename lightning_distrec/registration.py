"""The names of our strategies; `register` gives them to Lightning, and lets it read checkpoints
that are folders.

Nothing here loads torch before `register`.
"""

from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

STRATEGIES = {
    "torchrec_sharded": (
        "TorchRecShardedStrategy",
        "Embedding tables sharded over the ranks by TorchRec, other layers as under DDP",
    ),
    "ddp_tuned": ("TunedDDPStrategy", "DDP tuned to the module, with crash-safe checkpoints"),
    "fsdp_tuned": (
        "TunedFSDPStrategy",
        "Parameters, gradients and optimizer state sharded over the ranks by FSDP2",
    ),
    "pipeline_parallel": (
        "PipelineParallelStrategy",
        "A chain of blocks split into stages over the ranks",
    ),
}
"""Name -> class, and what it does."""


def class_path(name: str) -> str:
    """Return the class_path by which a YAML gives the strategy options; "" for a name that is not
    ours."""
    return f"lightning_distrec.{STRATEGIES[name][0]}" if name in STRATEGIES else ""


def short_name(path: str) -> str:
    """Return the name of a strategy of ours that is given by name or class_path; others as they
    are."""
    names = {class_name: name for name, (class_name, _) in STRATEGIES.items()}
    return names.get(path.rpartition(".")[2], path)


def _choose_environment() -> Any:
    return import_module("lightning_distrec.cluster.environment").choose_environment()


def _is_ours(strategy: Any) -> bool:
    return (isinstance(strategy, str) and strategy in STRATEGIES) or getattr(
        strategy, "takes_launched_ranks", False
    )


def _is_folder(path: Any) -> bool:
    return isinstance(path, (str, Path)) and (Path(path) / "complete.json").is_file()


def _read_folder(path: Any, with_optimizers: bool, pickles: bool) -> Any:
    contents = import_module("lightning_distrec.checkpoint.contents")
    return contents.read_full(Path(path), with_optimizers, pickles)


def _check_file(path: Any) -> None:
    if isinstance(path, (str, Path)) and Path(path).is_file():
        import_module("lightning_distrec.checkpoint.contents").check_file(Path(path))


def _read_file(path: Any, load: Any, **options: Any) -> Any:
    return import_module("lightning_distrec.checkpoint.hyperparameters").read_file(
        path, load, **options
    )


def _for_module(checkpoint: Any) -> Any:
    return import_module("lightning_distrec.checkpoint.hyperparameters").with_complete_only(
        checkpoint
    )


def _make(class_name: str, **arguments: Any) -> Any:
    # torchrec loads when a strategy that needs it is made.
    return getattr(import_module("lightning_distrec"), class_name)(**arguments)


@cache
def register() -> None:
    """Do it; once for a process."""
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_distrec._compat.lightning import override_environment_choice
    from lightning_distrec._compat.lightning_checkpoints import read_folders_too

    # A Trainer chooses its cluster environment before it makes the strategy that could ask for
    # another.
    override_environment_choice(_is_ours, _choose_environment)
    # load_from_checkpoint reads a folder without any Trainer or strategy.
    read_folders_too(_is_folder, _read_folder, _check_file, _read_file, _for_module)
    for name, (class_name, description) in STRATEGIES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, partial(_make, class_name), description=description)
