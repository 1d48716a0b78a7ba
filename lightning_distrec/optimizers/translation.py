"""The user's optimizers, as configure_optimizers made them, and what each of them becomes for a table.

    fused       FBGEMM updates the touched rows inside of backward; the numbers are those of the user's optimizer
    sparse      the user's own optimizer steps on the rank's shard, with a gradient of the touched rows
    dense       the user's own optimizer steps on the rank's shard, with a gradient as large as the shard
    fused_lazy  FBGEMM updates the touched rows only, where the optimizer would have moved all of them; on request
    frozen      nothing updates the table

What is fused is a whitelist by exact class and hyperparameters, each entry measured against an unsharded process
(tests/multiprocess/test_parity.py). What FBGEMM would silently ignore (momentum and weight decay of SGD, weight decay
of Adagrad) or fill with a default of its own (eps) is never left to it.
"""

import inspect
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn, optim
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.errors import OptimizerError

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
"""Optimizers that treat every element alone, so that stepping on a shard is stepping on the table. Value: the most
state they keep by default, in tensors of the table's size."""


@dataclass(frozen=True)
class Owner:
    """The optimizer and param group that a table belongs to."""

    optimizer: optim.Optimizer
    optimizer_index: int
    group_index: int

    @property
    def group(self) -> dict[str, Any]:
        """The param group, live: schedulers write to it."""
        return self.optimizer.param_groups[self.group_index]

    @property
    def label(self) -> str:
        """A name that no other group has."""
        return f"{self.optimizer_index}.{self.group_index}"


@dataclass(frozen=True)
class TableUpdate:
    """What updates one table, and why."""

    kind: Kind
    why: str
    owner: Owner | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    """FBGEMM's, where it updates the table; the learning rate is the one at the start."""
    initial_state: float = 0.0
    """Value that the optimizer's state starts from."""
    whole_rows: bool = False
    """Whether the state is kept per row, so that a row must stay on one rank."""
    bytes_per_element: float = 0.0
    """Optimizer state and kept gradient, in bytes for each element of the table."""
    bytes_per_row: float = 0.0
    """Optimizer state that is kept per row, in bytes."""

    @property
    def in_backward(self) -> bool:
        """Whether FBGEMM updates the table inside of backward."""
        return self.kind in ("fused", "fused_lazy")

    @property
    def adds_up(self) -> bool:
        """Whether two updates, one for each of two gradients, are the update of their sum."""
        return not self.in_backward or self.arguments["optimizer"] == EmbOptimType.EXACT_SGD


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
    looked_up_often: tables that a step usually looks up several times, positive and negative items for example.
    earlier: full name -> the shards of an earlier fit, which an optimizer that outlived it still holds.
    Raises OptimizerError: the table's name, the reason and the way out.
    """
    owners = _owners(parameters, optimizers, earlier or {})
    updates = {}
    for name, parameter in parameters.items():
        owner = owners.get(id(parameter))
        if owner is None or not parameter.requires_grad:
            updates[name] = frozen("in no optimizer" if owner is None else "requires_grad is False", owner)
        else:
            updates[name] = _update(name, owner, modes[name], device_type, not_in_backward)
            if name in looked_up_often and modes[name] == "auto":
                updates[name] = _for_several_lookups(updates[name])
    return updates


def frozen(why: str, owner: Owner | None = None) -> TableUpdate:
    """Return the update of a table that nothing updates now; it stays in its param group, in case it is unfrozen."""
    keeps_state = owner is not None and isinstance(owner.optimizer, optim.Adagrad)  # from the start, one element each
    return TableUpdate("frozen", why, owner, bytes_per_element=4.0 if keeps_state else 0.0)


NO_UPDATE: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.0}
"""FBGEMM's arguments for a kernel that looks up and updates nothing; it keeps neither state nor gradient."""


def exact_form(owner: Owner) -> tuple[TableUpdate | None, str]:
    """Return FBGEMM's form of the owner's update with the same numbers, or None and the reason why there is none."""
    group, kind = owner.group, type(owner.optimizer)
    name = kind.__name__
    if kind is optim.SGD:
        if reason := _first_set(group, momentum=0, weight_decay=0, dampening=0, nesterov=False, maximize=False):
            return None, f"FBGEMM's SGD has no {reason}"
        return _fused(owner, f"{name} has the same numbers in FBGEMM", EmbOptimType.EXACT_SGD, {}, 0.0), ""
    if kind is optim.Adagrad:
        if reason := _first_set(group, weight_decay=0, lr_decay=0, maximize=False):
            return None, f"FBGEMM's Adagrad has no {reason}"
        start = float(owner.optimizer.defaults["initial_accumulator_value"])
        arguments = {"eps": float(group["eps"])}
        update = _fused(owner, f"{name} has the same numbers in FBGEMM", EmbOptimType.EXACT_ADAGRAD, arguments, 4.0)
        return replace(update, initial_state=start), ""
    if kind is RowWiseAdagrad:
        if reason := _first_set(group, weight_decay=0, lr_decay=0, maximize=False):
            return None, f"FBGEMM's row-wise Adagrad has no {reason}"
        start = float(owner.optimizer.defaults["initial_accumulator_value"])
        arguments = {"eps": float(group["eps"])}
        why = f"{name} has the same numbers in FBGEMM"
        update = _fused(owner, why, EmbOptimType.EXACT_ROWWISE_ADAGRAD, arguments, 0.0)
        return replace(update, initial_state=start, whole_rows=True, bytes_per_row=4.0), ""
    return None, f"{name} moves rows that no id touched" if kind in ELEMENTWISE else f"{name} is not known"


