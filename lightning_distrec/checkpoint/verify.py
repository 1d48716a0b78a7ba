"""Whether the bytes of a checkpoint are those that were written: by the checksums that torch.save puts beside tensors,
and by those that the marker has of files without any.

Loading does not look at them: it reads the parts of tables that a rank needs, and a checksum is over a whole piece.
"""

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from lightning_distrec.checkpoint.folders import read_marker
from lightning_distrec.checkpoint.save import CHECKSUMS
from lightning_distrec.checkpoint.storage import StoredTensors
from lightning_distrec.errors import CheckpointError


def verify(path: Path, told: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
    """Read a whole checkpoint, a folder or a file of torch, and return what in it has changed since it was written.

    told: called with the number of bytes that were read. Of a folder, up to 64 MiB are in memory at once. Its metadata
    have no checksum; what they say is compared with the files when they are loaded.
    Raises CheckpointError: it cannot be read, or is a file without checksums.
    """
    changed = []
    for what, content in _pieces(path):
        told(_size(content))
        if not _is_as_written(content):
            changed.append(what)
    return sorted({*changed, *_changed_files(path)})


def _changed_files(path: Path) -> list[str]:
    """Return the files of a folder that have no checksums inside, and are not what the marker says."""
    marker = read_marker(path) if path.is_dir() else {}
    checksums = marker.get(CHECKSUMS, {})
    if not isinstance(checksums, dict) or not checksums.keys() <= marker.get("files", {}).keys():
        raise CheckpointError(f"{path} is damaged: its marker has no checksums of its files, but {checksums!r}.")
    try:
        return [name for name, checksum in checksums.items() if zlib.crc32((path / name).read_bytes()) != checksum]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _pieces(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    if not path.is_dir():
        yield from _file(path)
        return
    for file in sorted(path.glob("*.pt")):
        yield from _file(file)
    for name, place, offset, length in StoredTensors(path).places():
        try:
            with open(path / place, "rb") as stored:
                stored.seek(offset)
                piece = io.BytesIO(stored.read(length))
        except (OSError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: '{name}' cannot be read: {error}.") from error
        yield f"'{name}' in {place}", piece


def _file(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise CheckpointError(f"{path} has no checksums: only files of torch.save in its newer format have.")
            file.seek(0)
            yield path.name, file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _is_as_written(content: BinaryIO) -> bool:
    try:
        return zipfile.ZipFile(content).testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError):
        return False


def _size(content: BinaryIO) -> int:
    size = content.seek(0, io.SEEK_END)
    content.seek(0)
    return size
