"""A stage of torch.distributed.pipelining whose work is spans, and whose receives on a CPU are made in advance."""

from functools import partial
from typing import Any

from torch.distributed.pipelining import PipelineStage

from lightning_distrec import spans

Receives = dict[tuple[bool, int], list[Any]]
"""Whether it is a gradient, and the micro-batch's number -> the operations."""


class SpannedStage(PipelineStage):
    """A stage whose work on each micro-batch is a span.

    torch receives an input when it is needed. gloo sends it only then, and its threads wait for a CPU that another
    stage computes on: ranks would idle for it at every micro-batch. So the receives of a step are made at its
    beginning. NCCL's wait on the GPU, in the order in which they are made, and stay as they are.
    """

    _receives: Receives | None = None
    """Those of the step that runs, but for those that torch has asked for; None: none is made yet."""

    def begin_step(self) -> None:
        """Let the next receive that torch asks for make all those of a new step."""
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
        if self.device.type != "cpu":
            return super().get_fwd_recv_ops(fwd_chunk_id)
        return self._made().pop((False, fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the receives of the gradient of a micro-batch's output."""
        if self.device.type != "cpu":
            return super().get_bwd_recv_ops(bwd_chunk_id)
        return self._made().pop((True, bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return the sends of a micro-batch's output."""
        return self._tagged(super().get_fwd_send_ops(fwd_chunk_id), self.stage_index + 1, False, fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the sends of the gradient of a micro-batch's input."""
        return self._tagged(super().get_bwd_send_ops(bwd_chunk_id), self.stage_index - 1, True, bwd_chunk_id)

    def _made(self) -> Receives:
        if self._receives is None:
            self._receives = {}
            for is_gradient, of_chunk in ((False, super().get_fwd_recv_ops), (True, super().get_bwd_recv_ops)):
                for number in self.args_recv_info:
                    made = self._tagged(of_chunk(number), self.stage_index, is_gradient, number)
                    for each in made:
                        work = each.op(each.tensor, group=each.group, tag=each.tag, group_src=each.group_peer)
                        each.op = partial(_already_made, work)
                    self._receives[is_gradient, number] = made
        return self._receives

    def _tagged(self, operations: list[Any], to_stage: int, is_gradient: bool, number: int) -> list[Any]:
        """Return operations with a tag that no others of the step have, by which gloo matches sends and receives."""
        for each in operations if self.device.type == "cpu" else ():
            each.tag = 1 + 2 * (to_stage * len(self.args_recv_info) + number) + is_gradient
        return operations


def _already_made(work: Any, *_: Any, **__: Any) -> Any:
    return work
