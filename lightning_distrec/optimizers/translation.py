"""Translates the user's optimizers, as configure_optimizers made them, into what updates each table.

    fused       FBGEMM updates the touched rows inside of backward; the numbers are those of the user's optimizer
    sparse      the user's own optimizer steps on the rank's shard, with a gradient of the touched rows
    dense       the user's own optimizer steps on the rank's shard, with a gradient as large as the shard
    fused_lazy  FBGEMM updates the touched rows only, where the optimizer would have moved all of them; on request
    frozen      nothing updates the table

What is fused is a whitelist by exact class and hyperparameters, each entry measured against an unsharded process
(tests/multiprocess/strategies/test_parity.py). What FBGEMM would silently ignore (momentum and weight decay of SGD,
weight decay of Adagrad) or fill with a default of its own (eps) is never left to it.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn, optim
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.param_groups import TableParamGroup, param_groups_of

Kind = Literal["fused", "sparse", "dense", "fused_lazy", "frozen"]

ELEMENTWISE: dict[type[optim.Optimizer], int] = {
    optim.SGD: 1,
    optim.Adam: 2,
    optim.AdamW: 2,
    optim.Adamax: 2,
    optim.NAdam: 2,
    optim.RAdam: 2,
    optim.Adagrad: 1,
    optim.Adadelta: 2,
    optim.RMSprop: 1,
    optim.Rprop: 2,
    optim.ASGD: 1,
}
"""Optimizers that treat every element alone, so that stepping on a shard is stepping on the table. Value: the maximum
state that they keep by default, in tensors of the table's size."""


@dataclass(frozen=True)
class TableUpdate:
    """What updates one table, and why."""

    kind: Kind
    reason: str
    param_group: TableParamGroup | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """FBGEMM's, where it updates the table; the learning rate is the one at the start."""
    initial_state: float = 0.0
    """Value that the optimizer's state starts from."""
    needs_full_rows: bool = False
    """Whether the state is kept per row, so that a table must not be sharded by columns."""
    bytes_per_element: float = 0.0
    """Optimizer state and kept gradient, in bytes for each element of the table."""
    bytes_per_row: float = 0.0
    """Optimizer state that is kept per row, in bytes."""

    @property
    def in_backward(self) -> bool:
        """Whether FBGEMM updates the table inside of backward."""
        return self.kind in ("fused", "fused_lazy")

    @property
    def state_keys(self) -> list[tuple[str, bool]]:
        """What FBGEMM keeps for the table, in its order: torch's name for it, and whether it is one number per row."""
        return _STATE_KEYS[self.arguments["optimizer"]] if self.in_backward else []

    @property
    def adds_up(self) -> bool:
        """Whether two updates, one for each of two gradients, are the update of their sum."""
        return not self.in_backward or self.arguments["optimizer"] == EmbOptimType.EXACT_SGD


_STATE_KEYS: dict[EmbOptimType, list[tuple[str, bool]]] = {
    EmbOptimType.EXACT_SGD: [],
    EmbOptimType.EXACT_ADAGRAD: [("sum", False)],
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: [("sum", True)],
    EmbOptimType.ADAM: [("exp_avg", False), ("exp_avg_sq", False)],
}


def translate(
    parameters: Mapping[str, nn.Parameter],
    modes: Mapping[str, str],
    optimizers: list[optim.Optimizer],
    device_type: str,
    not_in_backward: str,
    looked_up_often: Container[str] = (),
    earlier: Mapping[str, list[nn.Parameter]] | None = None,
) -> dict[str, TableUpdate]:
    """Return what updates each table.

    parameters: full name of a table -> its unsharded weight, (num_rows, dim), possibly on meta.
    modes: full name -> "auto", "fused", "sparse", "dense" or "fused_lazy".
    not_in_backward: why an update inside of backward would come too early, for example "gradient_clip_val=1.0", or "".
    looked_up_often: tables that a step usually looks up several times, for positive and negative items for example.
    earlier: full name -> the shards of an earlier fit, which an optimizer that outlived it still holds.
    Raises OptimizerError: the table's name, the reason and the way out.
    """
    param_groups = param_groups_of(parameters, optimizers, earlier or {})
    updates = {}
    for name, parameter in parameters.items():
        param_group = param_groups.get(id(parameter))
        if param_group is None or not parameter.requires_grad:
            updates[name] = frozen("in no optimizer" if param_group is None else "requires_grad is False", param_group)
        else:
            updates[name] = _update(name, param_group, modes[name], device_type, not_in_backward)
            if name in looked_up_often and modes[name] == "auto":
                updates[name] = _for_several_lookups(updates[name])
    return updates


