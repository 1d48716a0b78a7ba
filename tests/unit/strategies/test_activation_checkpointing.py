"""Blocks that are computed again in backward, and the buffers that they write to."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_distrec.strategies.data_parallel import activations as layers
from lightning_distrec.strategies.data_parallel.activations import checkpoint_activations
from tests.support.host_cuda.following import followed_device


class Writes(nn.Module):
    """Reads and writes buffers in all the ways of which versions tell, and in such that they do
    not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.batch = nn.BatchNorm1d(6)
        self.instance = nn.InstanceNorm1d(6, track_running_stats=True)
        self.register_buffer("factors", torch.tensor([1.0, 2.0, 4.0]))
        self.register_buffer("mask", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("by_data", torch.zeros(6))
        self.register_buffer("in_place", torch.zeros(6))
        self.register_buffer("replaced", torch.zeros(6))
        self.register_buffer("other_name", self.in_place)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.layer(inputs - self.by_data - self.other_name + self.replaced) * self.mask
        x = self.instance(self.batch(x).unsqueeze(2).expand(-1, -1, 3) * self.factors).sum(2)
        mean = inputs.detach().mean(0)
        self.by_data.data.lerp_(mean, 0.3)
        with torch.no_grad():
            self.in_place.lerp_(mean, 0.1)
        self.replaced = self.replaced + 0.1 * mean
        return x


def train(block: nn.Module) -> dict[str, Tensor]:
    """Take two steps of two batches each, and return weights and buffers."""
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    draw = torch.Generator().manual_seed(2)
    for _ in range(2):
        optimizer.zero_grad()
        losses = [block(torch.randn(5, 6, generator=draw) + 1).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
    return dict(block.state_dict())


@pytest.mark.parametrize("small_bytes", [2**20, 0])
def test_what_a_block_writes_counts_once_however_it_is_written(
    small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "SMALL_BYTES", small_bytes)
    torch.manual_seed(1)
    plain = Writes()
    recomputed = copy.deepcopy(plain)
    checkpoint_activations([recomputed])
    expected, actual = train(plain), train(recomputed)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-6, rtol=1e-6, msg=name)
    assert recomputed.other_name is recomputed.in_place


@pytest.mark.host_cuda
def test_the_host_waits_for_large_buffers_only_once_for_a_block() -> None:
    waits = {}
    for numel in (6, 2**18 + 1):
        block = Writes()
        for name in ("a", "b"):
            block.register_buffer(name, torch.zeros(numel))
        block.cuda()
        checkpoint_activations([block])
        inputs = torch.randn(5, 6, device="cuda") + 1
        with followed_device() as found:
            block(inputs).sum().backward()
        waits[numel] = found.operations()
    assert waits == {6: [], 2**18 + 1: ["copy to the host"]}
