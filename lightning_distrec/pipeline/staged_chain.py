"""This rank's stages of a chain, the schedules in which they compute, and the gradients that these
leave."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lightning_distrec import spans
from lightning_distrec._compat.torch_distributed import (
    IsolatedStage,
    infers_shapes_with_loss,
    output_strides,
)
from lightning_distrec.pipeline.called_layers import CalledLayers
from lightning_distrec.pipeline.chain import PipelineRanks, Schedule, StageLayout

Receives = dict[tuple[bool, int], list[Any]]
"""Whether it is a gradient, and the micro-batch's number -> the operations."""


class SpannedStage(IsolatedStage):
    """A stage whose work on each micro-batch is a span, and whose receives over gloo are made when
    a step begins."""

    _receives: Receives | None = None
    """Those of the current step that torch has not asked for; None: none has been posted yet."""

    def begin_step(self) -> None:
        """Let the next receive that torch asks for post all those of a new step."""
        self._receives = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a micro-batch's output."""
        with spans.span(f"{spans.STAGE_FORWARD} {self.stage_index} {fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a micro-batch's gradients."""
        with spans.span(f"{spans.STAGE_BACKWARD} {self.stage_index} {bwd_chunk_id}"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return the receives of a micro-batch's input."""
        return self._receives_of(False, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the receives of the gradient of a micro-batch's output."""
        return self._receives_of(True, bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return the sends of a micro-batch's output."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        for operation, strides in zip(operations, output_strides(self), strict=False):
            # The buffer that receives it has the strides of the first output.
            operation.tensor = in_memory_order(with_strides(operation.tensor, strides))
        return self._tagged(operations, self.stage_index + 1, False, fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the sends of the gradient of a micro-batch's input."""
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        for operation in operations:
            operation.tensor = operation.tensor.contiguous()
        return self._tagged(operations, self.stage_index - 1, True, bwd_chunk_id)

    def _receives_of(self, is_gradient: bool, number: int) -> list[Any]:
        # NCCL's receives wait on the GPU, in the order in which they are made: torch's own order is
        # right for them.
        is_posted = self.device.type == "cpu"
        return (
            self._posted_receives().pop((is_gradient, number))
            if is_posted
            else self._make(is_gradient, number)
        )

    def _make(self, is_gradient: bool, number: int) -> list[Any]:
        """Make the receives of one micro-batch: into contiguous views, as gloo and NCCL want
        them."""
        if is_gradient:
            # Torch's buffers have the strides of the gradient, which may repeat elements; gradients
            # are sent as copies.
            for info in self.grad_recv_info.get(number, ()):
                if info.buffer is not None and not info.buffer.is_contiguous():
                    info.buffer = torch.empty(
                        info.buffer.shape, dtype=info.buffer.dtype, device=info.buffer.device
                    )
            return super().get_bwd_recv_ops(number)
        operations = super().get_fwd_recv_ops(number)
        for operation in operations:
            operation.tensor = in_memory_order(operation.tensor)
        return operations

    def _posted_receives(self) -> Receives:
        """Post the receives of a step at its first one. torch's schedule "posts" them later, and
        gets these works."""
        if self._receives is None:
            # torch receives an input when it is needed. gloo sends it only then, and its threads
            # wait for a CPU that another stage computes on: ranks would idle for it at every
            # micro-batch.
            # torch has a buffer for each micro-batch, so that all receives can be posted at once.
            self._receives = {}
            for is_gradient in (False, True):
                for number in self.args_recv_info:
                    operations = self._make(is_gradient, number)
                    operations = self._tagged(operations, self.stage_index, is_gradient, number)
                    for operation in operations:
                        group = operation.group
                        peer = operation.group_peer
                        work = operation.op(
                            operation.tensor, group=group, tag=operation.tag, group_src=peer
                        )
                        # The schedule calls `op` when it reaches this receive, and waits for what
                        # it returns.
                        operation.op = partial(_posted, work)
                    self._receives[is_gradient, number] = operations
        return self._receives

    def _tagged(
        self, operations: list[Any], to_stage: int, is_gradient: bool, number: int
    ) -> list[Any]:
        """Return operations with a tag that no others of the step have, by which gloo matches sends
        and receives."""
        if self.device.type == "cpu":
            # Tag 0 is that of messages without one. The receiver's stage is part of it, which both
            # sides know.
            for operation in operations:
                operation.tag = 1 + 2 * (to_stage * len(self.args_recv_info) + number) + is_gradient
        return operations


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view whose dims are in the order of memory: contiguous, unless elements overlap or
    leave gaps."""
    return tensor.permute(memory_order(tensor))


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dims of a tensor in the order of memory, the outermost first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the tensor, or a copy where it has other strides."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return micro-batches as one batch, whose dims are in the same order of memory, as user code
    finds them."""
    order = memory_order(parts[0])
    inverse = list(map(order.index, range(len(order))))
    return torch.cat([part.permute(order) for part in parts], dim=order.index(0)).permute(inverse)


def _posted(work: Any, *_: Any, **__: Any) -> Any:
    return work


Arguments = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""Of each block: what it is called with but for its first argument."""
ComputeLoss = Callable[[Tensor, int], Tensor]
"""Returns the loss of a micro-batch: of its output and its number."""


class Blocks(nn.Module):
    """The blocks of one stage, called one after the other."""

    def __init__(
        self, layout: StageLayout, stage: int, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        numbers = layout.block_numbers(stage)
        blocks = [layout.chain.blocks[number] for number in numbers]
        if layout.chain.caller is not None:
            blocks = [CalledLayers(layout.chain, numbers)]
            numbers = numbers[:1]
        self.blocks = nn.ModuleList(blocks)
        self._numbers = numbers
        self._context = context
        self.arguments: Sequence[Arguments] = []
        """Of each micro-batch."""

    def forward(self, value: Tensor, microbatch: Tensor) -> Tensor:
        """Return the last block's output."""
        # On the host: its numbers are made there by `compute`, and reading one waits for no GPU.
        arguments = self.arguments[int(microbatch)]
        with self._context():
            for number, block in zip(self._numbers, self.blocks, strict=True):
                args, kwargs = arguments[number]
                value = block(value, *args, **kwargs)
        # Sent as memory has it: a permuted view as it is, and one with gaps or repeated elements as
        # a copy.
        return value if in_memory_order(value).is_contiguous() else value.contiguous()


class StagedChain:
    """Computes a chain over the ranks of a pipeline, for inputs of any shape."""

    def __init__(
        self,
        layout: StageLayout,
        ranks: PipelineRanks,
        schedule: Schedule,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """context: around the forward of a stage, as the Trainer's precision has it."""
        self.layout = layout
        self.ranks = ranks
        self.device = device
        self._schedule = schedule
        self.blocks = [Blocks(layout, stage, context) for stage in ranks.stages]
        self._schedules: dict[Any, tuple[Any, list[SpannedStage]]] = {}
        self._compute_loss: ComputeLoss | None = None
        self._infers_shapes = False

    def compute(
        self, value: Tensor, arguments: Sequence[Arguments], compute_loss: ComputeLoss | None
    ) -> list[Tensor]:
        """Collective among the ranks of a pipeline. Compute the chain, and its backward if there is
        a loss.

        value: the chain's input; ranks other than the first only take its shape. arguments: of each
        micro-batch.
        compute_loss: called on the last stage. Returns the output of each micro-batch there, and []
        on the others.
        """
        num = len(arguments)
        schedule, stages = self._schedule_for(value, num, compute_loss is not None)
        self._compute_loss = compute_loss
        for blocks in self.blocks:
            blocks.arguments = arguments
        for stage in stages:
            stage.begin_step()
        # torch divides everything that a schedule gets into micro-batches: of these numbers each
        # one gets its own.
        numbers = torch.arange(num)
        inputs = (value,) if 0 in self.ranks.stages else ()
        target = numbers if compute_loss is not None else None
        user_error: BaseException
        try:
            schedule.step(
                *inputs, target=target, microbatch=numbers, return_outputs=compute_loss is None
            )
            return [] if compute_loss is not None else list(stages[-1].output_chunks)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            user_error = error.__cause__
        finally:
            # Nothing of a batch outlives its step: the modules would hold its tensors until the
            # next one.
            self._compute_loss = None
            for blocks in self.blocks:
                blocks.arguments = []
            for stage in stages:
                stage.output_chunks = []
        # Raised past the except clause, so that the traceback does not show torch's error as the
        # context of the user's.
        # what a block raises, which torch's stages replace by an error of their own
        raise user_error

    def _schedule_for(
        self, value: Tensor, num: int, learns: bool
    ) -> tuple[Any, list[SpannedStage]]:
        """Return the schedule, and its stages, for inputs of a shape: torch's stages have buffers
        of fixed shapes."""
        key = tuple(value.shape), value.dtype, num, learns
        self._infers_shapes = learns and key not in self._schedules and infers_shapes_with_loss()
        if key not in self._schedules:
            stages = []
            for stage, blocks in zip(self.ranks.stages, self.blocks, strict=True):
                stages.append(
                    SpannedStage(
                        blocks, stage, self.ranks.num_stages, self.device, group=self.ranks.pipeline
                    )
                )
            loss = self._loss if learns else None
            # torch would divide gradients by the number of micro-batches; our losses are divided
            # already.
            if len(stages) > 1:
                schedule: Any = ScheduleInterleaved1F1B(list(stages), num, loss, scale_grads=False)
            # 1F1B needs a micro-batch for each stage, and an evaluation has no backward that could
            # begin early.
            elif self._schedule == "1f1b" and learns and num >= self.ranks.num_stages:
                schedule = Schedule1F1B(stages[0], num, loss, scale_grads=False)
            else:
                schedule = ScheduleGPipe(stages[0], num, loss, scale_grads=False)
            self._schedules[key] = schedule, stages
        return self._schedules[key]

    def _loss(self, output: Tensor, number: Tensor) -> Tensor:
        if self._infers_shapes:
            # torch infers shapes by a first forward and backward, whose numbers nobody sees: no
            # step of the user's.
            self._infers_shapes = False
            return output.sum()
        assert self._compute_loss is not None
        with spans.span(f"{spans.STAGE_LOSS} {self.ranks.num_stages - 1} {int(number)}"):
            return self._compute_loss(output, int(number))


class _ComputedLoss(torch.autograd.Function):
    """A loss whose backward has run already: its gradients are given to the parameters when
    Lightning asks for them.

    Lightning clears gradients, divides the loss (accumulate_grad_batches) and calls backward after
    training_step. As autograd's own, the gradients pass through all of that.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *parameters: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:  # type: ignore[override]
        # What Lightning does to the loss: it divides it by accumulate_grad_batches, for one.
        factor = loss_gradient.reshape(())
        return (
            None,
            None,
            *(g if g is None else g * factor.to(g.device, g.dtype) for g in ctx.gradients),
        )


class GradientsAside:
    """Takes the gradients that a schedule computes, and puts aside those of earlier batches, which
    accumulate."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._earlier_gradients = [parameter.grad for parameter in self._parameters]
        # The schedule's backwards add to what is there, and earlier gradients must not count twice.
        for parameter in self._parameters:
            parameter.grad = None

    def loss_with_gradients(self, loss: Tensor) -> Tensor:
        """Return the loss, whose backward delivers the gradients that have been computed."""
        gradients = [parameter.grad for parameter in self._parameters]
        self.restore()
        # A stage may have nothing to learn, and autograd calls no backward where no input asks for
        # a gradient.
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        return _ComputedLoss.apply(loss, [None, *gradients], anchor, *self._parameters)

    def restore(self) -> None:
        """Put the gradients of earlier batches back."""
        for parameter, gradient in zip(self._parameters, self._earlier_gradients, strict=True):
            parameter.grad = gradient


class ProxyLoss(torch.autograd.Function):
    """A loss whose backward passes on gradients[number], for a schedule that asks for one loss per
    micro-batch.

    The loss is that of the whole batch. Its backward down to the outputs runs before the schedule's
    first one.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: list[Tensor], number: int) -> Tensor:
        # The list is read in backward: in the first micro-batches' forwards it is still empty.
        ctx.gradients = gradients
        ctx.number = number
        # Autograd needs a result that depends on the output; its value is never used.
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.gradients[ctx.number], None, None


def average_over_replicas(parameters: Sequence[nn.Parameter], group: Any, host_group: Any) -> None:
    """Collective among the replicas of a stage. Average their gradients.

    A parameter that any replica has used gets a gradient on all; replicas that have not used it
    count as 0.
    host_group: where they report what they have used, on the host.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    num_replicas = dist.get_world_size(group)
    if not trained or num_replicas == 1:
        return
    # Counted on the host, where the numbers are read: on a GPU that would be waited for.
    num_uses = torch.tensor(
        [parameter.grad is not None for parameter in trained], dtype=torch.int32
    )
    dist.all_reduce(num_uses, group=host_group)
    parameters_by_dtype = defaultdict(list)
    for parameter, is_used in zip(trained, num_uses.tolist(), strict=True):
        if is_used:
            parameters_by_dtype[parameter.dtype].append(parameter)
    # One message for each type, of the same parameters in the same order on all replicas of the
    # stage.
    for used in parameters_by_dtype.values():
        flat = torch.cat([
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in used
        ])
        dist.all_reduce(flat.div_(num_replicas), group=group)
        for parameter, part in zip(used, flat.split([p.numel() for p in used]), strict=True):
            parameter.grad = part.view_as(parameter)