def sparse_form(owner: Owner) -> tuple[TableUpdate | None, str]:
    """Return the owner's update by gradients of touched rows, where it has the same numbers, or None and why not."""
    kind, name = type(owner.optimizer), type(owner.optimizer).__name__
    if kind is optim.SparseAdam:
        return TableUpdate("sparse", f"{name} takes sparse gradients", owner, bytes_per_element=8.0), ""
    exact, why_not = exact_form(owner)
    if exact is None:
        return None, why_not
    if kind is RowWiseAdagrad:
        return None, f"{name} takes no sparse gradients"
    if owner.group.get("fused") or owner.group.get("differentiable"):
        return None, f"{name}(fused=True) takes no sparse gradients"
    return TableUpdate("sparse", "", owner, bytes_per_element=exact.bytes_per_element), ""


def _update(name: str, owner: Owner, mode: str, device_type: str, not_in_backward: str) -> TableUpdate:
    fused, why_not_fused = exact_form(owner)
    if mode == "fused":
        if fused is None:
            raise OptimizerError(
                f"table '{name}': embedding_update='fused', but {why_not_fused}. Set embedding_update='dense' for it "
                "(the user's optimizer on local shards), or choose SGD without momentum, Adagrad or RowWiseAdagrad for "
                "it."
            )
        return fused
    if mode == "fused_lazy":
        return _lazy(name, owner, device_type)
    if mode == "dense":
        return _dense(name, owner, "asked for", asked=True)
    sparse, why_not_sparse = sparse_form(owner)
    if mode == "sparse":
        if sparse is None:
            raise OptimizerError(
                f"table '{name}': embedding_update='sparse', but {why_not_sparse}. Set embedding_update='dense' for "
                "it, or choose SGD without momentum, Adagrad or SparseAdam for it."
            )
        return replace(sparse, why="asked for")
    if fused is not None and not not_in_backward:
        return fused
    if sparse is not None:
        return replace(sparse, why=not_in_backward or sparse.why)
    why = f"{not_in_backward}; {why_not_sparse}" if fused is not None else why_not_fused
    return _dense(name, owner, why, asked=False)


def _for_several_lookups(update: TableUpdate) -> TableUpdate:
    """FBGEMM updates once for each lookup; where that is not one update with their sum, let the gradients meet."""
    if update.adds_up or update.owner is None:
        return update
    sparse, _ = sparse_form(update.owner)
    return update if sparse is None else replace(sparse, why="a step may look it up more than once")


def _dense(name: str, owner: Owner, why: str, asked: bool) -> TableUpdate:
    kind = type(owner.optimizer)
    if kind is RowWiseAdagrad:
        return TableUpdate("dense", why, owner, whole_rows=True, bytes_per_element=4.0, bytes_per_row=4.0)
    if kind in ELEMENTWISE:
        return TableUpdate("dense", why, owner, bytes_per_element=4.0 * (1 + _states(owner)))
    if kind is optim.SparseAdam:
        raise OptimizerError(f"table '{name}': SparseAdam needs sparse gradients. Set embedding_update='sparse'.")
    if asked:
        return TableUpdate("dense", f"{why}; not known to be exact", owner, bytes_per_element=12.0)
    raise OptimizerError(
        f"table '{name}': {kind.__module__}.{kind.__qualname__} is not known to give the same numbers on a part of a "
        "table as on the whole. Give the table an optimizer of its own (torch.optim.Adagrad, Adam, SGD ...), or set "
        "embedding_update='dense' for it if the optimizer treats every element alone."
    )


def _states(owner: Owner) -> int:
    group = owner.group
    if type(owner.optimizer) is optim.SGD and not group["momentum"]:
        return 0
    extra = ("amsgrad", "centered")
    return ELEMENTWISE[type(owner.optimizer)] + sum(bool(group.get(flag)) for flag in extra)


def _lazy(name: str, owner: Owner, device_type: str) -> TableUpdate:
    group, kind = owner.group, type(owner.optimizer)
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
    update = _fused(owner, "touched rows only, as asked for; not the same numbers", EmbOptimType.ADAM, arguments, 8.0)
    return replace(update, kind="fused_lazy")


