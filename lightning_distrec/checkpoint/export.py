"""A checkpoint in another form: plain weights for any module, or a whole Lightning checkpoint, from one process."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_distrec.atomic_files import onto_disk
from lightning_distrec.checkpoint.contents import num_bytes, read_contents, tensors_of
from lightning_distrec.checkpoint.safetensors_file import write_safetensors
from lightning_distrec.checkpoint.torch_file import write_torch_file
from lightning_distrec.checkpoint.whole import plain_optimizer_state
from lightning_distrec.errors import CheckpointError

SUFFIXES = {".pt": "a state_dict", ".safetensors": "a state_dict", ".ckpt": "a Lightning checkpoint"}
"""What a file's name says of what will be in it."""


def export(
    source: Path, target: Path, *, overwrite: bool = False, told: Callable[[int, int], None] | None = None
) -> None:
    """Write the checkpoint `source` as one plain file; tables go through memory in pieces of 64 MiB.

    source: a checkpoint's folder, a Lightning checkpoint, a state_dict of torch.save, or a safetensors file.
    target: its suffix says what it becomes, see SUFFIXES. The file appears under its name when it is complete, and
    nothing is left behind if it cannot be. What ranks keep for themselves, generators and dataloaders, is left out.
    overwrite: whether a file that is there is replaced. told: called with the bytes that are written, and all.
    Raises CheckpointError: there is a target already, or no room for it; the source is not complete, or has no place in
    such a file.
    """
    if target.suffix not in SUFFIXES:
        raise CheckpointError(
            f"{target}: its suffix says what to write. Name it *.pt or *.safetensors for a state_dict, *.ckpt for a "
            "Lightning checkpoint."
        )
    _must_be_free(target, overwrite)
    value = _wanted(source, target)
    total = sum(num_bytes(whole) for whole in tensors_of(value).values())
    _must_have_room(target, total)
    written = 0

    def tell(count: int) -> None:
        nonlocal written
        written += count
        if told is not None:
            told(written, total)

    write = write_safetensors if target.suffix == ".safetensors" else write_torch_file
    try:
        with tempfile.TemporaryDirectory(prefix=".distrec-export-", dir=target.parent) as folder:
            unfinished = Path(folder, target.name)
            write(unfinished, value, tell)
            onto_disk(unfinished)
            _must_be_free(target, overwrite)
            os.replace(unfinished, target)
        onto_disk(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}. Nothing of it was left there.") from error


def _must_be_free(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder, and one file would be written. Choose another name.")
    if os.path.lexists(target) and not overwrite:
        raise CheckpointError(f"{target} is there already. Choose another name, or replace it with --overwrite.")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target}: there is no folder {target.parent}. Make it first.")


def _wanted(source: Path, target: Path) -> dict[str, Any]:
    """Return what is to be written, with handles for tensors."""
    checkpoint = read_contents(source).checkpoint
    if not isinstance(state := checkpoint.get("state_dict"), dict):
        raise CheckpointError(f"{source} holds no state_dict, only {sorted(map(str, checkpoint))}; nothing to export.")
    if target.suffix != ".ckpt":
        return state
    if "pytorch-lightning_version" not in checkpoint:
        raise CheckpointError(
            f"{source} is a bare state_dict, and {target} would be a Lightning checkpoint, which says more: epoch, "
            "step, optimizers. Export it to *.pt or *.safetensors."
        )
    states = checkpoint.get("optimizer_states")
    if states is None:
        return checkpoint
    # Ours have names; torch's have numbers already.
    plain = [plain_optimizer_state(state) if "optimizer" in state else state for state in states]
    return {**checkpoint, "optimizer_states": plain}


def _must_have_room(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise CheckpointError(
            f"{target} would have {needed:,} bytes, and its file system has {free:,} free. Make room, or name a file "
            "elsewhere."
        )
