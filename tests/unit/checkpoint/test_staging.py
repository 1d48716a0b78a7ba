"""Copies of shards to the host by way of a ring of pinned slots."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_distrec.checkpoint.host_copies import Ring, copy_to_host
from lightning_distrec.chunks import Chunk, ChunkedTensor
from tests.support.host_cuda.following import Found, followed_device

SLOT = 64


class LateRing(Ring):
    """In the place of a GPU: a copy happens when it is waited for, as late as it may, and then over
    what is there."""

    def __init__(self) -> None:
        super().__init__(num_slots=3, slot_bytes=SLOT)
        self.slots: list[Tensor] = []
        self.started = self.arrived = 0

    def new_slot(self, num_bytes: int) -> Tensor:
        self.slots.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.slots[-1]

    def start(self, source: Tensor, target: Tensor) -> "Late":
        self.started += 1
        assert self.started - self.arrived <= 3, (
            "a slot is filled again before its copy has arrived"
        )
        return Late(self, lambda: target.copy_(source))


@dataclass
class Late:
    """A copy that has not happened yet."""

    ring: LateRing
    copy: Callable[[], object]

    def synchronize(self) -> None:
        self.copy()
        self.ring.arrived += 1


def tensors() -> list[Tensor]:
    torch.manual_seed(1)
    whole = [
        torch.randint(0, 255, (n,), dtype=torch.uint8)
        for n in (1, SLOT - 1, SLOT, SLOT + 1, 5 * SLOT + 3)
    ]
    return [
        *whole,
        torch.randn(7, 5),
        torch.randn(6, 10)[:, 2:5],
        torch.randn(3, 3, dtype=torch.double).t(),
        torch.randn(33).half(),
        torch.randn(2, 3).bfloat16(),
        torch.randn(4) > 0,
        torch.tensor(3.5),
        torch.randn(3, dtype=torch.complex64),
        torch.empty(0, 4),
    ]


def test_bytes_are_exact_for_uneven_sizes_and_slots_are_used_again() -> None:
    ring = LateRing()
    sources = tensors()
    places = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    for source, place in zip(sources, places, strict=True):
        ring.copy(source, place)
    ring.finish()
    assert ring.arrived == ring.started > 10
    assert [slot.numel() for slot in ring.slots] == [SLOT] * 3
    for source, place in zip(sources, places, strict=True):
        assert torch.equal(source, place)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.host_cuda)])
def test_copies_of_shards_are_equal_and_share_no_memory(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ring.__init__, "__defaults__", (2, SLOT))
    sources = [tensor.clone().to(device) for tensor in tensors()]
    full = {str(i): ChunkedTensor((9,), t.dtype, [Chunk((0,), t)]) for i, t in enumerate(sources)}
    with followed_device() if device == "cuda" else nullcontext(Found()) as found:
        copies = copy_to_host(full).values()
    assert found.hazards == []
    for source, copy, expected in zip(sources, copies, tensors(), strict=True):
        source.zero_()
        actual = copy.chunks[0].tensor
        assert torch.equal(actual, expected)
        assert actual.is_contiguous()
        assert actual.is_cpu
