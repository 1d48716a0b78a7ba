"""Checks the bytes of a checkpoint by the checksums that torch.save stores with each tensor, and by the marker's.

Loading does not check them: it reads the rows that a rank needs, and a checksum covers a full chunk of a table.
"""

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from lightning_distrec.checkpoint.atomic_folder import read_marker
from lightning_distrec.checkpoint.incremental.marks import base_of, mark_of
from lightning_distrec.checkpoint.save import CHECKSUMS
from lightning_distrec.checkpoint.storage import StoredTensors, matches_checksums
from lightning_distrec.errors import CheckpointError


def verify(path: Path, on_progress: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
    """Read all of a checkpoint, a folder or a file of torch, and return what has changed since it was written.

    Of a difference its base is read too. on_progress: called with the number of bytes read. Up to 64 MiB of a folder
    are in memory at once. The metadata have no checksum; they are compared with the files when they are loaded.
    Raises CheckpointError: it cannot be read, or is a file without checksums.
    """
    changed = _changed_records(path, on_progress)
    marker = read_marker(path) if path.is_dir() else None
    mark = mark_of(path, marker)
    if mark is not None and mark.is_difference:
        base, _ = base_of(path, mark)
        changed |= {f"{name} of its base {base.name}" for name in _changed_records(base, on_progress)}
    return sorted(changed)


def _changed_records(path: Path, on_progress: Callable[[int], None]) -> set[str]:
    changed = set(_changed_files(path))
    for name, content in _records(path):
        on_progress(_size(content))
        if not matches_checksums(content):
            changed.add(name)
    return changed


def _changed_files(path: Path) -> list[str]:
    """Return the files without checksums of their own that do not match the marker's."""
    marker = read_marker(path) if path.is_dir() else {}
    checksums = marker.get(CHECKSUMS, {})
    if not isinstance(checksums, dict) or not checksums.keys() <= marker.get("files", {}).keys():
        raise CheckpointError(f"{path} is damaged: its marker has no checksums of its files, but {checksums!r}.")
    try:
        return [name for name, checksum in checksums.items() if zlib.crc32((path / name).read_bytes()) != checksum]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _records(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    if not path.is_dir():
        yield from _file(path)
        return
    for file in sorted(path.glob("*.pt")):
        yield from _file(file)
    yield from StoredTensors(path).records()


def _file(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise CheckpointError(f"{path} has no checksums: only files of torch.save in its newer format have.")
            file.seek(0)
            yield path.name, file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _size(content: BinaryIO) -> int:
    size = content.seek(0, io.SEEK_END)
    content.seek(0)
    return size
