"""What torch's pipeline stages know of their outputs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from lightning_distrec._compat import torch_distributed as _torch_distributed
from tests.support.ranks import join_group, run_on_warm_ranks


class Permuted(nn.Module):
    """Returns a permuted view."""

    def forward(self, value: Tensor) -> Tensor:
        return value.permute(0, 2, 1)


def _stages() -> dict[str, Any]:
    join_group()
    device = torch.device("cpu")
    permuted = PipelineStage(Permuted(), 0, 1, device)
    ScheduleGPipe(permuted, 2).step(torch.ones(4, 3, 5))
    isolated = _torch_distributed.IsolatedStage(nn.Dropout(), 0, 1, device)
    schedule, outputs = ScheduleGPipe(isolated, 2), []
    for _ in range(2):
        torch.manual_seed(0)
        outputs.append(schedule.step(torch.ones(20, 3)))
    losses: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        losses.append(output.sum())
        return losses[-1]

    schedule = ScheduleGPipe(PipelineStage(nn.Linear(3, 3), 0, 1, device), 2, loss)
    for _ in range(2):
        schedule.step(torch.ones(4, 3), target=torch.ones(4))
    strides = _torch_distributed.output_strides(permuted)
    return {"strides": strides, "dropped out": outputs, "losses": len(losses)}


def test_stages_know_strides_draw_alike_from_the_first_step_on_and_count_losses() -> None:
    (actual,) = run_on_warm_ranks(_stages, 1)
    assert actual["strides"] == [(15, 1, 5)], "those of a micro-batch"
    first, later = actual["dropped out"]
    assert torch.equal(first, later)
    assert 0 < first.count_nonzero() < first.numel()
    # The first step calls the loss once more where shapes are inferred with it.
    assert actual["losses"] == 4 + _torch_distributed.infers_shapes_with_loss()
