"""What torch.distributed.checkpoint writes and reads, told in our parts: no kernel, sharding type or rank is named.

Parts are written in chunks, so that a reader with other cuts, or with little memory, reads no more than it needs.
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

from lightning_distrec.chunks import ChunkedTensor, Part, chunks, narrowed, overlap


class WritePlanner(SavePlanner):
    """Writes this rank's parts of tensors. tensors: name -> parts, the same names on every rank."""

    def __init__(self, tensors: Mapping[str, ChunkedTensor]) -> None:
        self._tensors = tensors
        self._chunks: dict[MetadataIndex, Tensor] = {}
        self._buffer: Tensor | None = None

    @override
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    @override
    def create_local_plan(self) -> SavePlan:
        return SavePlan([item for name, parted in self._tensors.items() for item in self._items(name, parted)])

    def _items(self, name: str, parted: ChunkedTensor) -> list[WriteItem]:
        items = []
        for part in parted.parts:
            if not part.tensor.numel():
                continue
            for first, count in chunks(part.tensor.shape, part.tensor.itemsize):
                offsets = torch.Size((part.offsets[0] + first, *part.offsets[1:]))
                index = MetadataIndex(name, offsets)
                rows = part.tensor[first : first + count]
                self._chunks[index] = rows
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, rows.size()),
                    properties=TensorProperties(dtype=parted.dtype),
                    size=torch.Size(parted.shape),
                )
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        entries: dict[str, TensorStorageMetadata] = {
            name: TensorStorageMetadata(TensorProperties(dtype=parted.dtype), torch.Size(parted.shape), [])
            for name, parted in self._tensors.items()
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
        return self._on_host(self._chunks[write_item.index].detach())

    def _on_host(self, chunk: Tensor) -> Tensor:
        """Return the chunk as a tensor whose storage is no larger than it: what torch.save writes without copying."""
        if chunk.device.type == "cpu":
            return _alone(chunk.contiguous())
        if self._buffer is None or self._buffer.nbytes < chunk.nbytes:
            self._buffer = torch.empty(chunk.nbytes, dtype=torch.uint8, pin_memory=chunk.is_cuda)
        host = self._buffer[: chunk.nbytes].view(chunk.dtype).view(chunk.shape)
        host.copy_(chunk)
        return _alone(host)


class ReadPlanner(LoadPlanner):
    """Reads into parts. wanted: name -> the rectangles that this rank wants, with the memory to read them into."""

    def __init__(self, wanted: Mapping[str, Sequence[Part]]) -> None:
        self._wanted = wanted
        self._metadata: Metadata | None = None

    @override
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    @override
    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items = []
        for name, parts in self._wanted.items():
            entry = self._metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            for which, part in enumerate(parts):
                for chunk in entry.chunks:
                    begin = tuple(chunk.offsets)
                    box = overlap(part.box, (begin, tuple(chunk.sizes)))
                    if box is not None:
                        items.append(
                            ReadItem(
                                LoadItemType.TENSOR,
                                dest_index=MetadataIndex(name, part.offsets, which),
                                dest_offsets=_less(box[0], part.offsets),
                                storage_index=MetadataIndex(name, chunk.offsets),
                                storage_offsets=_less(box[0], begin),
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
        part = self._wanted[read_item.dest_index.fqn][read_item.dest_index.index]
        begin = (0,) * part.tensor.dim()
        return narrowed(part.tensor.detach(), begin, (tuple(read_item.dest_offsets), tuple(read_item.lengths)))

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _less(a: Sequence[int], b: Sequence[int]) -> torch.Size:
    return torch.Size(x - y for x, y in zip(a, b, strict=True))


def _alone(tensor: Tensor) -> Tensor:
    """Return the same memory with a storage that ends where the tensor does. tensor: contiguous, on the host."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    memory = tensor.flatten().view(torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
