"""What checkpoints use of upstream's private names: FBGEMM's counters, and
torch.distributed.checkpoint's metadata."""

import dataclasses
import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from lightning_distrec._compat import fbgemm as _fbgemm
from lightning_distrec._compat import torch_distributed as _checkpoint
from lightning_distrec.checkpoint.storage import (
    METADATA_FILE,
    StoredTensors,
    read_metadata,
    write_tensors,
)
from lightning_distrec.chunks import Chunk, ChunkedTensor
from tests.support.ranks import rank_and_num_ranks, run_on_ranks

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
NOT_SAVED = re.compile(r"torch\.(q.*|bits.*|u?int[1-7])")
"""Types that upstream saves in no other way either, or has no arithmetic for."""
SAVED = [dtype for dtype in DTYPES if not NOT_SAVED.fullmatch(str(dtype))]


def _names_in(pickled: bytes) -> set[tuple[str, str]]:
    """Return the module and name of all that a pickle asks for, without loading it."""
    requests: set[tuple[str, str]] = set()
    texts: list[str] = []
    memo: list[Any] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            texts.append(argument)
        elif opcode.name == "MEMOIZE":
            memo.append(texts[-1] if texts else None)
        elif opcode.name in ("BINGET", "LONG_BINGET") and isinstance(memo[argument], str):
            texts.append(memo[argument])
        elif opcode.name == "STACK_GLOBAL":
            requests.add((texts[-2], texts[-1]))
        elif opcode.name == "GLOBAL":
            requests.add(tuple(argument.split(" ")))  # type: ignore[arg-type]
    return requests


def _write(folder: str) -> None:
    rank, num_ranks = rank_and_num_ranks()
    tensors = {
        str(dtype): ChunkedTensor(
            (4 * num_ranks, 3), dtype, [Chunk((4 * rank, 0), torch.zeros(4, 3).to(dtype))]
        )
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
    }
    tensors["on the last rank"] = ChunkedTensor(
        (2,), torch.bool, [Chunk((0,), torch.ones(2) > 0)] if rank else []
    )
    tensors["empty"] = ChunkedTensor((0, 3), torch.float32, [])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    write_tensors(Path(folder), tensors, torch.distributed.group.WORLD, Path("x.ckpt"))


def test_dcp_metadata_names_are_all_that_metadata_ask_for_and_no_more(tmp_path: Path) -> None:
    run_on_ranks(_write, 2, str(tmp_path))
    requests = _names_in((tmp_path / METADATA_FILE).read_bytes())
    assert {
        pair for pair in requests if not _checkpoint.is_torch_constant(*pair)
    } == _checkpoint.DCP_METADATA_NAMES
    assert {name for module, name in requests if module == "torch"} == {
        "Size",
        "float32",
        "bfloat16",
        "int64",
        "bool",
    }


