"""Examples as arrays on disk, written once and then read by every rank without taking up its memory."""

import os
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_distrec.errors import DataError
from recipes.criteo_dlrm.columns import NUM_CATEGORIES, NUM_INTEGERS
from recipes.criteo_dlrm.generator import Block

WIDTHS = {"dense": NUM_INTEGERS, "tokens": NUM_CATEGORIES}
TYPES = {"dense": np.float32, "tokens": np.uint32, "labels": np.float32, "log_odds": np.float32}


@dataclass(frozen=True, kw_only=True)
class Store:
    """All examples, as arrays that are mapped from files."""

    dense: np.ndarray
    """(N, 13) float32: log(1 + integer); missing and negative ones are 0."""
    tokens: np.ndarray
    """(N, 26) uint32; 0 is missing."""
    labels: np.ndarray
    """(N, num_tasks) float32."""
    log_odds: np.ndarray
    """(N, num_tasks) float32: the generator's truth, or NaN."""


def write_store(blocks: Iterable[Block], folder: Path) -> None:
    """Write a new folder. It appears under its name when it is complete, so several nodes may write it at once.

    Raises DataError: there are no examples.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        complete = Path(scratch) / "complete"
        complete.mkdir()
        with ExitStack() as files:
            opened = {name: files.enter_context((complete / name).open("wb")) for name in TYPES}
            for block in blocks:
                arrays = {
                    "dense": np.log1p(np.maximum(block.integers, 0)),
                    "tokens": block.tokens,
                    "labels": block.labels,
                    "log_odds": block.log_odds,
                }
                for name, array in arrays.items():
                    np.ascontiguousarray(array, dtype=TYPES[name]).tofile(opened[name])
        if (complete / "tokens").stat().st_size == 0:
            raise DataError(f"{folder}: there are no examples to write.")
        try:
            os.rename(complete, folder)
        except OSError:
            # Another node was faster. Its folder is as good as ours.
            if not folder.is_dir():
                raise


def open_store(folder: Path) -> Store:
    """Map the arrays of a folder that `write_store` wrote."""
    num_examples = (folder / "tokens").stat().st_size // (4 * NUM_CATEGORIES)
    arrays = {
        name: np.memmap(folder / name, dtype=kind, mode="r").reshape(num_examples, WIDTHS.get(name, -1))
        for name, kind in TYPES.items()
    }
    return Store(**arrays)
