"""The tensors of a checkpoint on disk: torch.distributed.checkpoint's own format, read without running code from it.

Chunks are written in blocks of rows, so that a reader with another sharding, or little memory, reads what it needs.
torch's own reader runs what a pickle of metadata holds; ours builds the metadata's classes and refuses all else.
"""

import contextlib
import io
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    Metadata,
    ReadItem,
    SavePlan,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from lightning_distrec._compat.torch_distributed import (
    DCP_METADATA_NAMES,
    PythonUnpickler,
    chunk_locations,
    is_torch_constant,
    metadata_classes,
)
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
        return SavePlan([item for name, chunked in self._tensors.items() for item in self._items(name, chunked)])

    def _items(self, name: str, chunked: ChunkedTensor) -> list[WriteItem]:
        items = []
        for chunk in chunked.chunks:
            # An empty chunk could have the offsets, and with them the index, of the chunk behind it.
            if not chunk.tensor.numel():
                continue
            for first, count in row_ranges(chunk.tensor.shape, chunk.tensor.itemsize):
                offsets = torch.Size((chunk.offsets[0] + first, *chunk.offsets[1:]))
                # Chunks do not overlap, so that a name and offsets are unique over all ranks.
                index = MetadataIndex(name, offsets)
                rows = chunk.tensor[first : first + count]
                # A view: the block is copied to the host when the writer asks for it, one at a time.
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
        # torch's default planner would deduplicate and validate here; chunks that never overlap need neither.
        entries: dict[str, TensorStorageMetadata] = {
            name: TensorStorageMetadata(TensorProperties(dtype=chunked.dtype), torch.Size(chunked.shape), [])
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
        """Return the block on the host, in a storage of its size: torch.save writes a view's whole storage."""
        if block.device.type == "cpu":
            return _with_own_storage(block.contiguous())
        # One pinned buffer for all blocks: torch.save has written a block before the next one is copied into it.
        if self._buffer is None or self._buffer.nbytes < block.nbytes:
            self._buffer = torch.empty(block.nbytes, dtype=torch.uint8, pin_memory=block.is_cuda)
        host = self._buffer[: block.nbytes].view(block.dtype).view(block.shape)
        host.copy_(block)
        return _with_own_storage(host)


class ReadPlanner(DefaultLoadPlanner):
    """Reads into chunks. targets: name -> the rectangles that this rank wants, with the memory to read them into."""

    def __init__(self, targets: Mapping[str, Sequence[Chunk]]) -> None:
        super().__init__()
        self._targets = targets

    @override
    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, chunks in self._targets.items():
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            for number, chunk in enumerate(chunks):
                for stored in entry.chunks:
                    begin = tuple(stored.offsets)
                    box = overlap(chunk.box, (begin, tuple(stored.sizes)))
                    if box is not None:
                        items.append(
                            # The number in dest_index is for resolve_tensor: two targets may begin at the same place.
                            ReadItem(
                                LoadItemType.TENSOR,
                                dest_index=MetadataIndex(name, chunk.offsets, number),
                                dest_offsets=_minus(box[0], chunk.offsets),
                                storage_index=MetadataIndex(name, stored.offsets),
                                storage_offsets=_minus(box[0], begin),
                                lengths=torch.Size(box[1]),
                            )
                        )
        return LoadPlan(items)

    @override
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise ValueError("a checkpoint of ours has no pickled entries")  # torch's default would run their code

    @override
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None
        chunk = self._targets[read_item.dest_index.fqn][read_item.dest_index.index]
        begin = (0,) * chunk.tensor.dim()
        # A view of the target's own memory, into which the reader copies.
        return narrowed(chunk.tensor.detach(), begin, (tuple(read_item.dest_offsets), tuple(read_item.lengths)))


def _minus(a: Sequence[int], b: Sequence[int]) -> torch.Size:
    return torch.Size(x - y for x, y in zip(a, b, strict=True))


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return the same memory with a storage that ends where the tensor does. tensor: contiguous, on the host."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    # As bytes, since numpy has no bfloat16; frombuffer makes a storage of just this memory, without a copy.
    memory = tensor.flatten().view(torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


METADATA_FILE = ".metadata"
METADATA_KINDS = metadata_classes()


def write_tensors(folder: Path, tensors: Mapping[str, ChunkedTensor], group: Any, final: Path) -> None:
    """Collective over `group`, or alone where it is None. Write the tensors' chunks into `folder`, and fsync them.

    tensors: the same names on every rank. final: the checkpoint's path, for messages. Raises CheckpointError on all.
    """
    # Without copying ahead, torch resolves one block at a time: the planner has one buffer for all of them.
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    try:
        planner = WritePlanner(tensors)
        with _without_single_process_warning():
            dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as failure:  # no Exception, so that nobody's `except Exception` would see it
        reasons = [f"rank {rank}: {_reason(error)}" for rank, (error, _) in sorted(failure.failures.items())]
        raise CheckpointError(
            f"writing the checkpoint {final} failed on {'; '.join(reasons)}. Earlier checkpoints are unchanged."
        ) from None


class _Writer(FileSystemWriter):
    """torch's writer, without the folder's path in the metadata: the folder is renamed when it is complete."""

    @override
    def storage_meta(self) -> StorageMeta | None:
        return None


class StoredTensors:
    """The tensors of a checkpoint's folder. Raises CheckpointError: its metadata are missing or something else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checked: set[str] = set()
        try:
            with open(folder / METADATA_FILE, "rb") as file:
                self._metadata = read_metadata(file)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error}.") from error
        except Exception as error:
            raise CheckpointError(f"{folder / METADATA_FILE} is no metadata of a checkpoint: {error}.") from error
        self.files: set[str] = set()
        """Names of the files that hold the tensors, by the metadata."""
        for name, info, _, _ in self.places():
            self.files.add(info)
            if os.path.basename(info) != info:
                raise CheckpointError(f"{folder}: '{name}' would lie in {info!r}, outside of the folder.")

    def places(self) -> list[tuple[str, str, int, int]]:
        """Return each chunk's tensor, file, offset and length in it. Raises CheckpointError: these are not known."""
        try:
            self._metadata.state_dict_metadata.keys()
            return list(chunk_locations(self._metadata))
        except (AttributeError, TypeError, ValueError) as error:
            path = self._folder / METADATA_FILE
            raise CheckpointError(f"{path} is no metadata of a checkpoint: {error!r}.") from error

    def records(self, first: int = 0, step: int = 1) -> Iterator[tuple[str, BinaryIO]]:
        """Yield what each `step`-th chunk is called, and its bytes in the file. Raises CheckpointError."""
        for name, file_name, offset, length in self.places()[first::step]:
            try:
                with open(self._folder / file_name, "rb") as stored:
                    stored.seek(offset)
                    record = io.BytesIO(stored.read(length))
            except (OSError, TypeError, ValueError) as error:
                raise CheckpointError(f"{self._folder}: '{name}' cannot be read: {error}.") from error
            yield f"'{name}' in {file_name}", record

    def entry(self, name: str) -> TensorStorageMetadata:
        """Return what is known of a tensor. Raises CheckpointError: there is none, or its chunks do not cover it."""
        entry = self._metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self._folder} holds no tensor '{name}'; it has been changed since it was written.")
        # Once for each tensor: every shard asks again, and the time grows with the number of chunks.
        if name not in self._checked:
            try:
                shape = tuple(entry.size)
                boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
                is_covered = _cover(boxes, shape)
            except (AttributeError, TypeError, ValueError) as error:
                raise CheckpointError(f"{self._folder} is damaged: '{name}' lies nowhere ({error!r}).") from error
            if not is_covered:
                raise CheckpointError(f"{self._folder} is damaged: the chunks of '{name}' are not all of it, once.")
            self._checked.add(name)
        return entry

    def read(self, targets: Mapping[str, Sequence[Chunk]]) -> None:
        """Read into `targets`, tensors by name, on this rank alone; what no chunk in the file covers stays as it is."""
        # Before torch reads: chunks that do not cover a tensor would leave memory of it uninitialized.
        for name in targets:
            self.entry(name)
        reader = _Reader(self._folder, self._metadata)
        try:
            with _without_single_process_warning():
                # no_dist: ranks read different tensors at different times, so that a collective would hang.
                dcp.load({}, storage_reader=reader, planner=ReadPlanner(targets), no_dist=True)
        except dcp.CheckpointException as failure:
            reasons = dict.fromkeys(_reason(error) for error, _ in failure.failures.values())  # of this rank alone
            raise CheckpointError(f"{self._folder} cannot be read: {'; '.join(reasons)}.") from None


def matches_checksums(content: BinaryIO) -> bool:
    """Whether a file of torch.save, in its newer format, is as its checksums say."""
    try:
        # Damaged headers may look encrypted (RuntimeError) or compressed in unknown ways (NotImplementedError).
        return zipfile.ZipFile(content).testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError):
        return False


