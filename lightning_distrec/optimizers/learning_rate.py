"""Passes learning rates from the param groups, where schedulers write them, to the fused updates.

FBGEMM takes the rate at forward, for the update inside of the backward that follows. torchrec pushes it in `zero_grad`
and `step` (torchrec/distributed/batched_embedding_kernel.py), which under Lightning's closure is one step late.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.param_groups import TableParamGroup
from lightning_distrec.optimizers.translation import TableUpdate, exact_form, sparse_form


class LearningRates:
    """Keeps fused updates at the learning rates of their param groups."""

    def __init__(self, updates: Mapping[str, TableUpdate]) -> None:
        self._groups = {
            u.param_group.label: (name, u.param_group, u)
            for name, u in updates.items()
            if u.param_group and u.kind == "fused"
        }
        self._sparse = {
            u.param_group.label: (name, u.param_group)
            for name, u in updates.items()
            if u.param_group and u.kind == "sparse"
        }
        self._links: dict[int, tuple[TableParamGroup, Any]] = {}
        self._pushed: dict[int, float] = {}
        self._updates = updates

    def connect(self, fused_optimizers: Mapping[str, Any]) -> list[int]:
        """Link fused tables' kernels to their param groups; returns a handle for each kernel, for `push`.

        fused_optimizers: full name of a table -> torchrec's optimizer of the kernel that holds its shard.
        """
        handles = []
        for name, optimizer in fused_optimizers.items():
            param_group = self._updates[name].param_group
            in_backward = self._updates[name].in_backward  # other kernels update nothing: their rate is 0
            if param_group is not None and in_backward and id(optimizer) not in handles:
                self._links[id(optimizer)] = (param_group, optimizer)
                handles.append(id(optimizer))
        return handles

    def push(self, handles: Iterable[int]) -> None:
        """Give the kernels the current rates of their param groups."""
        for handle in handles:
            param_group, optimizer = self._links[handle]
            rate = float(param_group.group["lr"])
            if rate != self._pushed.get(handle):
                optimizer.param_groups[0]["lr"] = rate
                # torchrec's fused optimizer only passes the rate to the kernel here; it updates nothing.
                optimizer.step()
                self._pushed[handle] = rate

    def check(self) -> None:
        """Raise OptimizerError where another hyperparameter was changed since the start: it would have no effect.

        Every rank checks every group, whether it holds the tables or not, so that all ranks raise alike.
        """
        for name, param_group, update in self._groups.values():
            _check_unchanged(name, param_group, update)
        for name, param_group in self._sparse.values():
            form, obstacle = sparse_form(param_group)
            if form is None:
                raise OptimizerError(
                    f"table '{name}': a hyperparameter of its param group was changed while training ({obstacle}), "
                    "which gradients of touched rows do not follow. Set embedding_update='dense' for it."
                )


def _check_unchanged(name: str, param_group: TableParamGroup, update: TableUpdate) -> None:
    current, obstacle = exact_form(param_group)
    changed = obstacle if current is None else _difference(current.arguments, update.arguments)
    if changed:
        raise OptimizerError(
            f"table '{name}': a hyperparameter of its param group was changed while training ({changed}), which its "
            "fused update does not follow. Set embedding_update='dense' for it."
        )


def _difference(current: Mapping[str, Any], initial: Mapping[str, Any]) -> str:
    names: Iterable[str] = (n for n in initial if n != "learning_rate" and current.get(n) != initial[n])
    return ", ".join(f"{n}={current.get(n)} was {initial[n]}" for n in names)
