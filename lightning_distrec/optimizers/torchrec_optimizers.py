"""TorchRec's own optimizer classes and idioms: followed as they are, or refused by name.

`apply_optimizer_in_backward`: in one process such an optimizer steps in every backward that reaches
its parameter, whose gradient is dropped then: accumulation, clipping and manual optimization pass
it by, and another optimizer over the parameter finds no gradient. The hook is on the unsharded
weight, which nothing looks up once the table is sharded. So the optimizer becomes the table's own:
FBGEMM makes its update where that has the same numbers, or it steps on the shards after each
backward.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from lightning_distrec._compat.lightning import skip_order_check
from lightning_distrec._compat.torch import in_backward_optimizers, mark_in_backward
from lightning_distrec._compat.torchrec_modules import wrapped_optimizer
from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.param_groups import Shards, Weights, remove_from_groups
from lightning_distrec.optimizers.translation import TableUpdate

MARKERS = {
    "SGD": "torch.optim.SGD",
    "Adagrad": "torch.optim.Adagrad",
    "Adam": "torch.optim.Adam, which is exact; on a GPU embedding_update='fused_lazy' has "
    "FBGEMM's, of touched rows",
}
"""Classes of torchrec.optim that only name a kernel of FBGEMM -> what has its numbers in one
process too."""
NO_EXACT_FORM = (
    "RowWiseAdagrad, torch.optim.Adagrad or torch.optim.Adam; its kernel has no form in one process"
)
INSTEAD = {
    WarmupOptimizer: "return the optimizer inside of it with a torch.optim.lr_scheduler "
    "(LinearLR, LambdaLR, SequentialLR) at interval 'step'",
    GradientClippingOptimizer: "return the optimizer inside of it, and set gradient_clip_val and "
    "gradient_clip_algorithm in the Trainer",
}
"""Wrappers that do something else inside of `step` -> what Lightning has for it."""


def see_through(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers with torch's own in the place of each KeyedOptimizerWrapper, whose
    param groups it shares.

    A CombinedOptimizer of one is that one; of several it stays, and `members_of` returns those.
    Raises OptimizerError: a wrapper or a class that cannot be followed, with what to use instead.
    """
    return list(map(_see_through, optimizers))


def _see_through(optimizer: Optimizer) -> Optimizer:
    for member in [optimizer, *members_of([optimizer])]:
        for kind, way_out in INSTEAD.items():
            if isinstance(member, kind):
                raise OptimizerError(
                    f"configure_optimizers returned {kind.__name__}, which changes rates or "
                    "gradients inside of `step`, where the tables' updates do not follow it. "
                    f"Instead {way_out}."
                )
    members = members_of([optimizer])
    if len(members) > 1 or members[0] is optimizer:
        return optimizer
    # A wrapper's `step` calls the other's, and is not called any more: torch's schedulers would
    # warn of their order.
    skip_order_check(optimizer)
    return members[0]


