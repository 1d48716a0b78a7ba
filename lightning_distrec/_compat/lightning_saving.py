"""Private names of lightning: how it reads checkpoints."""

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection


def read_folders_too(is_folder: Callable[[Any], bool], read: Callable[[Any, bool, bool], dict[str, Any]]) -> None:
    """Let Lightning read our folders wherever it reads a checkpoint's file. Once per process.

    is_folder: whether a path is one. read: returns its content: optimizers' state too if the second argument is
    True; values of any type, whose code is run, if the third is: the user's weights_only=False.
    Upstream opens the path as a file, in `load_from_checkpoint` and in the CheckpointIO of any strategy. Both have
    their loader in the globals of their modules, so it is replaced there.
    Can go when Lightning lets a checkpoint's format choose its reader.
    Source: lightning/pytorch/core/saving.py, lightning/fabric/plugins/io/torch_io.py.
    """
    from lightning.fabric.plugins.io import torch_io
    from lightning.pytorch.core import saving

    _read_folders_too(saving, is_folder, lambda path, pickles: read(path, False, pickles))
    _read_folders_too(torch_io, is_folder, lambda path, pickles: read(path, True, pickles))


def _read_folders_too(
    module: Any, is_folder: Callable[[Any], bool], read: Callable[[Any, bool], dict[str, Any]]
) -> None:
    theirs = module.pl_load
    if hasattr(theirs, "theirs"):
        return

    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not is_folder(path_or_url):
            return theirs(path_or_url, map_location=map_location, weights_only=weights_only)
        checkpoint = read(path_or_url, weights_only is False)
        if isinstance(map_location, (str, torch.device)):  # others say where what was on a GPU is to be
            checkpoint = apply_to_collection(checkpoint, torch.Tensor, lambda tensor: tensor.to(map_location))
        return checkpoint

    load.theirs = theirs  # type: ignore[attr-defined]
    module.pl_load = load