def frozen(reason: str, param_group: TableParamGroup | None = None) -> TableUpdate:
    """Return the update of a table that nothing updates now; it stays in its param group, in case it is unfrozen."""
    keeps_state = param_group is not None and isinstance(
        param_group.optimizer, optim.Adagrad
    )  # from the start, one element each
    return TableUpdate("frozen", reason, param_group, bytes_per_element=4.0 if keeps_state else 0.0)


def of_table_optimizer(update: TableUpdate) -> TableUpdate:
    """Return the update of a table that table_optimizer updates, which its reason says."""
    assert update.param_group is not None
    name = type(update.param_group.optimizer).__name__
    reason = update.why if update.why.startswith(name) else f"{name}: {update.why}"
    return replace(update, reason=f"table_optimizer's {reason}")


NO_UPDATE: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.0}
"""FBGEMM's arguments for a kernel that looks up and updates nothing; it keeps neither state nor gradient."""


def exact_form(param_group: TableParamGroup) -> tuple[TableUpdate | None, str]:
    """Return FBGEMM's form of the group's update with the same numbers, or None and the reason why there is none."""
    group, kind = param_group.group, type(param_group.optimizer)
    name = kind.__name__
    if kind is optim.SGD:
        if reason := _first_set(group, momentum=0, weight_decay=0, dampening=0, nesterov=False, maximize=False):
            return None, f"FBGEMM's SGD has no {reason}"
        return _fused(param_group, f"{name} has the same numbers in FBGEMM", EmbOptimType.EXACT_SGD, {}, 0.0), ""
    if kind is optim.Adagrad:
        if reason := _first_set(group, weight_decay=0, lr_decay=0, maximize=False):
            return None, f"FBGEMM's Adagrad has no {reason}"
        start = float(param_group.optimizer.defaults["initial_accumulator_value"])
        arguments = {"eps": float(group["eps"])}
        update = _fused(
            param_group, f"{name} has the same numbers in FBGEMM", EmbOptimType.EXACT_ADAGRAD, arguments, 4.0
        )
        return replace(update, initial_state=start), ""
    if kind is RowWiseAdagrad:
        if reason := _first_set(group, weight_decay=0, lr_decay=0, maximize=False):
            return None, f"FBGEMM's row-wise Adagrad has no {reason}"
        start = float(param_group.optimizer.defaults["initial_accumulator_value"])
        arguments = {"eps": float(group["eps"])}
        why = f"{name} has the same numbers in FBGEMM"
        update = _fused(param_group, why, EmbOptimType.EXACT_ROWWISE_ADAGRAD, arguments, 0.0)
        return replace(update, initial_state=start, needs_full_rows=True, bytes_per_row=4.0), ""
    return None, f"{name} moves rows that no id touched" if kind in ELEMENTWISE else f"{name} is not known"


def sparse_form(param_group: TableParamGroup) -> tuple[TableUpdate | None, str]:
    """Return the group's update by gradients of touched rows, where it has the same numbers, or None and why not."""
    kind, name = type(param_group.optimizer), type(param_group.optimizer).__name__
    if kind is optim.SparseAdam:
        return TableUpdate("sparse", f"{name} takes sparse gradients", param_group, bytes_per_element=8.0), ""
    exact, obstacle = exact_form(param_group)
    if exact is None:
        return None, obstacle
    if kind is RowWiseAdagrad:
        return None, f"{name} takes no sparse gradients"
    if param_group.group.get("fused") or param_group.group.get("differentiable"):
        return None, f"{name}(fused=True) takes no sparse gradients"
    return TableUpdate("sparse", "", param_group, bytes_per_element=exact.bytes_per_element), ""


def _update(name: str, param_group: TableParamGroup, mode: str, device_type: str, not_in_backward: str) -> TableUpdate:
    fused, fused_obstacle = exact_form(param_group)
    if mode == "fused":
        if fused is None:
            raise OptimizerError(
                f"table '{name}': embedding_update='fused', but {fused_obstacle}. Set embedding_update='dense' for it "
                "(the user's optimizer on local shards), or choose SGD without momentum, Adagrad or RowWiseAdagrad for "
                "it."
            )
        return fused
    if mode == "fused_lazy":
        return _lazy(name, param_group, device_type)
    if mode == "dense":
        return _dense(name, param_group, "asked for", on_request=True)
    sparse, sparse_obstacle = sparse_form(param_group)
    if mode == "sparse":
        if sparse is None:
            raise OptimizerError(
                f"table '{name}': embedding_update='sparse', but {sparse_obstacle}. Set embedding_update='dense' for "
                "it, or choose SGD without momentum, Adagrad or SparseAdam for it."
            )
        return replace(sparse, reason="asked for")
    if fused is not None and not not_in_backward:
        return fused
    if sparse is not None:
        return replace(sparse, reason=not_in_backward or sparse.why)
    reason = f"{not_in_backward}; {sparse_obstacle}" if fused is not None else fused_obstacle
    return _dense(name, param_group, reason, on_request=False)