def _fused(owner: Owner, why: str, kind: EmbOptimType, arguments: dict[str, Any], state: float) -> TableUpdate:
    learning_rate = float(owner.group["lr"])
    full = {"optimizer": kind, "learning_rate": learning_rate, **arguments}
    return TableUpdate("fused", why, owner, full, bytes_per_element=state)


def _first_set(group: Mapping[str, Any], **neutral: Any) -> str:
    """Return the first hyperparameter that is not neutral, as "name=value", or ""."""
    for name, value in neutral.items():
        if name in group and group[name] != value:
            return f"{name}={group[name]}"
    return ""


def _owners(
    parameters: Mapping[str, nn.Parameter],
    optimizers: list[optim.Optimizer],
    earlier: Mapping[str, list[nn.Parameter]],
) -> dict[int, Owner]:
    for optimizer in optimizers:
        _put_back(optimizer, parameters, earlier)
    ids = {id(parameter): name for name, parameter in parameters.items()}
    owners: dict[int, Owner] = {}
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in ids:
                    continue
                if id(parameter) in owners:
                    raise OptimizerError(
                        f"table '{ids[id(parameter)]}' is in two optimizers, which cannot both update it exactly. "
                        "Give it to one."
                    )
                owners[id(parameter)] = Owner(optimizer, index, group_index)
    return owners


def _put_back(
    optimizer: optim.Optimizer, parameters: Mapping[str, nn.Parameter], earlier: Mapping[str, list[nn.Parameter]]
) -> None:
    """Put the unsharded weights in the places of an earlier fit's shards; refuse state that cannot come along."""
    names = {id(shard): name for name, shards in earlier.items() if name in parameters for shard in shards}
    for group in optimizer.param_groups:
        kept: list[nn.Parameter] = []
        for parameter in group["params"]:
            mine = parameters[names[id(parameter)]] if id(parameter) in names else parameter
            kept += [] if any(mine is other for other in kept) else [mine]
        group["params"] = kept
    weights = {id(parameter): name for name, parameter in parameters.items()} | names
    for parameter, state in optimizer.state.items():
        if id(parameter) in weights and _has_begun(state):
            raise OptimizerError(
                f"table '{weights[id(parameter)]}': configure_optimizers returned a {type(optimizer).__name__} that "
                "has stepped before (kept from an earlier fit, or its state was loaded), and the table's state cannot "
                "be carried over to shards yet. Return a new optimizer, and load no state into it."
            )
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in names]:
        del optimizer.state[parameter]


def _has_begun(state: Mapping[str, Any]) -> bool:
    if "step" in state:
        return float(state["step"]) > 0
    return any(isinstance(value, torch.Tensor) for value in state.values())


def owner_of(parameter: nn.Parameter, optimizers: list[optim.Optimizer]) -> Owner | None:
    """Return the optimizer and group that hold `parameter` now, or None."""
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            if any(held is parameter for held in group["params"]):
                return Owner(optimizer, index, group_index)
    return None


def rewrite_groups(
    optimizers: Iterable[optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, list[nn.Parameter]],
    without_state: Container[str],
) -> None:
    """Put each table's shards in the place of the unsharded weight, in place: groups keep their count and order.

    parameters: full name -> unsharded weight. shards: full name -> this rank's shards of the tables that the user's
    optimizer steps on, or, for fused tables, finds without a gradient. Shards without rows on this rank are in the
    groups too, so that what freezes, toggles or clamps a group's parameters reaches every rank's alike.
    without_state: tables whose state the optimizer does not keep, because FBGEMM does.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        with_state = {id(p) for p in parameters.values() if optimizer.state.pop(p, None) is not None}
        for group in optimizer.param_groups:
            replaced: list[nn.Parameter] = []
            fresh: list[nn.Parameter] = []
            kept: list[int] = []
            for i, parameter in enumerate(group["params"]):
                name = names.get(id(parameter))
                mine = [parameter] if name is None else shards.get(name, [])
                replaced += mine
                kept += [i] * len(mine)
                fresh += mine if id(parameter) in with_state and name not in without_state else []
            group["params"] = replaced
            if "param_names" in group:
                group["param_names"] = [group["param_names"][i] for i in kept]
            if fresh:
                optimizer.state.update(_fresh_state(optimizer, group, fresh))


def _fresh_state(
    optimizer: optim.Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]
) -> dict[Any, Any]:
    """Return the state that the optimizer's constructor makes for `parameters` (Adagrad makes its sums there)."""

    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    options = {k: v for k, v in {**optimizer.defaults, **group}.items() if k in accepted and k != "params"}
    try:
        return dict(kind(parameters, **options).state)
    except TypeError as error:
        raise OptimizerError(
            f"{kind.__module__}.{kind.__qualname__} cannot be made for a part of a table from its own param_groups: "
            f"{error}. Keep its constructor's arguments in `defaults`, as torch's optimizers do."
        ) from error
