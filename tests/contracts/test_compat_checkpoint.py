"""What checkpoints share with upstream: FBGEMM's counters, and folders of safetensors that
torch.distributed.checkpoint reads."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from lightning_distrec._compat import fbgemm as _fbgemm
from lightning_distrec.checkpoint.lazy_tensors import MappedTensor
from lightning_distrec.checkpoint.plain_state import STORED_TYPES
from lightning_distrec.checkpoint.tensor_files import (
    StoredTensors,
    read_safetensors,
    write_safetensors,
    write_tensors,
)
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.errors import CheckpointError
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
"""Those that torch.distributed.checkpoint's reader knows, too, and tables or their state have."""


def _whole(dtype: torch.dtype, seed: int = 0) -> Tensor:
    numbers = torch.randint(0, 100, (7, 6), generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype)


def _cuts(rank: int) -> dict[str, ChunkedTensor]:
    """Return this rank's chunks of tensors that two ranks have cut in all ways."""
    whole = _whole(torch.float32)
    first, end = (0, 4) if rank == 0 else (4, 7)
    columns = {0: [(0, 2), (5, 1)], 1: [(2, 3)]}[rank]
    chunks = {
        "row-wise, uneven": [Chunk((first, 0), whole[first:end])],
        "column-wise, two on a rank": [
            Chunk((0, begin), whole[:, begin : begin + count]) for begin, count in columns
        ],
        "table-wise": [Chunk((0, 0), whole)] if rank else [],
        "by blocks": [Chunk((first, 3 * rank), whole[first:end, 3 * rank : 3 * rank + 3])],
    }
    other_rows, half = (4, 7) if rank == 0 else (0, 4), 3 * rank
    begin, last = other_rows
    chunks["by blocks"].append(Chunk((begin, half), whole[begin:last, half : half + 3]))
    return {name: ChunkedTensor((7, 6), torch.float32, rects) for name, rects in chunks.items()}


def _write(folder: str) -> None:
    rank, _ = rank_and_num_ranks()
    tensors = _cuts(rank)
    for dtype in TYPES:
        rows = slice(0, 4) if rank == 0 else slice(4, 7)
        chunk = Chunk((rows.start, 0), _whole(dtype)[rows])
        tensors[str(dtype)] = ChunkedTensor((7, 6), dtype, [chunk])
    tensors["one number for each row"] = ChunkedTensor(
        (7,), torch.float32, [Chunk((0,), torch.arange(7.0))] if rank == 0 else []
    )
    write_tensors(Path(folder), tensors, rank)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    run_on_warm_ranks(_write, 2, str(folder))
    return folder


def test_torchs_reader_reads_what_ranks_have_written(written: Path) -> None:
    expected: dict[str, Tensor] = {name: _whole(torch.float32) for name in _cuts(0)}
    expected |= {str(dtype): _whole(dtype) for dtype in TYPES}
    expected["one number for each row"] = torch.arange(7.0)
    torch_values = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(
        dict(torch_values), storage_reader=dcp.HuggingFaceStorageReader(str(written)), no_dist=True
    )
    stored = StoredTensors(written, sorted(path.name for path in written.iterdir()))
    for name, tensor in expected.items():
        assert torch.equal(torch_values[name], tensor), name
        assert torch.equal(stored.handle(name, tuple(tensor.shape), tensor.dtype).read(), tensor)


def test_a_rank_writes_a_file_for_each_chunk_of_a_tensor_none_of_which_is_a_checkpoint(
    written: Path,
) -> None:
    assert sorted(path.name for path in written.iterdir()) == [
        *("rank_0.safetensors", "rank_0_1.safetensors"),
        *("rank_1.safetensors", "rank_1_1.safetensors"),
    ]
    second = load_file(written / "rank_0_1.safetensors")
    assert second.keys() == {"column-wise, two on a rank", "by blocks"}
    with pytest.raises(CheckpointError, match=r"a part of '.*', from .* Give the folder"):
        read_safetensors(written / "rank_1.safetensors")


def test_tensors_of_every_type_are_read_as_they_were_written(tmp_path: Path) -> None:
    for dtype in STORED_TYPES:
        content = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) % 2
        tensor = content.view(dtype).view(4, 3)
        chunks = [Chunk((0, 0), tensor[:2]), Chunk((2, 0), tensor[2:])]
        folder = tmp_path / str(dtype)
        folder.mkdir()
        files = write_tensors(folder, {"x": ChunkedTensor((4, 3), dtype, chunks)}, rank=0)
        actual = StoredTensors(folder, files).handle("x", (4, 3), dtype).read()
        assert torch.equal(actual.view(torch.uint8), tensor.view(torch.uint8)), dtype
        library_values = load_file(folder / "rank_0.safetensors")["x"]
        assert torch.equal(library_values.view(torch.uint8), tensor[:2].view(torch.uint8)), dtype


def test_types_that_the_format_has_not_are_an_error(tmp_path: Path) -> None:
    tensor = MappedTensor(torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match="'x' is a tensor of torch.complex128, which safe"):
        write_safetensors(tmp_path / "it.safetensors", {"x": tensor})


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
