"""A module whose chain is computed in stages: what a strategy does in place of the user's steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import DataError, UnsupportedError
from lightning_distrec.gpu import is_on_gpu
from lightning_distrec.pipeline.absent_tensors import WAY_OUT, is_absent
from lightning_distrec.pipeline.chain import StageOptions
from lightning_distrec.pipeline.placement import present_parameters
from lightning_distrec.pipeline.staged_chain import (
    ComputeLoss,
    GradientsAside,
    ProxyLoss,
    StagedChain,
    average_over_replicas,
    joined,
)
from lightning_distrec.pipeline.step_effects import (
    LogCall,
    LoggedValues,
    StepDraws,
    on_host,
    to_device,
)
from lightning_distrec.pipeline.step_over_chain import (
    BlockArguments,
    Entry,
    batch_size_of,
    enter_chain,
    leave_chain,
    split_batch,
    tensors_in,
)

TOLERANCE = 1e-3
"""How far the mean of micro-batches' losses may be from the loss of the whole batch; see
`close_enough`."""


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """A call of one of the user's steps."""

    name: str
    step: Callable[..., Any]
    """In the Trainer's precision."""
    batch: Any
    indices: tuple[Any, ...]
    """Of the batch, and of the dataloader, where Lightning passes them."""

    def __call__(self) -> Any:
        """Run the step."""
        return self.step(self.batch, *self.indices)


@dataclass(kw_only=True)
class StepOutcome:
    """What the last stage has of a step; empty on the others."""

    result: Any = None
    losses: list[Tensor] = field(default_factory=list)
    """Of each micro-batch, or of the whole batch."""
    log_calls: list[list[LogCall]] = field(default_factory=list)
    """The same."""


