"""What torch's pipeline stages know of their outputs."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from lightning_distrec._compat import torch_distributed as _torch_distributed
from tests.support.ranks import rank_and_num_ranks, run_on_ranks


class Permuted(nn.Module):
    """Returns a permuted view."""

    def forward(self, value: Tensor) -> Tensor:
        return value.permute(0, 2, 1)


def _strides() -> list[tuple[int, ...]]:
    rank, num_ranks = rank_and_num_ranks()
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    stage = PipelineStage(Permuted(), 0, 1, torch.device("cpu"))
    ScheduleGPipe(stage, 2).step(torch.ones(4, 3, 5))
    return _torch_distributed.output_strides(stage)


def test_output_strides_are_those_of_a_micro_batch() -> None:
    assert run_on_ranks(_strides, 1) == [[(15, 1, 5)]]


def _outputs_of_dropout() -> list[Tensor]:
    rank, num_ranks = rank_and_num_ranks()
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    schedule = ScheduleGPipe(
        _torch_distributed.IsolatedStage(nn.Dropout(), 0, 1, torch.device("cpu")), 2
    )
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        outputs.append(schedule.step(torch.ones(20, 3)))
    return outputs


def test_a_first_step_draws_what_a_later_one_does() -> None:
    first, later = run_on_ranks(_outputs_of_dropout, 1)[0]
    assert torch.equal(first, later)
    assert 0 < first.count_nonzero() < first.numel()


def _num_calls_of_loss() -> int:
    rank, num_ranks = rank_and_num_ranks()
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    losses: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        losses.append(output.sum())
        return losses[-1]

    stage = PipelineStage(nn.Linear(3, 3), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss)
    for _ in range(2):
        schedule.step(torch.ones(4, 3), target=torch.ones(4))
    return len(losses)


def test_a_first_step_calls_the_loss_once_more_where_shapes_are_inferred_with_it() -> None:
    assert run_on_ranks(_num_calls_of_loss, 1) == [4 + _torch_distributed.infers_shapes_with_loss()]
