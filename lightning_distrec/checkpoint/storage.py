"""The tensors of a checkpoint on disk: torch.distributed.checkpoint's own format, read without
running code from it.

Chunks are written in blocks of rows, so that a reader with another sharding, or little memory,
reads what it needs. torch's own reader runs what a pickle of metadata holds, and reads full chunks;
ours builds the metadata's classes, refuses all else, and takes rows from where they lie.
"""

import contextlib
import math
import mmap
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_distrec._compat.torch_distributed import (
    DCP_METADATA_NAMES,
    PythonUnpickler,
    chunk_locations,
    is_torch_constant,
    metadata_classes,
)
from lightning_distrec.atomic_files import UNLIMITED, Pace
from lightning_distrec.checkpoint.checksums import archives_crc32, read_archive
from lightning_distrec.chunks import Box, Chunk, ChunkedTensor, narrowed, overlap, row_ranges
from lightning_distrec.errors import CheckpointError


class WritePlanner(DefaultSavePlanner):
    """Writes this rank's chunks of tensors, by name; the same names on every rank."""

    def __init__(self, tensors: Mapping[str, ChunkedTensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._blocks: dict[MetadataIndex, Tensor] = {}
        self._buffer: Tensor | None = None

    @override
    def create_local_plan(self) -> SavePlan:
        return SavePlan([
            item for name, chunked in self._tensors.items() for item in self._items(name, chunked)
        ])

    def _items(self, name: str, chunked: ChunkedTensor) -> list[WriteItem]:
        items = []
        for chunk in chunked.chunks:
            # An empty chunk could have the offsets, and with them the index, of the chunk behind
            # it.
            if not chunk.tensor.numel():
                continue
            for first, count in row_ranges(chunk.tensor.shape, chunk.tensor.itemsize):
                offsets = torch.Size((chunk.offsets[0] + first, *chunk.offsets[1:]))
                # Chunks do not overlap, so that a name and offsets are unique over all ranks.
                index = MetadataIndex(name, offsets)
                rows = chunk.tensor[first : first + count]
                # A view: the block is copied to the host when the writer asks for it, one at a
                # time.
                self._blocks[index] = rows
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, rows.size()),
                    properties=TensorProperties(dtype=chunked.dtype),
                    size=torch.Size(chunked.shape),
                )
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # torch's default planner would deduplicate and validate here; chunks that never overlap
        # need neither.
        entries: dict[str, TensorStorageMetadata] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=chunked.dtype), torch.Size(chunked.shape), []
            )
            for name, chunked in self._tensors.items()
        }
        for plan in all_plans:
            for item in plan.items:
                assert item.tensor_data is not None
                entries[item.index.fqn].chunks.append(item.tensor_data.chunk)
        return all_plans, Metadata(dict(entries))

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._on_host(self._blocks[write_item.index].detach())

    def _on_host(self, block: Tensor) -> Tensor:
        """Return the block on the host, in a storage of its size: torch.save writes a view's whole
        storage."""
        if block.device.type == "cpu":
            return _with_own_storage(block.contiguous())
        # One pinned buffer for all blocks: torch.save has written a block before the next one is
        # copied into it.
        if self._buffer is None or self._buffer.nbytes < block.nbytes:
            self._buffer = torch.empty(block.nbytes, dtype=torch.uint8, pin_memory=block.is_cuda)
        host = self._buffer[: block.nbytes].view(block.dtype).view(block.shape)
        host.copy_(block)
        return _with_own_storage(host)


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return the same memory with a storage that ends where the tensor does. tensor: contiguous, on
    the host."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    # As bytes, since numpy has no bfloat16; frombuffer makes a storage of just this memory, without
    # a copy.
    memory = tensor.flatten().view(torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


METADATA_FILE = ".metadata"
METADATA_KINDS = metadata_classes()
DATA = "/data/0"
"""End of the name of an archive's record that has a chunk's bytes: torch numbers the storages of
what it saves."""


def write_tensors(
    folder: Path,
    tensors: Mapping[str, ChunkedTensor],
    group: Any,
    final: Path,
    pace: Pace = UNLIMITED,
) -> Callable[[], dict[str, int]]:
    """Collective over `group`, or alone where it is None. Write the tensors' chunks into `folder`,
    and fsync them.

    tensors: the same names on every rank. final: the checkpoint's path, for messages. Raises
    CheckpointError on all. Returns what gives the checksums of the files that this rank has
    written, by name; that raises OSError alone.
    """
    # Without copying ahead, torch resolves one block at a time: the planner has one buffer for all
    # of them.
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    writer.fs = _PacedFiles(pace)
    try:
        planner = WritePlanner(tensors)
        with _without_single_process_warning():
            dcp.save(
                {},
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    # no Exception, so that nobody's `except Exception` would see it
    except dcp.CheckpointException as failure:
        reasons = [
            f"rank {rank}: {_reason(error)}"
            for rank, (error, _) in sorted(failure.failures.items())
        ]
        raise CheckpointError(
            f"writing the checkpoint {final} failed on {'; '.join(reasons)}. Earlier checkpoints "
            "are unchanged."
        ) from None
    places = writer.places
    return lambda: {name: archives_crc32(folder / name, places[name]) for name in places}


class _PacedFiles(FileSystem):
    """Files that are written at a pace."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    @override
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._pace.open(Path(path)) if mode == "wb" else open(path, mode) as file:
            yield file


class _Writer(FileSystemWriter):
    """torch's writer, without the folder's path in the metadata: the folder is renamed when it is
    complete."""

    places: dict[str, list[tuple[int, int]]]
    """Name of each file that this rank has written -> offset and length of each archive in it."""

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner)
        self.places = {}
        for result in results.value():
            stored = result.storage_data
            self.places.setdefault(stored.relative_path, []).append((stored.offset, stored.length))
        return results

    @override
    def storage_meta(self) -> StorageMeta | None:
        return None


class StoredTensors:
    """The tensors of a checkpoint's folder. Raises CheckpointError: its metadata are missing or
    something else."""

    places: dict[tuple[str, tuple[int, ...]], list[Any]]
    """Name and offsets of each chunk -> the file that it lies in, offset and length there."""
    files: set[str]
    """Names of the files that hold the tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checked: set[str] = set()
        try:
            with open(folder / METADATA_FILE, "rb") as file:
                self._metadata = read_metadata(file)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error}.") from error
        except Exception as error:
            raise CheckpointError(
                f"{folder / METADATA_FILE} is no metadata of a checkpoint: {error}."
            ) from error
        try:
            self._metadata.state_dict_metadata.keys()
            self.places = {
                (name, offsets): place for name, offsets, *place in chunk_locations(self._metadata)
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder / METADATA_FILE} is no metadata of a checkpoint: {error!r}."
            ) from error
        self.files = {file_name for file_name, *_ in self.places.values()}
        if outside := next((name for name in self.files if os.path.basename(name) != name), None):
            raise CheckpointError(
                f"{folder}: a tensor would lie in {outside!r}, outside of the folder."
            )

    def entry(self, name: str) -> TensorStorageMetadata:
        """Return what is known of a tensor. Raises CheckpointError: there is none, or its chunks do
        not cover it."""
        entry = self._metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{self._folder} holds no tensor '{name}'; it has been changed "
                "since it was written."
            )
        # Once for each tensor: every shard asks again, and the time grows with the number of
        # chunks.
        if name not in self._checked:
            try:
                shape = tuple(entry.size)
                boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
                is_covered = _cover(boxes, shape)
            except (AttributeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{self._folder} is damaged: '{name}' lies nowhere ({error!r})."
                ) from error
            if not is_covered:
                raise CheckpointError(
                    f"{self._folder} is damaged: the chunks of '{name}' are not all of it, once."
                )
            self._checked.add(name)
        return entry

    def read(self, targets: Mapping[str, Sequence[Chunk]]) -> None:
        """Read into `targets`, tensors by name, on this rank alone; what no chunk in the file
        covers stays as it is."""
        for name, chunks in targets.items():
            entry = self.entry(name)
            for stored in entry.chunks:
                stored_box = (tuple(stored.offsets), tuple(stored.sizes))
                boxes = [
                    (chunk, box)
                    for chunk in chunks
                    if (box := overlap(chunk.box, stored_box)) is not None
                ]
                try:
                    if boxes:
                        self._read_chunk(name, stored_box, entry.properties.dtype, boxes)
                except (
                    OSError,
                    KeyError,
                    TypeError,
                    ValueError,
                    OverflowError,
                    RuntimeError,
                ) as error:
                    raise CheckpointError(
                        f"{self._folder}: '{name}' cannot be read: {error!r}."
                    ) from error

    def _read_chunk(
        self, name: str, stored: Box, dtype: torch.dtype, boxes: list[tuple[Chunk, Box]]
    ) -> None:
        """Copy what `boxes` have of a stored chunk. Raises CheckpointError: something else lies
        there."""
        (offsets, sizes), (file_name, begin, length) = stored, self.places[name, stored[0]]
        records = read_archive(self._folder / file_name, begin, length)
        record = next((record for record in records if record.label.endswith(DATA)), None)
        if record is None or record.size != math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"{sizes} of {dtype} do not lie in {file_name}")
        # Mapped for this chunk alone: pages count as memory of this process for as long as they are
        # mapped.
        start = record.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with open(record.path, "rb") as file:
            size = record.begin + record.size - start
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=start)
        content = torch.frombuffer(memory, dtype=dtype, offset=record.begin - start).view(sizes)
        for chunk, box in boxes:
            target = narrowed(chunk.tensor.detach(), chunk.offsets, box)
            target.copy_(narrowed(content, offsets, box))


