"""A module whose chain is computed in stages: what a strategy does in place of the user's steps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_distrec.absent_tensors import WAY_OUT, is_absent
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import DataError, UnsupportedError
from lightning_distrec.strategies.stages.chain import StageLayout
from lightning_distrec.strategies.stages.divided_arguments import DividedArguments
from lightning_distrec.strategies.stages.draws import StepDraws
from lightning_distrec.strategies.stages.gradients import GradientsAside, PartGradients, average_over_replicas
from lightning_distrec.strategies.stages.logged_values import Call, LoggedValues
from lightning_distrec.strategies.stages.microbatches import num_parts, parts_of, size_of, weights_of
from lightning_distrec.strategies.stages.placement import own_parameters
from lightning_distrec.strategies.stages.stage_options import PipelineRanks, StageOptions
from lightning_distrec.strategies.stages.staged_chain import StagedChain
from lightning_distrec.strategies.stages.step_over_chain import Entry, StepOverChain, check_entry

Step = Callable[..., Any]
"""A step of the user's, in the Trainer's precision; its first argument is the batch."""
CLOSE = 1e-3
"""How far the mean of micro-batches' losses may be from the loss of the whole batch."""


class PipelinedModule:
    """Runs the steps of a module during one run."""

    def __init__(
        self,
        module: LightningModule,
        layout: StageLayout,
        ranks: PipelineRanks,
        options: StageOptions,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        consensus: Consensus,
    ) -> None:
        self._layout, self._ranks, self._options, self._consensus = layout, ranks, options, consensus
        self._step = StepOverChain(layout.chain)
        self._chain = StagedChain(layout, ranks, options.schedule, device, context)
        self._log = LoggedValues(module)
        self._arguments = DividedArguments()
        self._own = own_parameters(module)
        self._module = module
        self._draws = StepDraws(ranks.messages)
        self._is_last = ranks.num_stages - 1 in ranks.stages
        self._entered: set[str] = set()
        self._device = device
        self._syncs = True
        self._evaluated = 0

    # -- training

    def training_step(self, step: Step, batch: Any, *others: Any) -> Any:
        """Collective. Run training_step and its backward in stages. Returns the loss, whose gradients are computed."""
        self._begin("training_step", batch, *others)
        aside = GradientsAside(self._own)
        try:
            by_batch = self._options.schedule == "gpipe"
            result, message = (self._by_batch if by_batch else self._by_microbatch)(step, batch, others)
        except BaseException:
            aside.restore()
            raise
        self._repeat(message)
        if message["refused"]:
            raise UnsupportedError(message["refused"])
        if message["loss"] is None:
            aside.restore()
            return None
        loss = aside.loss_with_gradients(message["loss"].to(self._device))
        return {**result, "loss": loss} if isinstance(result, dict) else loss

    def _by_batch(self, step: Step, batch: Any, others: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """Compute the loss of the whole batch, once all of its micro-batches have been through the chain."""
        run = partial(step, batch, *others)
        entry = self._enter("training_step", [run])[0]
        num = num_parts(len(entry.value), self._options.microbatches, self._chain.fits)
        outputs: list[Tensor] = []
        of_parts, found = PartGradients(), _Found()

        def loss_of(output: Tensor, number: int) -> Tensor:
            outputs.append(output.detach())
            if len(outputs) == num:
                full = torch.cat(outputs).requires_grad_()
                loss = self._leave(run, 0, full, found)
                if loss is not None:
                    loss.backward()
                gradient = torch.zeros_like(full) if full.grad is None else full.grad
                of_parts.gradients = gradient.chunk(num)
            return of_parts.loss_of(output, number)

        self._compute([entry], self._split(entry, num, step, batch, others), loss_of)
        return found.result, self._message(found, torch.ones(1, dtype=torch.float64))

    def _by_microbatch(self, step: Step, batch: Any, others: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """Compute the loss of each micro-batch as soon as it has been through the chain."""
        size = size_of(batch)
        num = num_parts(size, self._options.microbatches, self._chain.fits)
        runs = [partial(step, part, *others) for part in parts_of(batch, num, size)]
        is_first = "training_step" not in self._entered
        entries = self._enter("training_step", runs)
        outputs: list[Tensor] = []
        found = _Found()

        def loss_of(output: Tensor, number: int) -> Tensor:
            if is_first:
                outputs.append(output.detach())
            loss = self._leave(runs[number], number, output, found)
            if loss is None:
                raise UnsupportedError("training_step returned no loss for a micro-batch. Use schedule='gpipe'.")
            return loss / num

        self._compute(entries, [entry.others for entry in entries], loss_of)
        message = self._message(found, weights_of([1] * num))
        if is_first:
            run = partial(step, batch, *others)
            refused = self._refusal(run, torch.cat(outputs), message) if self._is_last else ""
            message["refused"] = self._ranks.messages.all_gather(refused)[-1]
        return found.result, message

    def _compute(self, entries: list[Entry], arguments: Any, loss_of: Any) -> None:
        values = [entry.value for entry in entries]
        learns = 0 in self._ranks.stages and values[0].requires_grad
        value = torch.cat([v.detach() for v in values]) if len(values) > 1 else values[0].detach()
        value.requires_grad_(learns)
        with self._draws.of(-1 - self._ranks.rank):
            self._chain.compute(value, arguments, loss_of)
        if learns:
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            torch.autograd.backward(values, list(gradient.chunk(len(values))))

    def _leave(self, run: Callable[[], Any], number: int, output: Tensor, found: "_Found") -> Tensor | None:
        """Run the user's step from the chain's output on. Returns its loss. Raises UnsupportedError: it is absent."""
        with self._draws.of(number), self._log.recorded() as calls:
            result = self._step.leave(run, output)
        if is_absent(result) or is_absent([call["value"] for call in calls]):
            raise UnsupportedError(
                "what a step returns or logs depends on weights that another stage has, and this one has no values of: "
                f"those of '{self._layout.chain.path}', or of what is registered before it. {WAY_OUT}"
            )
        loss = result["loss"] if isinstance(result, dict) else result
        found.result = result
        found.calls.append(calls)
        if loss is not None:
            found.losses.append(loss.detach())
        return loss

    def _refusal(self, run: Callable[[], Any], output: Tensor, message: dict[str, Any]) -> str:
        """Return what of the step is not the mean of the same of its micro-batches; "" if all is. On the last stage.

        A step that draws at random draws other numbers for a batch than for its micro-batches, and is not compared.
        """
        found = _Found()
        self._draws.has_drawn = False
        with torch.no_grad(), self._log.metrics_unchanged():
            of_batch = self._leave(run, 0, output, found)
        has_drawn, self._draws.has_drawn = self._draws.has_drawn, None
        if has_drawn or of_batch is None:
            return ""
        pairs = [("training_step's loss", of_batch, message["loss"])]
        means = {call["name"]: call.get("value") for call in message["calls"]}
        for call in found.calls[0]:
            value, mean = call["value"], means.get(call["name"])
            if mean is not None and isinstance(value, (Tensor, int, float)):
                pairs.append((f"self.log({call['name']!r})", torch.as_tensor(value).detach().cpu(), mean))
        for what, of_all, mean in pairs:
            if not torch.allclose(mean.double().cpu(), of_all.detach().double().cpu(), rtol=CLOSE, atol=CLOSE):
                return (
                    f"{what} of the first batch is {_shown(of_all)}, and the mean over its micro-batches is "
                    f"{_shown(mean)}: it is not a mean over examples, as schedule={self._options.schedule!r} needs it. "
                    "Use schedule='gpipe', which computes it of the whole batch."
                )
        return ""

    # -- evaluation

    def evaluation_step(self, name: str, step: Step, batch: Any, *others: Any) -> Any:
        """Collective. Run a step without backward. Every rank returns, and logs, what the last stage does."""
        self._begin(name, batch, *others)
        run = partial(step, batch, *others)
        entry = self._enter(name, [run])[0]
        num = num_parts(len(entry.value), self._options.microbatches, self._chain.fits)
        arguments = self._split(entry, num, step, batch, others)
        with self._draws.of(-1 - self._ranks.rank):
            outputs = self._chain.compute(entry.value, arguments, None)
        found = _Found()
        if self._is_last:
            self._leave_evaluation(run, torch.cat(outputs), found)
        message = self._message(found, torch.ones(1, dtype=torch.float64), with_result=True)
        self._repeat(message)
        return message["result"]

    def _leave_evaluation(self, run: Callable[[], Any], output: Tensor, found: "_Found") -> None:
        with self._draws.of(0), self._log.recorded() as calls:
            found.result = self._step.leave(run, output)
        found.calls.append(calls)

    # -- both

    def _begin(self, name: str, batch: Any, *others: Any) -> None:
        trainer = self._module.trainer
        self._evaluated += 1
        number = trainer.fit_loop.batch_idx if name == "training_step" else others[0] if others else self._evaluated
        self._draws.begin_step(trainer.global_step, number)
        if number == 0 or name not in self._entered:
            sums: list[float] = []
            apply_to_collection(batch, Tensor, lambda tensor: sums.append(float(tensor.detach().double().sum())))
            of_ranks = self._ranks.messages.all_gather(sums)
            if any(of_rank != of_ranks[0] for of_rank in of_ranks):
                raise DataError(
                    f"{name}: the ranks of a pipeline have different batches. Let the Trainer make the sampler, or "
                    "give yours num_replicas and rank of trainer.distributed_sampler_kwargs."
                )

    def _enter(self, name: str, runs: Sequence[Callable[[], Any]]) -> list[Entry]:
        """Run the user's step up to the chain; in the first step all ranks raise what one raises."""

        def enter() -> list[Entry]:
            found = []
            for number, run in enumerate(runs):
                with self._draws.of(number), self._log.recorded():
                    found.append(self._step.enter(run))
                check_entry(found[-1], 0 in self._ranks.stages, self._layout.chain)
            return found

        if name in self._entered:
            return enter()
        self._entered.add(name)
        return self._consensus.all_or_none(f"the first {name}", enter)

    def _split(self, entry: Entry, num: int, step: Step, batch: Any, others: Sequence[Any]) -> list[Any]:
        """Return the blocks' other arguments for each micro-batch. Raises UnsupportedError: see DividedArguments."""

        def enter_part() -> Entry:
            part = parts_of(batch, num, size_of(batch))[0]
            with self._draws.of(0), self._log.recorded():
                return self._step.enter(partial(step, part, *others))

        return self._arguments.of(entry, num, enter_part)

    def _message(self, found: "_Found", weights: Tensor, with_result: bool = False) -> dict[str, Any]:
        """Collective among the ranks of a pipeline. Return what the last stage has found."""
        mine: dict[str, Any] = {"seed": self._draws.seed}
        if self._is_last:
            loss = (torch.stack(found.losses).cpu().double() * weights).sum() if found.losses else None
            mine |= {
                "loss": None if loss is None else loss.to(found.losses[0].dtype),
                "calls": self._log.to_send(found.calls, weights),
                "result": apply_to_collection(found.result, Tensor, lambda t: t.detach().cpu())
                if with_result
                else None,
                "refused": "",
            }
        of_ranks: list[dict[str, Any]] = self._ranks.messages.all_gather(mine)
        if any(of_rank["seed"] != mine["seed"] for of_rank in of_ranks):
            raise UnsupportedError(
                "torch's random generator has different states on the ranks of a pipeline, so that they would draw "
                "other numbers in a step. Between steps (in callbacks, in hooks), draw on all ranks alike, or from a "
                "generator of your own."
            )
        return of_ranks[-1]

    def _repeat(self, message: dict[str, Any]) -> None:
        self._log.repeat(message["calls"])

    def average_gradients(self) -> None:
        """Collective among the replicas, after a backward, unless gradients accumulate."""
        if self._syncs:
            average_over_replicas(self._own, self._ranks.same_stage, self._ranks.same_stage_host)

    def set_sync(self, syncs: bool) -> None:
        """Whether the next backward ends with averaging gradients over the replicas."""
        self._syncs = syncs


class _Found:
    """What the last stage finds in one step."""

    def __init__(self) -> None:
        self.result: Any = None
        self.losses: list[Tensor] = []
        self.calls: list[list[Call]] = []


def _shown(value: Tensor) -> str:
    return f"{float(value):.6g}" if value.numel() == 1 else str(value.tolist())
