"""CUDA streams: batches of all kinds on their way to the device."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from lightning_distrec import gpu
from lightning_distrec.errors import ConfigError
from lightning_distrec.prefetch.fetcher import Streams, move_jagged, pin
from lightning_distrec.prefetch.sources import has_same_leaves
from tests.support.host_cuda.following import followed_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Example:
    """A batch of one's own."""

    ids: Any
    extras: Any = None


def jagged() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a"], values=torch.arange(4), lengths=torch.tensor([1, 3]))


@pytest.mark.host_cuda
def test_dense_tensors_of_the_host_are_pinned_and_no_others() -> None:
    sparse, on_device = torch.eye(3).to_sparse(), torch.empty(2, device="meta")
    batch = {
        "a": [torch.ones(2), "text"],
        "b": Example(torch.ones(3), jagged()),
        "c": sparse,
        "d": on_device,
    }
    copied = pin(batch)
    assert copied["a"][0].is_pinned()
    assert copied["b"].ids.is_pinned()
    assert copied["b"].extras.values().is_pinned()
    assert copied["a"][1] == "text"
    assert copied["c"] is sparse
    assert copied["d"] is on_device
    assert torch.equal(copied["b"].extras.values(), torch.arange(4))
    assert isinstance(copied["b"], Example)
    assert batch["b"].ids is not copied["b"].ids  # type: ignore[attr-defined]


@pytest.mark.host_cuda
def test_jagged_tensors_are_copied_without_waiting() -> None:
    batches = [jagged(), torch.ones(2)], [jagged()]
    with followed_device() as found:
        moved = move_jagged(pin(batches[0]), GPU)
        assert found.waits == []
        move_jagged(batches[1], GPU)
        assert found.operations() == ["copy to the device"] * 2, "from memory that is not pinned"
    assert torch.equal(moved[0].lengths().cpu(), torch.tensor([1, 3]))


@pytest.mark.host_cuda
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged, torch.strided]
)
def test_batches_of_a_loader_on_the_device_are_ordered_and_kept(layout: torch.layout) -> None:
    def use(pipe: Streams) -> None:
        dense = torch.eye(4, device=GPU) * 2
        if layout == torch.jagged:
            batch = torch.nested.nested_tensor([dense[0], dense[1, :2]], layout=layout)
        else:
            batch = dense if layout == torch.strided else dense.to_sparse(layout=layout)
        parts = [batch] if layout == torch.strided else [batch.values()]
        with pipe.copying([batch]):
            made = [part + 1 for part in parts]
        event = pipe.copied([batch, made])
        with pipe.preparing(bool):
            products = [part * 2 for part in (*parts, *made)]
        pipe.hand_over([batch, made], event)
        products += [part * 3 for part in (*parts, *made)]
        del made, parts, batch, dense

    pipe = Streams(GPU)
    with followed_device() as found:
        use(pipe)
        with pipe.copying([]):
            torch.ones(1, device=GPU)
        with pipe.preparing(bool):
            torch.ones(1, device=GPU)
        torch.ones(1, device=GPU)
    assert found.hazards == []


@pytest.mark.host_cuda
def test_the_device_finds_what_is_not_ordered_and_what_is_freed_early() -> None:
    other = torch.cuda.Stream()
    made = torch.ones(3, device=GPU) + 1
    with followed_device() as found:
        with torch.cuda.stream(other):
            read = made * 2
        assert "unordered: aten::mul.out on cuda:0 stream" in found.hazards[0]
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            read = made * 2
        torch.cuda.current_stream().wait_stream(other)
        read.add_(1)
        assert len(found.hazards) == 1
        del read
        torch.ones(1, device=GPU)
        assert len(found.hazards) == 1, "nobody gets that memory yet"
        with torch.cuda.stream(other):
            torch.ones(1, device=GPU)
        assert "freed early: memory of cuda:0 stream" in found.hazards[1]


@pytest.mark.host_cuda
def test_a_wrapper_on_another_stream_is_built_while_all_are_idle() -> None:
    weight = torch.ones(3, device=GPU) * 2
    with followed_device() as found:
        with gpu.idle(GPU), torch.cuda.stream(torch.cuda.Stream()):
            weight.add_(1)
        weight.mul_(2)
    assert found.hazards == []


def test_batches_are_recognized_by_their_leaves() -> None:
    ids, features = torch.arange(3), jagged()
    batch = {"ids": ids, "rest": [features, 3, "text"]}
    assert has_same_leaves({"ids": ids, "rest": (features, 3, "text")}, batch)
    for other in (
        {"ids": ids.clone(), "rest": batch["rest"]},
        {"ids": ids},
        {"ids": ids, "rest": [features, 4, "text"]},
    ):
        assert not has_same_leaves(other, batch)


def test_ranks_that_share_a_gpu_are_refused_on_all_of_them() -> None:
    store = dist.HashStore()
    for rank, device in enumerate(("GPU-a", "GPU-b", "GPU-a")):
        store.set(f"device/{rank}", device)
    for rank, device in enumerate(("GPU-a", "GPU-b", "GPU-a")):
        with pytest.raises(
            ConfigError, match="ranks 0, 2 are all on the GPU GPU-a.*Leave Trainer.*--gpus-per-node"
        ):
            gpu.refuse_shared_devices(store, rank, 3, device)
    gpu.refuse_shared_devices(store, 2, 3, "GPU-c")
    assert gpu.device_id(CPU, "nccl") == gpu.device_id(torch.device("cuda", 0), "gloo") == ""
