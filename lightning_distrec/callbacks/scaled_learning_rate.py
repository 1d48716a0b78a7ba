"""Scales learning rates with the number of ranks, as the global batch grows with it.

Source: Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677: the linear rule and the
gradual warm-up.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec.errors import ConfigError, OptimizerError, UnsupportedError
from lightning_distrec.observe.steps import LogTimes, Stoppable, log
from lightning_distrec.option_values import check_choice

Rule = Literal["linear", "sqrt"]


class ScaledLearningRate(Stoppable):
    """Multiplies all learning rates by a factor of the number of ranks, so that one YAML serves any
    number of ranks.

    The rates are multiplied during an optimizer's step only. Between steps the param groups hold
    the rates without the factor, which is what schedulers, LearningRateMonitor and checkpoints see;
    the loggers get the rates that were used as `scaled_learning_rate`. A resumed run continues as
    if it had never stopped. AdamW's weight decay is scaled with its rate. Source: Goyal et al.
    2017, arXiv:1706.02677.

    Refused: a LearningRateFinder next to it, a rate set inside of training_step, fused tables in a
    backward outside of `optimizer.step(closure)`, optimizers without `lr`.

    Args:
        rule: "linear": the factor is ranks / base_ranks, which suits SGD; "sqrt": its square root,
            which suits Adam and similar optimizers.
        base_ranks: the number of ranks that the rates were chosen for; on this number nothing
            changes.
        warmup_steps: a factor above 1 grows linearly from 1 over this number of steps of each
            optimizer; 0: no warm-up.
    """

    def __init__(self, rule: Rule = "linear", base_ranks: int = 1, warmup_steps: int = 0) -> None:
        super().__init__()
        check_choice("ScaledLearningRate: rule", rule, get_args(Rule))
        if base_ranks < 1 or warmup_steps < 0:
            raise ConfigError(
                f"ScaledLearningRate: base_ranks={base_ranks} must be at least 1, and "
                f"warmup_steps={warmup_steps} at least 0 (no warm-up)."
            )
        self._rule = rule
        self._base_ranks = base_ranks
        self._warmup_steps = warmup_steps
        self._factor = 1.0
        self._steps: list[int] = []
        self._scaled: list[ScaledSteps] = []
        self._has_fused_tables = False
        self._log_times = LogTimes()
        self._steps_seen = 0

    @property
    def rates(self) -> list[list[float]]:
        """The rates that the last step of each optimizer used, by param group; empty before its
        first."""
        return [list(map(float, scaled.used)) for scaled in self._scaled]

    def factor_at(self, step: int) -> float:
        """Return the factor of an optimizer's step, counted from 0."""
        if self._factor <= 1 or step >= self._warmup_steps:
            return self._factor
        return 1 + (self._factor - 1) * step / self._warmup_steps

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, LearningRateFinder) for callback in callbacks):
            raise ConfigError(
                "ScaledLearningRate with LearningRateFinder: the finder's rate already suits this "
                "number of ranks. Run the finder without ScaledLearningRate, then set base_ranks "
                "to the number of ranks it ran on."
            )
        # Not world_size: the global batch grows with ranks that have their own batches; those of a
        # pipeline share one.
        num_ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        ratio = num_ranks / self._base_ranks
        self._factor = ratio if self._rule == "linear" else ratio**0.5
        self._steps, self._scaled = [], []  # a checkpoint is loaded after this
        if self._factor != 1:
            warm_up = (
                f", reached after {self._warmup_steps} steps"
                if self._factor > 1 and self._warmup_steps
                else ""
            )
            rank_zero_info(
                f"ScaledLearningRate: learning rates are multiplied by {self._factor:.4g}{warm_up} "
                f"({num_ranks} ranks, base_ranks={self._base_ranks}, {self._rule})."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop()
        self._scaled = []
        self._log_times.start()
        tables = getattr(trainer.strategy, "run_tables", None)  # TorchRecShardedStrategy's
        self._has_fused_tables = tables is not None and bool(tables.fused_tables)
        # which step with the first
        table_optimizers = [] if tables is None else tables.table_optimizers
        for index, optimizer in enumerate(trainer.optimizers):
            stepping = [optimizer, *([] if index else table_optimizers)]
            _check_have_rates(stepping)
            steps = self._steps[index] if index < len(self._steps) else 0
            self._scaled.append(ScaledSteps(stepping, self.factor_at, steps))
        self._steps_seen = sum(scaled.steps for scaled in self._scaled)

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        # Fused kernels copy the rate at forward. At this point no table has been updated with it.
        if self._has_fused_tables and not any(scaled.is_stepping for scaled in self._scaled):
            raise OptimizerError(
                "ScaledLearningRate: tables are updated in backward, and this backward runs "
                "outside of optimizer.step, where rates are not scaled. Set "
                "embedding_update='auto', or pass forward and backward to optimizer.step as its "
                "closure."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = sum(scaled.steps for scaled in self._scaled)
        # False while gradients accumulate
        stepped = steps != self._steps_seen
        self._steps_seen = steps
        if stepped and self._log_times.due(trainer) and trainer.is_global_zero:
            named: dict[str, float] = {}
            for index, groups in enumerate(self.rates):
                name = "scaled_learning_rate" + (
                    f"/optimizer_{index}" if len(self.rates) > 1 else ""
                )
                for n, rate in enumerate(groups):
                    named[name + (f"/group_{n}" if len(groups) > 1 else "")] = rate
            log(trainer, named)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Before training starts, what a checkpoint has brought is passed on.
        return {"steps": [scaled.steps for scaled in self._scaled] or self._steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = list(state_dict["steps"])

    @override
    def stop(self) -> None:
        for scaled in self._scaled:
            scaled.stop()


class ScaledSteps:
    """Multiplies one optimizer's rates during its steps; the closure, with forward and backward, is
    part of a step.

    optimizers: the one, and those that step together with it. factor_at: number of a step -> its
    factor. steps: made before.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], factor_at: Callable[[int], float], steps: int
    ) -> None:
        self._optimizers = optimizers
        self._factor_at = factor_at
        self.steps = steps
        self.used: list[Any] = []
        self.is_stepping = False
        self._groups: list[tuple[dict[str, Any], Any]] = []
        # torch's hooks run before the closure. Lightning's on_before_optimizer_step comes after
        # backward, when fused tables have used the rate.
        register = optimizers[0].register_step_pre_hook
        register_after = optimizers[0].register_step_post_hook
        self._hooks = [register(self._begin), register_after(self._end)]

    def stop(self) -> None:
        """Scale no further steps, and restore the rates if a step failed; may be called more than
        once."""
        self._restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # after a step that failed: optimizers call no hook then
        factor = self._factor_at(self.steps)
        self._groups = [
            (group, group["lr"]) for member in self._optimizers for group in member.param_groups
        ]
        # Also where the factor is 1: a new object, by which _restore sees whether the user has set
        # a rate meanwhile.
        self.used = [rate * factor for _, rate in self._groups]
        for (group, _), rate in zip(self._groups, self.used, strict=True):
            group["lr"] = rate
        self.is_stepping = True

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        number = self._restore()
        if number is not None:
            raise OptimizerError(
                f"ScaledLearningRate: the learning rate of param group {number} of "
                f"{type(optimizer).__name__} was set during a step, too late to be scaled. Set it "
                "in a scheduler or in on_train_batch_start."
            )

    def _restore(self) -> int | None:
        """Restore the groups' own rates; returns the number of a group whose rate was changed
        meanwhile, or None."""
        changed = None
        # `used` outlives its step, for the loggers; without a step the groups are fewer, hence
        # strict=False.
        for number, ((group, plain), used) in enumerate(zip(self._groups, self.used, strict=False)):
            # By identity: a rate set to an equal number is set all the same, and is the user's.
            if group["lr"] is used:
                group["lr"] = plain
            else:
                changed = number
        self._groups = []
        self.is_stepping = False
        return changed


def _check_have_rates(optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer) or any(
            "lr" not in group for group in optimizer.param_groups
        ):
            raise UnsupportedError(
                f"ScaledLearningRate: {type(optimizer).__name__} is not a torch.optim.Optimizer "
                "with a learning rate 'lr' in each param group, so there is nothing to scale. "
                "Remove ScaledLearningRate."
            )
