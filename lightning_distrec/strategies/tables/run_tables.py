"""The sharded tables of a run, their plan, what updates them, and the checks before and after every
step."""

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_distrec._compat.fbgemm import set_fbgemm_iterations
from lightning_distrec._compat.torch import (
    have_gradient_hooks,
    in_backward_optimizers,
    register_first_step_post_hook,
)
from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.step_hooks import (
    AddedTables,
    before_zero_grad,
    collect_parameters,
    register_update_pre_hook,
    step_with,
    zero_with,
)
from lightning_distrec.optimizers.torchrec_optimizers import InBackwardSteps, members_of
from lightning_distrec.optimizers.translation import LearningRates, TableUpdate
from lightning_distrec.optimizers.updates_in_backward import (
    BackwardWatch,
    CollectionWatch,
    ManualWatch,
)
from lightning_distrec.ranks import Ranks
from lightning_distrec.sharding.lookup.sharded_lookup import ShardedLookup
from lightning_distrec.sharding.planning.plan_file import PLAN_FILE, plan_text
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.sharded_tables import ShardedTables
from lightning_distrec.sharding.weights.shard_access import (
    plain_shards,
    without_guard,
    without_guards,
)
from lightning_distrec.sharding.weights.shard_weight import is_elementwise_optimizer
from lightning_distrec.strategies.data_parallel.losses import LossWeight
from lightning_distrec.strategies.tables.replicas import AveragedRows, ExchangedGradients, Replicas
from lightning_distrec.strategies.tables.update_changes import SummedLookups, Unfreezing


