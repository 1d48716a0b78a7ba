"""What torch.distributed.checkpoint writes and reads: chunks of tensors, whatever their kernel, sharding type or rank.

Chunks are written in blocks of rows, so that a reader with another sharding, or with little memory, reads no more than
it needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from lightning_distrec.chunks import Chunk, ChunkedTensor, narrowed, overlap, row_ranges


class WritePlanner(SavePlanner):
    """Writes this rank's chunks of tensors, by name; the same names on every rank."""

    def __init__(self, tensors: Mapping[str, ChunkedTensor]) -> None:
        self._tensors = tensors
        self._blocks: dict[MetadataIndex, Tensor] = {}
        self._buffer: Tensor | None = None

    @override
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    @override
    def create_local_plan(self) -> SavePlan:
        return SavePlan([item for name, chunked in self._tensors.items() for item in self._items(name, chunked)])

    def _items(self, name: str, chunked: ChunkedTensor) -> list[WriteItem]:
        items = []
        for chunk in chunked.chunks:
            if not chunk.tensor.numel():
                continue
            for first, count in row_ranges(chunk.tensor.shape, chunk.tensor.itemsize):
                offsets = torch.Size((chunk.offsets[0] + first, *chunk.offsets[1:]))
                index = MetadataIndex(name, offsets)
                rows = chunk.tensor[first : first + count]
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
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._on_host(self._blocks[write_item.index].detach())

    def _on_host(self, block: Tensor) -> Tensor:
        """Return the block on the host, as a tensor whose storage is no larger than it.

        torch.save writes a tensor's whole storage: a view of some rows would be written with all rows of the table.
        """
        if block.device.type == "cpu":
            return _with_own_storage(block.contiguous())
        if self._buffer is None or self._buffer.nbytes < block.nbytes:
            self._buffer = torch.empty(block.nbytes, dtype=torch.uint8, pin_memory=block.is_cuda)
        host = self._buffer[: block.nbytes].view(block.dtype).view(block.shape)
        host.copy_(block)
        return _with_own_storage(host)


class ReadPlanner(LoadPlanner):
    """Reads into chunks. targets: name -> the rectangles that this rank wants, with the memory to read them into."""

    def __init__(self, targets: Mapping[str, Sequence[Chunk]]) -> None:
        self._targets = targets
        self._metadata: Metadata | None = None

    @override
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    @override
    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items = []
        for name, chunks in self._targets.items():
            entry = self._metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            for number, chunk in enumerate(chunks):
                for stored in entry.chunks:
                    begin = tuple(stored.offsets)
                    box = overlap(chunk.box, (begin, tuple(stored.sizes)))
                    if box is not None:
                        items.append(
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
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    @override
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    @override
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise ValueError("a checkpoint of ours has no pickled entries")

    @override
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None
        chunk = self._targets[read_item.dest_index.fqn][read_item.dest_index.index]
        begin = (0,) * chunk.tensor.dim()
        return narrowed(chunk.tensor.detach(), begin, (tuple(read_item.dest_offsets), tuple(read_item.lengths)))

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _minus(a: Sequence[int], b: Sequence[int]) -> torch.Size:
    return torch.Size(x - y for x, y in zip(a, b, strict=True))


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return the same memory with a storage that ends where the tensor does. tensor: contiguous, on the host."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    memory = tensor.flatten().view(torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