class PipelinedModule:
    """Runs the steps of a module during one run."""

    def __init__(
        self,
        module: LightningModule,
        chain: StagedChain,
        options: StageOptions,
        consensus: Consensus,
    ) -> None:
        self._module = module
        self._staged = chain
        self._options = options
        self._consensus = consensus
        self._chain = chain.layout.chain
        self._ranks = chain.ranks
        self._parameters = present_parameters(module)
        self._log = LoggedValues(module)
        self._arguments = BlockArguments()
        self._draws = StepDraws(chain.ranks.messages)
        self._has_first = 0 in chain.ranks.stages
        self._has_last = chain.ranks.num_stages - 1 in chain.ranks.stages
        self._entered: set[str] = set()
        self._num_calls = 0
        self.syncs_gradients = True
        """Whether the next backward ends with averaging gradients over the replicas."""

    # -- training

    def training_step(self, call: StepCall) -> Any:
        """Collective. Run training_step and its backward in stages. Returns the loss, whose
        gradients are computed."""
        self._begin(call)
        aside = GradientsAside(self._parameters)
        try:
            compute = (
                self._compute_batch
                if self._options.schedule == "gpipe"
                else self._compute_microbatches
            )
            result, message = compute(call)
        except BaseException:
            # What the failed step has computed goes; the gradients that accumulate stay.
            aside.restore()
            raise
        self._log.repeat(message["log_calls"])
        if message["loss"] is None:
            aside.restore()
            return None
        loss = aside.loss_with_gradients(to_device(message["loss"], self._staged.device))
        return {**result, "loss": loss} if isinstance(result, dict) else loss

    def _compute_batch(self, call: StepCall) -> tuple[Any, dict[str, Any]]:
        """Compute the loss of the whole batch, once all of its micro-batches have been through the
        chain."""
        entry = self._enter([call])[0]
        num = self._options.num_parts(len(entry.value), self._ranks.num_ranks)
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        outcome = StepOutcome()

        def compute_loss(output: Tensor, number: int) -> Tensor:
            outputs.append(output.detach())
            # GPipe computes all losses before its first backward: with the last output the batch is
            # complete.
            if len(outputs) == num:
                # A leaf: the user's backward ends at it, and the schedule's backwards begin with
                # its gradient.
                full = joined(outputs).requires_grad_()
                loss = self._leave(call, 0, full, outcome)
                if loss is not None:
                    loss.backward()
                gradients.extend(_gradient_or_zeros(full).chunk(num))
            return ProxyLoss.apply(output, gradients, number)

        self._compute_chain([entry], self._split_arguments(entry, num, call), compute_loss)
        return outcome.result, self._share(outcome)

    def _compute_microbatches(self, call: StepCall) -> tuple[Any, dict[str, Any]]:
        """Compute the loss of each micro-batch as soon as it has been through the chain."""
        num = self._options.num_parts(batch_size_of(call.batch), self._ranks.num_ranks)
        calls = [replace(call, batch=part) for part in split_batch(call.batch, num)]
        # Only the first batch is compared: comparing runs the user's step once more.
        is_first = call.name not in self._entered
        entries = self._enter(calls)
        outputs: list[Tensor] = []
        outcome = StepOutcome()

        def compute_loss(output: Tensor, number: int) -> Tensor:
            if is_first:
                outputs.append(output.detach())
            loss = self._leave(calls[number], number, output, outcome)
            if loss is None:
                raise UnsupportedError(
                    "training_step returned no loss for a micro-batch. Use schedule='gpipe'."
                )
            return loss / num

        self._compute_chain(entries, [entry.arguments for entry in entries], compute_loss)
        message = self._share(outcome)
        if is_first:
            refusal = self._refusal(call, joined(outputs), message) if self._has_last else ""
            # On all ranks, as only the last one can compare.
            refusal = self._ranks.messages.all_gather(refusal)[-1]
            if refusal:
                raise UnsupportedError(refusal)
        return outcome.result, message

    def _compute_chain(
        self, entries: Sequence[Entry], arguments: Any, compute_loss: ComputeLoss
    ) -> None:
        values = [entry.value for entry in entries]
        learns = self._has_first and values[0].requires_grad
        # The schedule's backward ends at this leaf. Its gradient then passes through what comes
        # before the chain.
        value = joined([v.detach() for v in values]) if len(values) > 1 else values[0].detach()
        value.requires_grad_(learns)
        # A seed of each rank's own, below those of micro-batches: dropout of two stages must not
        # draw the same masks.
        with self._draws.seeded(-1 - self._ranks.rank):
            self._staged.compute(value, arguments, compute_loss)
        if learns:
            torch.autograd.backward(values, list(_gradient_or_zeros(value).chunk(len(values))))

    def _leave(
        self, call: StepCall, number: int, output: Tensor, outcome: StepOutcome
    ) -> Tensor | None:
        """Run the user's step from the chain's output on. Returns its loss. Raises
        UnsupportedError: it is absent."""
        with self._draws.seeded(number), self._log.recorded() as log_calls:
            result = leave_chain(self._chain, call, output)
        if is_absent(result) or is_absent([log_call["value"] for log_call in log_calls]):
            raise UnsupportedError(
                "what a step returns or logs depends on weights that another stage has, before it "
                f"or in '{self._chain.path}'. {WAY_OUT}"
            )
        outcome.result = result
        outcome.log_calls.append(log_calls)
        loss: Tensor | None = _loss_in(result)
        if loss is not None:
            outcome.losses.append(loss.detach())
        return loss

    def _refusal(self, call: StepCall, output: Tensor, message: dict[str, Any]) -> str:
        """Return what of the step is not the mean of the same of its micro-batches; "" if all is.
        On the last stage.

        A step that draws at random draws other numbers for a batch than for its micro-batches, and
        is not compared.
        """
        # The step runs once more for this batch, which metrics must not count twice.
        with torch.no_grad(), self._log.metrics_unchanged(), self._draws.seeded(0) as has_drawn:
            with self._log.recorded() as log_calls:
                loss = _loss_in(leave_chain(self._chain, call, output))
            if has_drawn() or loss is None:
                return ""
        pairs = [("training_step's loss", loss, message["loss"])]
        means = {log_call["name"]: log_call.get("value") for log_call in message["log_calls"]}
        for log_call in log_calls:
            value = log_call["value"]
            mean = means.get(log_call["name"])
            if mean is not None and isinstance(value, (Tensor, int, float)):
                pairs.append((
                    f"self.log({log_call['name']!r})",
                    torch.as_tensor(value).detach().cpu(),
                    mean,
                ))
        for description, value, mean in pairs:
            if not close_enough(value, mean, output):
                return (
                    f"{description} of the first batch is {_format_value(value)}, and the mean "
                    f"over its micro-batches {_format_value(mean)}: it is no mean over examples. "
                    "Use schedule='gpipe'."
                )
        return ""

    def average_gradients(self) -> None:
        """Collective among the replicas, after a backward, unless gradients accumulate."""
        if self.syncs_gradients:
            average_over_replicas(
                self._parameters, self._ranks.same_stage, self._ranks.same_stage_host
            )

    # -- evaluation

    def evaluation_step(self, call: StepCall) -> Any:
        """Collective. Run a step without backward. Every rank returns, and logs, what the last
        stage does."""
        self._begin(call)
        entry = self._enter([call])[0]
        num = self._options.num_parts(len(entry.value), self._ranks.num_ranks)
        arguments = self._split_arguments(entry, num, call)
        with self._draws.seeded(-1 - self._ranks.rank):
            outputs = self._staged.compute(entry.value, arguments, None)
        outcome = StepOutcome()
        if self._has_last:
            with self._draws.seeded(0), self._log.recorded() as log_calls:
                outcome.result = leave_chain(self._chain, call, joined(outputs))
            outcome.log_calls.append(log_calls)
        message = self._share(outcome, with_result=True)
        self._log.repeat(message["log_calls"])
        on_device = iter(message["on_device"])
        return to_device(message["result"], self._staged.device, lambda _: next(on_device))

    # -- both

    def _begin(self, call: StepCall) -> None:
        """Collective for a loop's first batch. Begin a step. Raises DataError: the ranks have
        different ones."""
        trainer = self._module.trainer
        self._num_calls += 1
        index = call.indices[0] if call.indices else self._num_calls
        # Lightning counts batches of the epoch: a run that resumes within it draws as one that
        # never stopped.
        number = trainer.fit_loop.batch_idx if call.name == "training_step" else index
        self._draws.begin_step(trainer.global_step, number)
        # Once per loop: samplers that differ show at its first batch, and later steps pay for no
        # exchange.
        if number == 0 or call.name not in self._entered:
            # Of bytes: sums of floats differ between kinds of devices, in their last digits.
            totals = []
            for tensor in tensors_in(call.batch):
                part = tensor.detach().to_dense().reshape(-1).view(torch.uint8)
                totals.append(part.sum(dtype=torch.int64))
            sums = list(map(int, on_host(totals)))
            per_rank_sums = self._ranks.messages.all_gather(sums)
            if any(rank_sums != per_rank_sums[0] for rank_sums in per_rank_sums):
                raise DataError(
                    f"{call.name}: the ranks of a pipeline have different batches. Let the Trainer "
                    "make the sampler, or give yours num_replicas and rank of "
                    "trainer.distributed_sampler_kwargs."
                )

    def _enter(self, calls: Sequence[StepCall]) -> list[Entry]:
        """Run the user's step up to the chain; in the first step all ranks raise what one
        raises."""

        def enter() -> list[Entry]:
            return [self._enter_part(call, number) for number, call in enumerate(calls)]

        name = calls[0].name
        if name in self._entered:
            return enter()
        # Later steps make no exchange here: what a forward does between blocks shows when it runs
        # for the first time.
        self._entered.add(name)
        return self._consensus.all_or_none(f"the first {name}", enter)

    def _enter_part(self, call: StepCall, number: int) -> Entry:
        # What is logged here is dropped: the last stage runs the step from its beginning, and its
        # calls are repeated.
        with self._draws.seeded(number), self._log.recorded():
            return enter_chain(self._chain, call, self._has_first)

    def _split_arguments(self, entry: Entry, num: int, call: StepCall) -> list[Any]:
        """Return the blocks' other arguments for each micro-batch. Raises UnsupportedError: see
        BlockArguments."""

        def enter_part() -> Entry:
            return self._enter_part(replace(call, batch=split_batch(call.batch, num)[0]), 0)

        return self._arguments.split(entry, num, enter_part)

    def _share(self, outcome: StepOutcome, with_result: bool = False) -> dict[str, Any]:
        """Collective among the ranks of a pipeline. Return what the last stage has of a step, as
        plain values."""
        message: dict[str, Any] = {"seed": self._draws.seed}
        if self._has_last:
            # Micro-batches are of one size: their mean weighs all examples alike.
            losses = torch.stack(outcome.losses) if outcome.losses else None
            result = outcome.result if with_result else None
            on_device: list[bool] = []
            apply_to_collection(result, Tensor, lambda tensor: on_device.append(is_on_gpu(tensor)))
            message |= {
                "loss": None if losses is None else losses.double().mean().to(losses.dtype),
                "log_calls": self._log.mean_calls(outcome.log_calls),
                "result": result,
                "on_device": on_device,
            }
            # The one read of a step. Not a step late: what a step logs is asked for as soon as it
            # returns, by callbacks, schedulers and the progress bar, and the other ranks have it by
            # this message only.
            message = on_host(message)
        # By messages on the host: the values are logged on every rank, and the seeds are compared
        # in the same exchange.
        messages: list[dict[str, Any]] = self._ranks.messages.all_gather(message)
        if any(remote["seed"] != message["seed"] for remote in messages):
            raise UnsupportedError(
                "torch's random generator has different states on the ranks of a pipeline. Between "
                "steps (in callbacks and hooks), draw on all ranks alike, or from a generator of "
                "your own."
            )
        return messages[-1]


def _loss_in(result: Any) -> Any:
    return result["loss"] if isinstance(result, dict) else result


def close_enough(value: Tensor, mean: Tensor, output: Tensor) -> bool:
    """Whether a mean over micro-batches is the batch's value but for rounding. output: what both
    are computed from."""
    # bfloat16 steps by 2^-7 of a number, wherever it is on the way from the chain's output to the
    # value.
    steps = []
    for tensor in (value, output):
        if tensor.is_floating_point():
            steps.append(torch.finfo(tensor.dtype).eps)
    limit = max(TOLERANCE, *(4 * step for step in steps))
    return torch.allclose(
        mean.double().cpu(), value.detach().double().cpu(), rtol=limit, atol=limit
    )


def _gradient_or_zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _format_value(value: Tensor) -> str:
    return f"{float(value):.6g}" if value.numel() == 1 else str(value.tolist())