@pytest.mark.parametrize("dtype", SAVED, ids=str)
def test_dcp_metadata_names_are_enough_for_tensors_of_every_type(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tensor = (torch.arange(12 * dtype.itemsize, dtype=torch.uint8) % 2).view(dtype).view(4, 3)
    write_tensors(
        tmp_path, {"x": ChunkedTensor((4, 3), dtype, [Chunk((0, 0), tensor)])}, None, tmp_path
    )
    tensors, actual = StoredTensors(tmp_path), torch.zeros_like(tensor)
    assert tensors.entry("x").properties.dtype == dtype
    tensors.read({"x": [Chunk((0, 0), actual)]})
    assert torch.equal(actual.view(torch.uint8), tensor.view(torch.uint8))


def test_is_torch_constant_accepts_types_of_numbers_only() -> None:
    assert all(
        _checkpoint.is_torch_constant("torch", str(dtype).removeprefix("torch."))
        for dtype in DTYPES
    )
    message = {name for name in dir(torch) if _checkpoint.is_torch_constant("torch", name)}
    assert {getattr(torch, name) for name in message} == set(DTYPES)
    for name in (
        "Size",
        "ops",
        "load",
        "os",
        "os.system",
        "hub.load",
        "float32.__class__",
        "strided",
        "device",
        "",
    ):
        assert not _checkpoint.is_torch_constant("torch", name)
    assert not _checkpoint.is_torch_constant("torch.nn", "float32")
    assert not _checkpoint.is_torch_constant("os", "system")


def test_python_unpickler_asks_its_methods_for_what_a_pickle_names_and_changes() -> None:
    requests: list[Any] = []

    class Asks(_checkpoint.PythonUnpickler):
        dispatch = dict(_checkpoint.PythonUnpickler.dispatch)

        def find_class(self, module: str, name: str) -> Any:
            requests.append((module, name))
            return super().find_class(module, name)

        def get_extension(self, code: int) -> Any:
            requests.append(code)
            self.append(None)

        def load_build(self) -> None:
            requests.append(type(self.stack[-2]))
            super().load_build()

        dispatch[pickle.BUILD[0]] = load_build

    actual = Asks(io.BytesIO(pickle.dumps(Metadata({"x": None})))).load()
    assert actual == Metadata({"x": None})
    assert requests == [(Metadata.__module__, "Metadata"), Metadata]
    assert Asks(io.BytesIO(b"\x80\x02\x82\x07.")).load() is None
    assert requests[2:] == [7]


def test_chunk_locations_yields_every_chunk(tmp_path: Path) -> None:
    run_on_ranks(_write, 2, str(tmp_path))
    with open(tmp_path / METADATA_FILE, "rb") as file:
        metadata = read_metadata(file)
    places = list(_checkpoint.chunk_locations(metadata))
    actual = sorted({(name, file) for name, _, file, *_ in places})
    pair = [
        (f"torch.{dtype}", f"__{rank}_0.distcp")
        for dtype in ("bfloat16", "float32", "int64")
        for rank in (0, 1)
    ]
    assert actual == sorted([*pair, ("on the last rank", "__1_0.distcp")])
    assert all((tmp_path / file).is_file() for _, file in actual)
    for file in {file for _, file in actual}:
        lengths = sum(length for *_, other, _, length in places if other == file)
        assert lengths == (tmp_path / file).stat().st_size
    assert list(_checkpoint.chunk_locations(Metadata({}))) == []


@pytest.mark.parametrize(
    "info", [None, "x", ("x", 0, 1), _StorageInfo(7, 0, 1), _StorageInfo(None, 0, 1)]
)  # type: ignore[arg-type]
def test_chunk_locations_refuses_records_of_another_type(info: Any) -> None:
    with pytest.raises(ValueError, match="'.*' has the storage record "):
        list(_checkpoint.chunk_locations(Metadata({}, storage_data={MetadataIndex("x"): info})))


def test_the_place_of_a_chunk_is_found_by_what_the_reader_uses_of_it() -> None:
    assert [f.name for f in dataclasses.fields(_StorageInfo)] == [
        "relative_path",
        "offset",
        "length",
        "transform_descriptors",
    ]


def test_metadata_with_another_class_are_refused_by_its_name(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    path = tmp_path / METADATA_FILE
    path.write_bytes(pickle.dumps(Metadata({"x": BytesStorageMetadata()}, storage_data={})))
    with (
        open(path, "rb") as file,
        pytest.raises(pickle.UnpicklingError, match="asks for .*BytesStorageMetadata"),
    ):
        read_metadata(file)


def test_set_fbgemm_iterations_lets_a_kernel_go_on_counting_from_there() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,  # of those for the CPU, the one that counts
        learning_rate=0.1,
    )
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    kernel(ids, offsets).sum().backward()
    assert (int(kernel.iter), int(kernel.iter_cpu)) == (1, 1)
    _fbgemm.set_fbgemm_iterations(kernel, 41)
    kernel(ids, offsets).sum().backward()
    assert (int(kernel.iter), int(kernel.iter_cpu)) == (42, 42)


def test_metadata_classes_are_those_whose_objects_get_a_state() -> None:
    kinds = {kind.__name__ for kind in _checkpoint.metadata_classes()}
    # Neither the enum nor torch.Size, whose objects are shared, nor the function.
    plain = {
        "Metadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
    }
    assert kinds == plain | {"_StorageInfo"}
    assert callable(_checkpoint.PythonUnpickler.dispatch[pickle.BUILD[0]])
