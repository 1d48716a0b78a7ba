"""A folder in memory, gone after the test."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Yield a new folder on /dev/shm."""
    folder = tempfile.mkdtemp(prefix="distrec-test-", dir="/dev/shm")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