def _cover(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether rectangles cover a tensor of this shape, nothing of it twice."""
    inside = all(
        o >= 0 and s >= 0 and o + s <= n
        for box in boxes
        for o, s, n in zip(*box, shape, strict=True)
    )
    # Boxes of the right total size that do not overlap leave no gap.
    if not inside or sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    reaching: list[Box] = []  # boxes that begin at earlier rows and reach down to this one
    for box in sorted(boxes):
        # Sorted by their first row, so that boxes which end above this one meet no later box
        # either.
        reaching = [other for other in reaching if other[0][0] + other[1][0] > box[0][0]]
        if any(overlap(box, other) is not None for other in reaching):
            return False
        reaching.append(box)
    return True


def read_metadata(file: IO[bytes]) -> Metadata:
    """Read torch.distributed.checkpoint's metadata. Raises pickle.UnpicklingError: they hold
    something else."""
    # Python's own unpickler in Python, not in C: only that one lets us refuse opcodes.
    metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"a {type(metadata).__name__} in the place of the metadata")
    return metadata


class _MetadataUnpickler(PythonUnpickler):
    """Builds the metadata's own classes, and refuses everything else by name."""

    # A copy: the table belongs to the base class, and all other unpicklers in Python use it.
    dispatch = dict(PythonUnpickler.dispatch)

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in DCP_METADATA_NAMES or is_torch_constant(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no metadata need")

    @override
    def get_extension(self, code: int) -> Any:
        # Extensions name classes by number; those in copyreg's cache would not pass through
        # find_class.
        raise pickle.UnpicklingError("it asks for a registered extension, which no metadata need")

    def load_build(self) -> None:
        """Set the state of an object that was just built: a pickle could replace attributes of a
        class otherwise."""
        if type(self.stack[-2]) not in METADATA_KINDS:
            raise pickle.UnpicklingError("it changes an object that it did not build")
        super().load_build()

    # Opcodes are looked up in the table, so that overriding the method alone would change nothing.
    dispatch[pickle.BUILD[0]] = load_build


@contextlib.contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """torch warns that it assumes a single process, which is what is wanted here."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


def _reason(error: BaseException) -> str:
    # torch's message advises to run what the file says
    if isinstance(error, pickle.UnpicklingError):
        return "a tensor's bytes are damaged, or hold something else"
    return f"{type(error).__name__}: {error}"
