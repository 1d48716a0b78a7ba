"""Schedulers and callbacks write learning rates into param groups; here they reach the fused updates.

FBGEMM takes the rate at forward, for the update inside of the backward that follows. torchrec pushes it in `zero_grad`
and `step` (torchrec/distributed/batched_embedding_kernel.py), which under Lightning's closure is one step late.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.translation import Owner, TableUpdate, exact_form


class LearningRates:
    """Keeps the fused updates at the learning rates of their param groups."""

    def __init__(self) -> None:
        self._links: list[tuple[Owner, Any, str, TableUpdate]] = []
        self._pushed: list[float | None] = []

    def connect(self, updates: Mapping[str, TableUpdate], fused_optimizers: Mapping[str, Any]) -> None:
        """Link every fused table's kernel to its param group.

        fused_optimizers: full name of a table -> torchrec's optimizer of the kernel that holds it on this rank.
        """
        self._links, self._pushed, seen = [], [], set()
        for name, optimizer in fused_optimizers.items():
            update = updates[name]
            if update.owner is not None and id(optimizer) not in seen:
                seen.add(id(optimizer))
                self._links.append((update.owner, optimizer, name, update))
                self._pushed.append(None)

    def push(self) -> None:
        """Give every kernel the rate that its group has now.

        Raises OptimizerError: another hyperparameter of the group was changed since the start, which a fused update
        would not follow.
        """
        for i, (owner, optimizer, name, update) in enumerate(self._links):
            rate = float(owner.group["lr"])
            if rate != self._pushed[i]:
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()  # passes the rate to the kernel, updates nothing
                self._pushed[i] = rate
            if update.kind == "fused":
                _check_unchanged(name, owner, update)


def _check_unchanged(name: str, owner: Owner, update: TableUpdate) -> None:
    now, why_not = exact_form(owner)
    changed = why_not if now is None else _difference(now.arguments, update.arguments)
    if changed:
        raise OptimizerError(
            f"table '{name}': a hyperparameter of its param group was changed while training ({changed}), which its "
            "fused update does not follow. Set embedding_update='dense' for it."
        )


def _difference(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    names: Iterable[str] = (n for n in then if n != "learning_rate" and now.get(n) != then[n])
    return ", ".join(f"{n}={now.get(n)} was {then[n]}" for n in names)