def _cover(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether rectangles cover a tensor of this shape, nothing of it twice."""
    inside = all(o >= 0 and s >= 0 and o + s <= n for box in boxes for o, s, n in zip(*box, shape, strict=True))
    # Boxes of the right total size that do not overlap leave no gap.
    if not inside or sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    reaching: list[Box] = []  # boxes that begin at earlier rows and reach down to this one
    for box in sorted(boxes):
        # Sorted by their first row, so that boxes which end above this one meet no later box either.
        reaching = [other for other in reaching if other[0][0] + other[1][0] > box[0][0]]
        if any(overlap(box, other) is not None for other in reaching):
            return False
        reaching.append(box)
    return True


class _Reader(FileSystemReader):
    """torch's reader, given the metadata: its own way to read them would run what the pickle says."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        # Checked by StoredTensors; torch would unpickle the file once more, without checks.
        self._read_before = metadata

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._read_before


def read_metadata(file: IO[bytes]) -> Metadata:
    """Read torch.distributed.checkpoint's metadata. Raises pickle.UnpicklingError: they hold something else."""
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
        # Extensions name classes by number; those in copyreg's cache would not pass through find_class.
        raise pickle.UnpicklingError("it asks for a registered extension, which no metadata need")

    def load_build(self) -> None:
        """Set the state of an object that was just built: a pickle could replace attributes of a class otherwise."""
        if type(self.stack[-2]) not in METADATA_KINDS:
            raise pickle.UnpicklingError("it changes an object that it did not build")
        super().load_build()

    # Opcodes are looked up in the table, so that overriding the method alone would change nothing.
    dispatch[pickle.BUILD[0]] = load_build


@contextlib.contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """torch warns that it assumes a single process, which is what is wanted here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _reason(error: BaseException) -> str:
    if isinstance(error, pickle.UnpicklingError):  # torch's message advises to run what the file says
        return "a tensor's bytes are damaged, or hold something else"
    return f"{type(error).__name__}: {error}"