def _for_several_lookups(update: TableUpdate) -> TableUpdate:
    """Return an update that sums the gradients of several lookups first, where FBGEMM's update of each is not that."""
    if update.adds_up or update.param_group is None:
        return update
    sparse, _ = sparse_form(update.param_group)
    return update if sparse is None else replace(sparse, reason="a step may look it up more than once")


def _dense(name: str, param_group: TableParamGroup, reason: str, on_request: bool) -> TableUpdate:
    kind = type(param_group.optimizer)
    if kind is RowWiseAdagrad:
        return TableUpdate("dense", reason, param_group, needs_full_rows=True, bytes_per_element=4.0, bytes_per_row=4.0)
    if kind in ELEMENTWISE:
        return TableUpdate("dense", reason, param_group, bytes_per_element=4.0 * (1 + _states(param_group)))
    if kind is optim.SparseAdam:
        raise OptimizerError(f"table '{name}': SparseAdam needs sparse gradients. Set embedding_update='sparse'.")
    if on_request:
        return TableUpdate("dense", f"{reason}; not known to be exact", param_group, bytes_per_element=12.0)
    raise OptimizerError(
        f"table '{name}': {kind.__module__}.{kind.__qualname__} is not known to give the same numbers on a part of a "
        "table as on the whole. Give the table an optimizer of its own (torch.optim.Adagrad, Adam, SGD ...), or set "
        "embedding_update='dense' for it if the optimizer treats every element alone."
    )


def _states(param_group: TableParamGroup) -> int:
    group = param_group.group
    if type(param_group.optimizer) is optim.SGD and not group["momentum"]:
        return 0
    extra = ("amsgrad", "centered")
    return ELEMENTWISE[type(param_group.optimizer)] + sum(bool(group.get(flag)) for flag in extra)


def _lazy(name: str, param_group: TableParamGroup, device_type: str) -> TableUpdate:
    group, kind = param_group.group, type(param_group.optimizer)
    if kind not in (optim.Adam, optim.AdamW):
        raise OptimizerError(
            f"table '{name}': embedding_update='fused_lazy' is for Adam and AdamW, not {kind.__name__}. "
            "Use 'auto', which is exact."
        )
    if device_type == "cpu":
        raise OptimizerError(
            f"table '{name}': embedding_update='fused_lazy', but FBGEMM has no {kind.__name__} on CPU. Use 'dense'."
        )
    decoupled = kind is optim.AdamW or bool(group.get("decoupled_weight_decay"))
    coupled_decay = group["weight_decay"] and not decoupled
    reason = _first_set(group, amsgrad=False, maximize=False) or ("L2 weight_decay" if coupled_decay else "")
    if reason:
        raise OptimizerError(f"table '{name}': FBGEMM's Adam has no {reason}. Use embedding_update='dense'.")
    arguments = {
        "eps": float(group["eps"]),
        "beta1": float(group["betas"][0]),
        "beta2": float(group["betas"][1]),
        "weight_decay": float(group["weight_decay"]),
    }
    update = _fused(
        param_group, "touched rows only, as asked for; not the same numbers", EmbOptimType.ADAM, arguments, 8.0
    )
    return replace(update, kind="fused_lazy")


def _fused(
    param_group: TableParamGroup, reason: str, kind: EmbOptimType, arguments: dict[str, Any], state: float
) -> TableUpdate:
    learning_rate = float(param_group.group["lr"])
    full = {"optimizer": kind, "learning_rate": learning_rate, **arguments}
    return TableUpdate("fused", reason, param_group, full, bytes_per_element=state)


def _first_set(group: Mapping[str, Any], **neutral: Any) -> str:
    """Return the first hyperparameter that is not neutral, as "name=value", or ""."""
    for name, value in neutral.items():
        if name in group and group[name] != value:
            return f"{name}={group[name]}"
    return ""