@dataclass(kw_only=True)
class RunTables:
    """The sharded tables of a run, their plan, and what updates them."""

    shards: ShardedTables
    plan: ShardingPlan
    """Where the tables are; in a fit with its cost."""
    updates: dict[str, TableUpdate]
    learning_rates: LearningRates
    loss_weight: LossWeight
    groups: Replicas = field(default_factory=Replicas)
    """Keeps the replicas of the tables equal in a fit, where groups of ranks have one each."""
    automatic: bool = True
    """Whether Lightning calls backward and step; else the module does."""
    lookups: list[ShardedLookup] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    """Those of configure_optimizers."""
    table_optimizers: list[Optimizer] = field(default_factory=list)
    """Those of tables alone, by table_optimizer, which step together with the one above."""
    in_backward: InBackwardSteps | None = None
    """Those of tables alone, by apply_optimizer_in_backward, which step in every backward."""
    all_optimizers: list[Optimizer] = field(default_factory=list)
    """Those of configure_optimizers, or their members, and those of tables alone."""
    lr_scheduler_configs: list[Any] = field(default_factory=list)
    undo: ExitStack = field(default_factory=ExitStack)
    """Removes what was registered on optimizers and plugins for the run."""

    def __post_init__(self) -> None:
        self._num_steps: dict[int, int] = {}
        self.user_step = self.shards.state
        # Flat, for a check at each step: a walk through the tables would cost host time with every
        # further table.
        self._fused_shards = self._find_fused_shards()
        # Also where an evaluation, or code after the run, looks up what an earlier fit has trained.
        self.backward_watch = BackwardWatch(self.shards.fused_tables)
        self._manual_watch: ManualWatch | None = None
        self.unfreezing = Unfreezing(self.shards, self.updates)
        self._added_tables = AddedTables({})
        self._has_begun = False
        self._summed_lookups = SummedLookups(
            self.shards, self.updates, self.num_fused_steps, self._leave_backward
        )

    def _leave_backward(self, name: str) -> None:
        """A fused table is updated by the user's optimizer from now on."""
        if name in self.shards.fused_tables:
            self.shards.fused_tables.remove(name)
        if self.in_backward is not None:
            self.in_backward.step_shards(name, self.shards.parameters()[name])
        self.learning_rates.follow_updates()
        self._fused_shards = self._find_fused_shards()

    def _find_fused_shards(self) -> list[nn.Parameter]:
        return [shard.weight for name in self.fused_tables for shard in self.shards.shards[name]]

    @property
    def own_optimizers(self) -> list[Optimizer]:
        """Those of tables alone, as checkpoints hold them."""
        return [*self.table_optimizers, *self.in_backward_tables.values()]

    @property
    def in_backward_tables(self) -> Mapping[str, Optimizer]:
        """Full name of a table -> its optimizer by apply_optimizer_in_backward."""
        return {} if self.in_backward is None else self.in_backward.optimizers

    def connect(
        self,
        optimizers: list[Optimizer],
        table_optimizers: list[Optimizer],
        in_backward: Mapping[str, Optimizer],
    ) -> None:
        """Let the tables' own optimizers step with the user's one, or in backward, and all of them
        report their steps.

        in_backward: full name of a table -> its optimizer by apply_optimizer_in_backward.
        """
        self.optimizers = optimizers
        self.table_optimizers = table_optimizers
        if in_backward:
            self.in_backward = InBackwardSteps(in_backward, self.shards.parameters(), self.updates)
        members = members_of(optimizers)
        self.all_optimizers = [*members, *self.own_optimizers]
        if table_optimizers:
            # They step with the user's first one, whose steps Lightning's loop counts.
            self.undo.callback(step_with(optimizers[0], table_optimizers))
            held = set(map(id, collect_parameters(table_optimizers)))
            added: dict[int, str] = {}
            for name, weights in self.shards.parameters().items():
                added |= {id(weight): name for weight in weights if id(weight) in held}
            self._added_tables = AddedTables(added)
        for number, optimizer in enumerate([*members, *table_optimizers]):
            stepped = partial(self.after_optimizer_step, number)
            self.undo.callback(optimizer.register_step_post_hook(stepped).remove)
            if is_elementwise_optimizer(optimizer):
                # Hooks around its update are the user's code, and see guarded weights.
                begin = register_update_pre_hook(
                    optimizer, lambda: plain_shards.enter_context(without_guard())
                )
                end = register_first_step_post_hook(optimizer, lambda *_: plain_shards.close())
                for undo in (begin.remove, end.remove, plain_shards.close):
                    self.undo.callback(undo)

        fused = self.shards.fused_tables
        updated = {name: self.updates[name].param_group for name in fused}
        groups = {name: group for name, group in updated.items() if group is not None}
        # Under automatic optimization Lightning's order of backward and step is known; by hand any
        # order may come.
        if groups and not self.automatic:
            watch_after_run = self.backward_watch
            self.backward_watch = BackwardWatch([])
            self._manual_watch = ManualWatch(groups)
            for lookup in self.lookups_of(fused):
                tables = []
                for t in self.shards.tables_of(lookup.path):
                    if t.full_name in fused:
                        tables.append(t.full_name)
                lookup.update_watch = CollectionWatch(
                    self._manual_watch, tables, self.shards.learns
                )
                self.undo.callback(setattr, lookup, "update_watch", watch_after_run)
        if self.shards.groups.num_replicas == 1:
            self._summed_lookups.begin(self.lookups)
            self.undo.callback(self._summed_lookups.end_first_step)

    def lookups_of(self, names: Container[str]) -> list[ShardedLookup]:
        """Return the lookups of collections with some of these tables."""
        lookups = []
        for lookup in self.lookups:
            if any(table.full_name in names for table in lookup.setup.tables):
                lookups.append(lookup)
        return lookups

    def connect_replicas(self, ranks: Ranks) -> None:
        """Keep the replicas of the tables equal, where groups of ranks have one each."""
        groups = self.shards.groups
        if groups.exchanges_gradients:
            self.groups = ExchangedGradients(self.shards)
        elif groups.num_replicas > 1:
            self.groups = AveragedRows(
                self.shards, self.updates, lambda: self.all_optimizers, ranks
            )
            self.undo.callback(self.groups.release)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside of the context, gradients stay on their rank, and a later backward exchanges their
        sum."""
        return self.groups.no_sync()

    def synchronize(self) -> None:
        """Collective where replicas differ. Make them equal."""
        self.shards.synchronize()

    def connect_zero_grad(self, optimizers: list[Any], wrappers: list[Any]) -> None:
        """Let the tables' own optimizers forget gradients when the user's one does, and report it
        where it matters.

        optimizers: the user's. wrappers: Lightning's around them, whose zero_grad is another.
        """
        for optimizer in [*optimizers, *wrappers, *self.table_optimizers]:
            optimizer.zero_grad = self._zero_grad(optimizer)  # type: ignore[method-assign]
            self.undo.callback(optimizer.__dict__.pop, "zero_grad", None)
        watch = self._manual_watch
        if watch is not None:
            wrapper_of = dict(zip(map(id, optimizers), wrappers, strict=True))
            for number, optimizer in enumerate(self.all_optimizers):
                report = partial(watch.zero_grad, number)
                self.undo.callback(before_zero_grad(optimizer, report))
                if id(optimizer) in wrapper_of:  # else one that a CombinedOptimizer calls
                    self.undo.callback(before_zero_grad(wrapper_of[id(optimizer)], report))
        if self.table_optimizers:
            for optimizer in [*optimizers, *wrappers]:
                self.undo.callback(zero_with(optimizer, self.table_optimizers))

    def _zero_grad(self, optimizer: Optimizer) -> Callable[..., None]:
        # It reads the gradient of each weight, which takes the guard of a shard two microseconds.
        zero_grad = without_guards(optimizer.zero_grad)
        state = self.shards.state

        def forgetting(*args: Any, **options: Any) -> None:
            if state.reached:
                held = set(map(id, collect_parameters([optimizer])))
                state.reached -= {
                    n for n in state.reached if id(self.shards.shards[n][0].weight) in held
                }
            zero_grad(*args, **options)

        return forgetting

    def check_steps(self) -> None:
        """Raise OptimizerError: a training_step, or the fit, ended with updates inside of backward
        and no step."""
        if self._manual_watch is not None:
            self._manual_watch.end_training_step()

    def plan_files(self) -> dict[str, bytes]:
        """Return name -> content of the plan's file in checkpoints."""
        return {PLAN_FILE: plan_text(self.plan).encode()}

    @property
    def fused_tables(self) -> list[str]:
        """Full names of the tables that are updated inside of backward."""
        return [name for name, update in self.updates.items() if update.in_backward]

    @without_guards
    def before_training_step(self) -> None:
        """Raise where something has changed since the start that the tables' updates do not
        follow."""
        self.groups.before_training_step()
        self.check_steps()
        self.learning_rates.check()
        if self.in_backward is not None:
            self.in_backward.check()
        self._refuse_late_hooks()
        if not self._has_begun:
            self._refuse_late_changes()
        if self.table_optimizers:
            self._added_tables.refuse(self.optimizers)
        self.unfreezing.follow(self.all_optimizers)
        self.loss_weight.begin_step()
        self.begin_step()

    def num_lookups(self) -> int:
        """Return how many lookups this step has made so far."""
        return sum(lookup.num_lookups for lookup in self.lookups)

    def looked_up(self) -> list[list[Tensor]]:
        """Return the rows of each lookup of this step that learns; waits for those that no code has
        accessed."""
        return [rows for lookup in self.lookups for rows in lookup.learning_rows()]

    def before_backward(self) -> None:
        """Raise OptimizerError: the backward before was not followed by a step, and updates run
        inside of backward."""
        self.backward_watch.backward()

    def after_backward(self) -> None:
        """Collective where replicas differ. Exchange gradients, and step the optimizers that step
        in every backward."""
        self.backward_watch.end_backward()
        # After DDP has averaged the dense gradients, so that groups exchange in the same order on
        # every rank.
        self.groups.after_backward()
        if self.in_backward is not None:
            with without_guard():
                self.in_backward.after_backward()
            self._note_update()

    def loss_factor(self) -> float:
        """Collective where batches are weighted. Return the factor for this rank's loss; see
        LossWeight."""
        return self.loss_weight.factor()

    def _refuse_late_hooks(self) -> None:
        if not have_gradient_hooks(self._fused_shards, but=1):
            return
        for name in self.fused_tables:
            if have_gradient_hooks([shard.weight for shard in self.shards.shards[name]], but=1):
                raise OptimizerError(
                    f"a gradient hook was registered on the weight of '{name}', which has no "
                    "gradient: it is updated inside of backward. Set embedding_update='sparse' or "
                    "'dense' for it."
                )

    def _refuse_late_changes(self) -> None:
        self._has_begun = True
        self.shards.refuse_replaced()
        for name, shards in self.shards.parameters().items():
            if name not in self.in_backward_tables and any(map(in_backward_optimizers, shards)):
                raise OptimizerError(
                    f"apply_optimizer_in_backward gave table '{name}' an optimizer after it was "
                    "sharded (in on_fit_start or later), which would step with a part of its "
                    "gradient. Call it in __init__, setup, configure_model or configure_optimizers."
                )

    def after_optimizer_step(self, number: int, *_: Any) -> None:
        """Drop the gradients of the lookups so far. The optimizer with this number calls it after
        its step."""
        self.backward_watch.step()
        if self._manual_watch is not None:
            self._manual_watch.step(number)
        self._num_steps[number] = self._num_steps.get(number, 0) + 1
        self._note_update()

    def _note_update(self) -> None:
        # Gathered weights are of before the update.
        self.shards.state.num_changes += 1
        if self._summed_lookups.followed:
            self._summed_lookups.end_first_step()
        self.groups.after_optimizer_step()
        for lookup in self.lookups:
            lookup.forget_gradients()

    def begin_step(self) -> None:
        """Drop what the step before has looked up."""
        self.shards.state.num_changes += 1
        for lookup in self.lookups:
            lookup.begin_step()

    def num_fused_steps(self, name: str) -> int:
        """Return how many steps the optimizer of a fused table has made."""
        if self.in_backward is not None and name in self.in_backward_tables:
            return self.in_backward.num_backwards
        param_group = self.updates[name].param_group
        return 0 if param_group is None else self._num_steps.get(param_group.optimizer_index, 0)

    def set_fused_steps(self, name: str, num_steps: int) -> None:
        """Set the number of steps of a fused table's optimizer; a table without one has none to
        count."""
        param_group = self.updates[name].param_group
        if param_group is None:
            return
        if self.in_backward is not None and name in self.in_backward_tables:
            self.in_backward.num_backwards = num_steps
        self._num_steps[param_group.optimizer_index] = num_steps
        shards = set(map(id, self.shards.shards[name]))
        for kernel, held in self.shards.kernels:
            # A kernel has one counter for all of its tables, so tables of one kernel are of one
            # optimizer.
            if any(id(shard) in shards for shard in held):
                set_fbgemm_iterations(kernel, num_steps)
