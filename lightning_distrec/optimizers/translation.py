"""Translates the user's optimizers, as configure_optimizers made them, into what updates each
table, and keeps it so.

- fused: FBGEMM updates the touched rows inside of backward; the numbers are those of the user's
  optimizer.
- sparse: the user's own optimizer steps on the rank's shard, with a gradient of the touched rows.
- dense: the user's own optimizer steps on the rank's shard, with a gradient as large as the shard.
- fused_lazy: FBGEMM updates the touched rows only, where the optimizer would have moved all of
  them; on request.
- frozen: nothing updates the table.

What is fused is a whitelist by exact class and hyperparameters, each entry measured against an
unsharded process (tests/multiprocess/strategies/test_parity.py). What FBGEMM would silently ignore
(momentum and weight decay of SGD, weight decay of Adagrad) or fill with a default of its own (eps)
is never left to it.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, optim
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.errors import OptimizerError
from lightning_distrec.optimizers.param_groups import (
    Shards,
    TableParamGroup,
    Weights,
    find_param_groups,
)

Kind = Literal["fused", "sparse", "dense", "fused_lazy", "frozen"]

ELEMENTWISE: dict[type[Any], tuple[int, tuple[str, ...]]] = {
    optim.SGD: (0, ("momentum",)),
    optim.Adam: (2, ("amsgrad",)),
    optim.AdamW: (2, ("amsgrad",)),
    optim.Adamax: (2, ()),
    optim.NAdam: (2, ()),
    optim.RAdam: (2, ()),
    optim.Adagrad: (1, ()),
    optim.Adadelta: (2, ()),
    optim.RMSprop: (1, ("momentum", "centered")),
    optim.Rprop: (2, ()),
    optim.ASGD: (1, ()),
}
"""Optimizers that treat every element alone, so that stepping on a shard is stepping on the table.
Value: how many tensors of the parameter's size they keep as state, and the settings of a param
group that add one each."""
UNKNOWN_TENSORS = 2
"""Tensors of a parameter's size that an optimizer is taken to keep where its class is not known:
Adam's."""

_NEUTRAL_ADAGRAD = {"weight_decay": 0, "lr_decay": 0, "maximize": False}
_EXACT: dict[type[Any], tuple[EmbOptimType, str, dict[str, Any]]] = {
    optim.SGD: (
        EmbOptimType.EXACT_SGD,
        "SGD",
        {"momentum": 0, "weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False},
    ),
    optim.Adagrad: (EmbOptimType.EXACT_ADAGRAD, "Adagrad", _NEUTRAL_ADAGRAD),
    RowWiseAdagrad: (EmbOptimType.EXACT_ROWWISE_ADAGRAD, "row-wise Adagrad", _NEUTRAL_ADAGRAD),
}
"""Optimizers whose numbers FBGEMM's have, where these settings of the param group are as here."""
_STATE_KEYS: dict[EmbOptimType, list[tuple[str, bool]]] = {
    EmbOptimType.EXACT_SGD: [],
    EmbOptimType.EXACT_ADAGRAD: [("sum", False)],
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: [("sum", True)],
    EmbOptimType.ADAM: [("exp_avg", False), ("exp_avg_sq", False)],
}
_UNEQUAL_BATCHES = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM)
UPDATED_IN_BACKWARD: tuple[Kind, ...] = ("fused", "fused_lazy")
NO_UPDATE: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.0}
"""FBGEMM's arguments for a kernel that looks up and updates nothing; it keeps neither state nor
gradient."""


