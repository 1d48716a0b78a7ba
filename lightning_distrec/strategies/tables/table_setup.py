"""Tables that are sharded, with what updates them and what is watched while they train: what a run keeps of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_distrec._compat.fbgemm import set_fbgemm_iterations
from lightning_distrec._compat.torch import has_gradient_hooks
from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.backward_watch import BackwardWatch
from lightning_distrec.optimizers.learning_rate import LearningRates
from lightning_distrec.optimizers.loss_weight import LossWeight
from lightning_distrec.optimizers.replicas import ReplicaCheck
from lightning_distrec.optimizers.translation import TableUpdate
from lightning_distrec.sharding.lookup.sharded_lookup import ShardedLookup
from lightning_distrec.sharding.plan_report.facts import PlanFacts
from lightning_distrec.sharding.plan_report.page import write_page, write_pictures
from lightning_distrec.sharding.plan_report.pictures import can_draw, draw_plan
from lightning_distrec.sharding.planning.plan_file import PLAN_FILE, plan_text
from lightning_distrec.sharding.planning.written_plan import WrittenPlan
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.strategies.tables.unfreezing import Unfreezing


@dataclass(kw_only=True)
class TableSetup:
    """Tables that are sharded, what updates them, and what is watched while they train."""

    shards: ShardedTables
    updates: dict[str, TableUpdate]
    learning_rates: LearningRates
    loss_weight: LossWeight
    replicas: ReplicaCheck
    lookups: list[ShardedLookup] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    lr_scheduler_configs: list[Any] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    """What was put on optimizers and plugins for the time of the run."""
    written_plan: WrittenPlan | None = None
    """Where the tables are, in plain numbers; None where plans are not saved."""
    facts: PlanFacts | None = None
    """What reports tell of the plan, on rank 0 of a fit; None elsewhere."""

    def __post_init__(self) -> None:
        self._num_steps: dict[int, int] = {}
        self.backward_watch = BackwardWatch(self.fused_tables)
        self.unfreezing = Unfreezing(self.shards, self.updates)

    def write_plan(self, folder: Path, picture_files: bool) -> dict[str, bytes]:
        """Write plan.html, and if wanted its pictures as files beside it. Call it where there are `facts`.

        Returns name -> picture, as PNG; none without matplotlib, which the page says too.
        """
        facts = self.facts
        assert facts is not None
        pictures = draw_plan(facts) if can_draw() else None
        write_page(folder / "plan.html", facts, pictures)
        if picture_files and pictures:
            write_pictures(folder, pictures)
        return pictures or {}

    def release(self) -> None:
        """Take off what was put on for the time of the run."""
        while self.undo:
            self.undo.pop()()

    def plan_files(self) -> dict[str, bytes]:
        """Return name -> content of what checkpoints tell of the plan."""
        return {} if self.written_plan is None else {PLAN_FILE: plan_text(self.written_plan).encode()}

    @property
    def fused_tables(self) -> list[str]:
        """Full names of the tables that are updated inside of backward."""
        return [name for name, update in self.updates.items() if update.in_backward]

    def before_training_step(self) -> None:
        """Raise where something was changed since the start that the tables' updates do not follow."""
        self.learning_rates.check()
        self.replicas.before_step()
        self._refuse_late_hooks()
        self.unfreezing.follow(self.optimizers)
        self.loss_weight.begin_step()
        self.begin_step()

    def before_backward(self) -> None:
        """Raise OptimizerError: the backward before was not followed by a step, and updates run inside of backward."""
        self.backward_watch.backward()

    def loss_factor(self) -> float:
        """Collective where batches are weighted. Return the factor for this rank's loss; see LossWeight."""
        return self.loss_weight.factor()

    def _refuse_late_hooks(self) -> None:
        for name in self.fused_tables:
            if any(has_gradient_hooks(shard.weight, but=1) for shard in self.shards.shards[name]):
                raise OptimizerError(
                    f"a gradient hook was registered on the weight of '{name}', which has no gradient: it is updated "
                    "inside of backward. Set embedding_update='sparse' or 'dense' for it."
                )

    def after_optimizer_step(self, number: int, *_: Any) -> None:
        """The gradients of the lookups so far are used up. Called by the optimizers, of this number, themselves."""
        self.backward_watch.step()
        self._num_steps[number] = self._num_steps.get(number, 0) + 1
        for lookup in self.lookups:
            lookup.forget_gradients()

    def begin_step(self) -> None:
        """Forget what was looked up in the step before, of whatever kind."""
        for lookup in self.lookups:
            lookup.begin_step()

    def num_fused_steps(self, name: str) -> int:
        """Return how often the optimizer of a table that is updated inside of backward has stepped."""
        param_group = self.updates[name].param_group
        return 0 if param_group is None else self._num_steps.get(param_group.optimizer_index, 0)

    def set_fused_steps(self, name: str, num_steps: int) -> None:
        """Go on counting a table's steps from here."""
        param_group = self.updates[name].param_group
        assert param_group is not None
        self._num_steps[param_group.optimizer_index] = num_steps
        shards = {id(shard) for shard in self.shards.shards[name]}
        for kernel, held in self.shards.kernels:
            if any(id(shard) in shards for shard in held):
                set_fbgemm_iterations(kernel, num_steps)