def members_of(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return torch's optimizers in the place of TorchRec's KeyedOptimizerWrapper and
    CombinedOptimizer."""
    members: list[Optimizer] = []
    for optimizer in optimizers:
        if isinstance(optimizer, CombinedOptimizer):
            members += members_of(member for _, member in optimizer.optimizers)
        elif isinstance(optimizer, KeyedOptimizerWrapper):
            members += members_of([wrapped_optimizer(optimizer)])
        else:
            members.append(optimizer)
    return members


def refuse_markers(configured: Any) -> None:
    """Raise OptimizerError where configure_optimizers has returned a marker, also in dicts and
    lists."""
    if isinstance(configured, (list, tuple, dict)):
        for part in configured.values() if isinstance(configured, dict) else configured:
            refuse_markers(part)
    refuse_marker(configured, "configure_optimizers")


def refuse_marker(optimizer: Any, source: str) -> None:
    """Raise OptimizerError where an optimizer only names a kernel of FBGEMM, and cannot step.
    source: who made it."""
    kind = type(optimizer)
    if kind.__module__ == "torchrec.optim.optimizers":
        raise OptimizerError(
            f"torchrec.optim.{kind.__name__} (by {source}) only names a kernel of FBGEMM, and no "
            "process can step it. In configure_optimizers, or for tables alone by table_optimizer, "
            f"use {MARKERS.get(kind.__name__, NO_EXACT_FORM)}."
        )


ANNOUNCED = "apply_optimizer_in_backward's "
"""Begins the reason of a table's update in the start table."""


def take_in_backward(
    parameters: Weights,
    table_optimizers: Mapping[str, Any],
    optimizers: list[Optimizer],
    earlier: Shards,
) -> dict[str, Optimizer]:
    """Return full name of a table -> the optimizer that steps it in backward; the tables leave the
    user's others.

    parameters: full name -> unsharded weight. table_optimizers: tables whose optimizer the
    strategy's options set.
    earlier: see `find_param_groups`. Raises OptimizerError: a table has two, or also one of the
    strategy's options.
    """
    applied: dict[str, Optimizer] = {}
    for name, parameter in parameters.items():
        attached = in_backward_optimizers(parameter)
        if not attached:
            continue
        refuse_marker(attached[0], f"apply_optimizer_in_backward of table '{name}'")
        if attached[1:]:
            raise OptimizerError(
                f"table '{name}' has {len(attached)} optimizers by apply_optimizer_in_backward, "
                "which all step in every backward. Apply one. Where a second fit applies it again, "
                "make a new module for that fit."
            )
        if name in table_optimizers:
            raise OptimizerError(
                f"table '{name}' has {type(attached[0]).__name__} by apply_optimizer_in_backward, "
                "and an optimizer by table_optimizer. Remove one of them."
            )
        _hold(attached[0], parameter, earlier.get(name, []))
        applied[name] = attached[0]
    # Its gradient is gone when they step, so that they do nothing for it in one process.
    remove_from_groups(optimizers, {name: parameters[name] for name in applied}, earlier)
    return applied


def _hold(optimizer: Optimizer, parameter: nn.Parameter, shards: list[nn.Parameter]) -> None:
    """Let the optimizer hold the table's weight as it is now; an evaluation may have put another in
    its place."""
    group = optimizer.param_groups[0]
    if not set(map(id, group["params"])) & set(map(id, [parameter, *shards])):
        for replaced in group["params"]:
            if replaced in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(replaced)
        group["params"] = [parameter]


def share_kernels(updates: Mapping[str, TableUpdate]) -> dict[str, TableUpdate]:
    """Return the updates with one label for all with equal settings, so that one kernel serves
    their tables.

    updates: of tables with an in-backward optimizer each; those of other kinds than fused stay as
    they are.
    """
    leaders: list[tuple[str, Any, str]] = []
    shared = dict(updates)
    for name, update in updates.items():
        group = update.param_group
        if not update.in_backward or group is None:
            continue
        # The state is filled by table, so that its start may differ; what the kernel is called with
        # may not.
        for kind, arguments, label in leaders:
            if (kind, arguments) == (update.kind, update.arguments):
                group = replace(group, shared_label=label)
                break
        else:
            leaders.append((update.kind, update.arguments, group.label))
        shared[name] = replace(update, param_group=group)
    return shared


class InBackwardSteps:
    """The tables' in-backward optimizers in a fit.

    optimizers: full name of a table -> its optimizer, which holds the shards now. shards: full name
    -> this rank's.
    updates: full name -> what updates it.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        shards: Shards,
        updates: Mapping[str, TableUpdate],
    ) -> None:
        self.optimizers = dict(optimizers)
        self.num_backwards = 0
        """How many backward passes have updated the tables: the steps of all of these
        optimizers."""
        self._stepping = [
            (shards[name], o) for name, o in optimizers.items() if not updates[name].in_backward
        ]
        self._memory_of_others: set[Any] = set()
        for name, parts in shards.items():
            if name not in optimizers:
                self._memory_of_others.update(map(_shared_memory, parts))
        self._memory_of_others.discard(None)
        self._copies: list[tuple[str, Optimizer, Optimizer]] = []
        """A table, an optimizer whose settings the user may change, and the one that it must be
        equal to."""
        leaders: dict[str, Optimizer] = {}
        for name, optimizer in optimizers.items():
            self._mark(name, optimizer, shards[name])
            group = updates[name].param_group
            leader = leaders.setdefault(group.label, optimizer) if group is not None else optimizer
            if leader is not optimizer:
                self._copies.append((name, optimizer, leader))

    def _mark(self, name: str, optimizer: Optimizer, shards: list[nn.Parameter]) -> None:
        """Let the shards have the attribute by which the user's code finds the optimizer, to change
        its rate."""
        mark_in_backward(shards[0], optimizer)
        for shard in shards[1:]:
            # One of its own: a loop over parameters that scales each rate would scale that of a
            # shared one twice.
            twin = copy.copy(optimizer)
            twin.param_groups = [dict(optimizer.param_groups[0])]
            # What a checkpoint sets there is its as well.
            optimizer.register_load_state_dict_post_hook(partial(_set_settings, twin))
            mark_in_backward(shard, twin)
            self._copies.append((name, twin, optimizer))

    def step_shards(self, name: str, shards: list[nn.Parameter]) -> None:
        """Step a table's optimizer on its shards, which FBGEMM has updated so far."""
        if name in self.optimizers:
            self._stepping.append((shards, self.optimizers[name]))

    def check(self) -> None:
        """Raise OptimizerError: equal optimizers have got other settings, or a backward was not
        seen."""
        for name, twin, optimizer in self._copies:
            if _settings(twin) != _settings(optimizer):
                raise OptimizerError(
                    f"table '{name}': the settings of its in-backward optimizer were changed while "
                    "training, and not those of all tables that began with the same. One kernel "
                    "serves them: change all alike, or begin with other settings."
                )
        for shards, optimizer in self._stepping:
            if any(shard.grad is not None and not self._shares_gradient(shard) for shard in shards):
                raise OptimizerError(
                    f"{type(optimizer).__name__} by apply_optimizer_in_backward has missed a "
                    "backward: it steps after each that Lightning runs. Call "
                    "self.manual_backward(loss), not loss.backward()."
                )

    def after_backward(self) -> None:
        """Step the optimizers whose tables have a gradient now, and drop it."""
        self.num_backwards += 1
        reached = []
        for shards, optimizer in self._stepping:
            if any(shard.grad is not None for shard in shards):
                reached.append((shards, optimizer))
        for _, optimizer in reached:
            optimizer.step()
        # Only now: data_parallel tables of one kernel are slices of one tensor, whose gradient is
        # dropped as a whole.
        for shards, optimizer in reached:
            optimizer.zero_grad(set_to_none=not any(map(self._shares_gradient, shards)))

    def _shares_gradient(self, shard: nn.Parameter) -> bool:
        """Whether its gradient is a part of one that other optimizers still need."""
        return _shared_memory(shard) in self._memory_of_others


def _shared_memory(shard: nn.Parameter) -> int | None:
    """Return what is the same for data_parallel tables of one kernel; None: the shard has a
    gradient of its own."""
    if not isinstance(shard, TableBatchedEmbeddingSlice):
        return None
    return shard.untyped_storage().data_ptr()


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    return {**optimizer.param_groups[0], "params": None}


def _set_settings(optimizer: Optimizer, source: Optimizer) -> None:
    group = optimizer.param_groups[0]
    group |= source.param_groups[0] | {"params": group["params"]}