def state_numbers(
    optimizer: optim.Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> int | None:
    """Return how many numbers `optimizer` keeps as state of `parameter`, without its counter,
    before it has stepped.

    A subclass counts as the class that it inherits from; None: no such class is known.
    """
    shape = parameter.shape
    numel = parameter.numel()
    for kind in type(optimizer).__mro__:
        if kind in ELEMENTWISE:
            return numel * _num_state_tensors(kind, group)
        if kind is optim.SparseAdam:
            return numel * 2
        # One number for each row, and one for each column.
        if kind is optim.Adafactor:
            return numel // shape[-1] + numel // shape[-2] if parameter.dim() > 1 else numel
        if kind is RowWiseAdagrad:
            return numel // shape[-1] if parameter.dim() else 1
    return None


def _num_state_tensors(kind: type, group: Mapping[str, Any]) -> int:
    num_tensors, flags = ELEMENTWISE[kind]
    return num_tensors + sum(bool(group.get(flag)) for flag in flags)


def keeps_state_of_frozen(optimizer: optim.Optimizer) -> bool:
    """Whether it has a state for parameters that get no gradient: Adagrad makes it when it is
    constructed."""
    return isinstance(optimizer, (optim.Adagrad, RowWiseAdagrad))


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
    is_asked_for: bool = False
    """Whether `embedding_update` asks for updates in backward."""
    needs_full_rows: bool = False
    """Whether the state is kept per row, so that a table must not be sharded by columns."""
    bytes_per_element: float = 0.0
    """Optimizer state and kept gradient, in bytes for each element of the table."""
    bytes_per_row: float = 0.0
    """Optimizer state that is kept per row, in bytes."""

    @property
    def in_backward(self) -> bool:
        """Whether FBGEMM updates the table inside of backward."""
        return self.kind in UPDATED_IN_BACKWARD

    @property
    def state_keys(self) -> list[tuple[str, bool]]:
        """What FBGEMM keeps for the table, in its order: torch's name for it, and whether it is one
        number per row."""
        return _STATE_KEYS[self.arguments["optimizer"]] if self.in_backward else []

    @property
    def takes_unequal_batches(self) -> bool:
        """Whether FBGEMM updates by gradients of features with batch sizes of their own. Source: as
        of its kernel."""
        # SplitTableBatchedEmbeddingBagsCodegen._generate_vbe_metadata asserts it.
        return self.in_backward and self.arguments["optimizer"] in _UNEQUAL_BATCHES

    @property
    def adds_up(self) -> bool:
        """Whether two updates, one for each of two gradients, are the update of their sum."""
        return not self.in_backward or self.arguments["optimizer"] == EmbOptimType.EXACT_SGD


def translate(
    parameters: Weights,
    modes: Mapping[str, str],
    optimizers: list[optim.Optimizer],
    device_type: str,
    not_in_backward: str,
    looked_up_often: Container[str] = (),
    earlier: Shards | None = None,
) -> dict[str, TableUpdate]:
    """Return what updates each table.

    parameters: full name of a table -> its unsharded weight, (num_rows, dim), possibly on meta.
    modes: full name -> "auto", "fused", "sparse", "dense" or "fused_lazy".
    not_in_backward: why an update inside of backward would come too early, for example
    "gradient_clip_val=1.0", or "".
    looked_up_often: tables that a step usually looks up several times, for positive and negative
    items for example.
    earlier: full name -> the shards of an earlier fit, which an optimizer that outlived it still
    holds.
    Raises OptimizerError: the table's name, the reason and the way out.
    """
    param_groups = find_param_groups(parameters, optimizers, earlier or {})
    updates = {}
    for name, parameter in parameters.items():
        param_group = param_groups.get(id(parameter))
        if param_group is None:
            updates[name] = frozen("in no optimizer")
        elif not parameter.requires_grad:
            updates[name] = frozen("requires_grad is False", param_group)
        else:
            sums_rows = can_sum_rows(parameter.dtype, device_type)
            updates[name] = _choose_update(
                name, param_group, modes[name], device_type, not_in_backward, sums_rows
            )
            if name in looked_up_often and modes[name] == "auto" and sums_rows:
                updates[name] = _sum_several_lookups(updates[name])
    return updates


def frozen(reason: str, param_group: TableParamGroup | None = None) -> TableUpdate:
    """Return the update of a table that nothing updates now; it stays in its param group, in case
    it is unfrozen."""
    # Adagrad makes its state, one number for each element or row, also for parameters that get no
    # gradient.
    optimizer = None if param_group is None else param_group.optimizer
    num_bytes = 4.0 if isinstance(optimizer, optim.Adagrad) else 0.0
    by_row = isinstance(optimizer, RowWiseAdagrad)
    return TableUpdate(
        "frozen", reason, param_group, needs_full_rows=by_row, bytes_per_element=num_bytes
    )


def name_optimizer(update: TableUpdate, source: str) -> TableUpdate:
    """Return the update with a reason that says whose the optimizer is, for example
    "table_optimizer's "."""
    assert update.param_group is not None
    name = type(update.param_group.optimizer).__name__
    reason = update.reason if update.reason.startswith(name) else f"{name}: {update.reason}"
    return replace(update, reason=f"{source}{reason}")


def exact_form(param_group: TableParamGroup) -> TableUpdate | str:
    """Return FBGEMM's form of the group's update with the same numbers, or the reason why there is
    none."""
    group = param_group.group
    kind = type(param_group.optimizer)
    name = kind.__name__
    # By exact class, not by isinstance: a subclass may compute other numbers.
    if kind not in _EXACT:
        moves_all = kind in ELEMENTWISE
        return f"{name} {'moves rows that no id touched' if moves_all else 'is not known'}"
    fbgemm_kind, fbgemm_name, neutral = _EXACT[kind]
    setting = _first_set(group, neutral)
    if setting:
        return f"FBGEMM's {fbgemm_name} has no {setting}"
    reason = f"{name} has the same numbers in FBGEMM"
    if kind is optim.SGD:
        return _fused(param_group, reason, fbgemm_kind)
    update = _fused(param_group, reason, fbgemm_kind, eps=float(group["eps"]))
    # Adagrad fills its sums when it is constructed, so that the group's own value would have no
    # effect in torch.
    start = float(param_group.optimizer.defaults["initial_accumulator_value"])
    if kind is RowWiseAdagrad:
        return replace(update, initial_state=start, needs_full_rows=True, bytes_per_row=4.0)
    return replace(update, initial_state=start, bytes_per_element=4.0)


def can_sum_rows(dtype: torch.dtype, device_type: str) -> bool:
    """Whether torch adds up sparse gradients of this type, those of two micro-batches for
    example."""
    return dtype == torch.float32 or device_type != "cpu"


def sparse_form(param_group: TableParamGroup, sums_rows: bool = True) -> TableUpdate | str:
    """Return the group's update by gradients of touched rows, where it has the same numbers, or why
    there is none.

    sums_rows: see `can_sum_rows`.
    """
    kind = type(param_group.optimizer)
    name = type(param_group.optimizer).__name__
    if kind is optim.SparseAdam:
        reason = f"{name} takes sparse gradients"
        return TableUpdate("sparse", reason, param_group, bytes_per_element=8.0)
    exact = exact_form(param_group)
    if isinstance(exact, str):
        return exact
    if not sums_rows:
        return "torch adds up no sparse gradients in half precision on a CPU"
    if kind is RowWiseAdagrad:
        return f"{name} takes no sparse gradients"
    if param_group.group.get("fused") or param_group.group.get("differentiable"):
        return f"{name}(fused=True) takes no sparse gradients"
    return TableUpdate("sparse", "", param_group, bytes_per_element=exact.bytes_per_element)


def _choose_update(
    name: str,
    param_group: TableParamGroup,
    mode: str,
    device_type: str,
    not_in_backward: str,
    sums_rows: bool,
) -> TableUpdate:
    if mode == "fused_lazy":
        return _lazy_form(name, param_group, device_type)
    if mode == "dense":
        return _dense_form(name, param_group, "asked for", on_request=True)
    fused = exact_form(param_group)
    sparse = sparse_form(param_group, sums_rows)
    if mode == "fused" and isinstance(fused, str):
        other = "dense" if isinstance(sparse, str) else "sparse"
        raise OptimizerError(
            f"table '{name}': embedding_update='fused', but {fused}. Set "
            f"embedding_update='{other}' for it (the user's optimizer on local shards), or choose "
            "SGD without momentum, Adagrad or RowWiseAdagrad for it."
        )
    if mode == "sparse":
        if isinstance(sparse, str):
            raise OptimizerError(
                f"table '{name}': embedding_update='sparse', but {sparse}. Set "
                "embedding_update='dense' or 'auto'."
            )
        return replace(sparse, reason="asked for")
    if isinstance(fused, TableUpdate) and (mode == "fused" or not not_in_backward):
        return replace(fused, is_asked_for=mode == "fused")
    if isinstance(sparse, TableUpdate):
        return replace(sparse, reason=sparse.reason or not_in_backward)
    reason = fused if isinstance(fused, str) else f"{not_in_backward}; {sparse}"
    return _dense_form(name, param_group, reason, on_request=False)


def _sum_several_lookups(update: TableUpdate) -> TableUpdate:
    """Return an update that sums the gradients of several lookups first, where FBGEMM's update of
    each is not that."""
    if update.adds_up or update.param_group is None:
        return update
    sparse = sparse_form(update.param_group)
    if isinstance(sparse, str):
        return update
    return replace(sparse, reason="a step may look it up more than once")


def summed_form(name: str, update: TableUpdate, sums_rows: bool, reason: str) -> TableUpdate:
    """Return the update of a fused table whose gradients must be summed. sums_rows: see
    `can_sum_rows`. reason: why, for reports."""
    assert update.param_group is not None
    sparse = sparse_form(update.param_group, sums_rows)
    if isinstance(sparse, str):
        return _dense_form(name, update.param_group, reason, on_request=False)
    return replace(sparse, reason=reason)


def _dense_form(
    name: str, param_group: TableParamGroup, reason: str, on_request: bool
) -> TableUpdate:
    kind = type(param_group.optimizer)
    if kind is RowWiseAdagrad:
        return TableUpdate(
            "dense",
            reason,
            param_group,
            needs_full_rows=True,
            bytes_per_element=4.0,
            bytes_per_row=4.0,
        )
    if kind in ELEMENTWISE:
        num_tensors = 1 + _num_state_tensors(kind, param_group.group)  # the gradient, and the state
        return TableUpdate("dense", reason, param_group, bytes_per_element=4.0 * num_tensors)
    if kind is optim.SparseAdam:
        raise OptimizerError(
            f"table '{name}': SparseAdam needs sparse gradients. Set embedding_update='sparse'."
        )
    # 12 bytes: the gradient, and two tensors of state as Adam's, in float32.
    if on_request:
        return TableUpdate(
            "dense", f"{reason}; not known to be exact", param_group, bytes_per_element=12.0
        )
    raise OptimizerError(
        f"table '{name}': {kind.__module__}.{kind.__qualname__} is not known to give the same "
        "numbers on a part of a table as on the whole. Give the table an optimizer of its own "
        "(torch.optim.Adagrad, Adam, SGD ...), or set embedding_update='dense' for it if the "
        "optimizer treats every element alone."
    )


def _lazy_form(name: str, param_group: TableParamGroup, device_type: str) -> TableUpdate:
    group = param_group.group
    kind = type(param_group.optimizer)
    if kind not in (optim.Adam, optim.AdamW):
        raise OptimizerError(
            f"table '{name}': embedding_update='fused_lazy' is for Adam and AdamW, not "
            f"{kind.__name__}. Use 'auto', which is exact."
        )
    if device_type == "cpu":
        raise OptimizerError(
            f"table '{name}': embedding_update='fused_lazy', but FBGEMM has no {kind.__name__} on "
            "CPU. Use 'dense'."
        )
    # Adam adds its decay to the gradient (L2). FBGEMM's Adam shrinks the weight, as AdamW does.
    setting = _first_set(group, {"amsgrad": False, "maximize": False})
    is_coupled = kind is optim.Adam and not group.get("decoupled_weight_decay")
    if not setting and is_coupled and group["weight_decay"]:
        setting = "L2 weight_decay"
    if setting:
        raise OptimizerError(
            f"table '{name}': FBGEMM's Adam has no {setting}. Use embedding_update='dense'."
        )
    reason = "touched rows only, as asked for; not the same numbers"
    beta1, beta2 = map(float, group["betas"])
    settings = {name: float(group[name]) for name in ("eps", "weight_decay")}
    update = _fused(param_group, reason, EmbOptimType.ADAM, beta1=beta1, beta2=beta2, **settings)
    return replace(update, kind="fused_lazy", bytes_per_element=8.0)


def _fused(
    param_group: TableParamGroup, reason: str, kind: EmbOptimType, **settings: float
) -> TableUpdate:
    arguments = {"optimizer": kind, "learning_rate": float(param_group.group["lr"]), **settings}
    return TableUpdate("fused", reason, param_group, arguments)


def _first_set(group: Mapping[str, Any], neutral: Mapping[str, Any]) -> str:
    """Return the first hyperparameter that is not neutral, as "name=value", or ""."""
    for name, value in neutral.items():
        if name in group and group[name] != value:
            return f"{name}={group[name]}"
    return ""


class LearningRates:
    """Passes learning rates from the param groups, where schedulers write them, to the fused
    updates.

    FBGEMM takes the rate at forward, for the update inside of the backward that follows. torchrec
    pushes it in `zero_grad` and `step` (torchrec/distributed/batched_embedding_kernel.py), which
    under Lightning's closure is one step late.
    """

    def __init__(self, updates: Mapping[str, TableUpdate]) -> None:
        self._updates = updates
        self._links: dict[int, tuple[TableParamGroup, Any]] = {}
        self._pushed: dict[int, float] = {}
        self.follow_updates()

    def follow_updates(self) -> None:
        """Check from now on what the updates are now."""
        forms = {"fused": exact_form, "sparse": sparse_form}
        # One table of each group: they share its hyperparameters, and this is checked in every
        # step.
        self._checks = {}
        for name, update in self._updates.items():
            group = update.param_group
            if group is not None and update.kind in forms:
                form = forms[update.kind]
                self._checks[update.kind, group.label] = name, update, group, form

    def connect(self, fused_optimizers: Mapping[str, Any]) -> list[int]:
        """Link fused tables' kernels to their param groups; returns a handle for each kernel, for
        `push`.

        fused_optimizers: full name of a table -> torchrec's optimizer of the kernel that holds its
        shard.
        """
        handles = []
        for name, optimizer in fused_optimizers.items():
            param_group = self._updates[name].param_group
            # other kernels update nothing: their rate is 0
            in_backward = self._updates[name].in_backward
            if param_group is not None and in_backward and id(optimizer) not in handles:
                self._links[id(optimizer)] = (param_group, optimizer)
                handles.append(id(optimizer))
        return handles

    def push(self, handles: Iterable[int]) -> None:
        """Give the kernels the current rates of their param groups."""
        for handle in handles:
            param_group, optimizer = self._links[handle]
            # Pushed only when it changes: this runs at each lookup, and most rates change seldom.
            rate = float(param_group.group["lr"])
            if rate != self._pushed.get(handle):
                optimizer.param_groups[0]["lr"] = rate
                # torchrec's fused optimizer only passes the rate to the kernel here; it updates
                # nothing.
                optimizer.step()
                self._pushed[handle] = rate

    def check(self) -> None:
        """Raise OptimizerError where another hyperparameter was changed since the start: it would
        have no effect."""
        for name, update, param_group, find_form in self._checks.values():
            # Every rank checks all groups, also those whose tables it does not hold, so that all
            # ranks raise or none.
            form = find_form(param_group)
            changes = form
            if isinstance(form, TableUpdate):
                changes = _differences(form.arguments, update.arguments)
            if changes:
                raise OptimizerError(
                    f"table '{name}': a hyperparameter of its param group was changed while "
                    f"training ({changes}), which its {update.kind} update does not follow. Set "
                    "embedding_update='dense' for it."
                )


def _differences(current: Mapping[str, Any], initial: Mapping[str, Any]) -> str:
    changes: list[str] = []
    for name, value in initial.items():
        if name != "learning_rate" and current.get(name) != value:
            changes.append(f"{name}={current.get(name)} was {value}")
    return ", ".join(changes)
