"""Tables and their shards in the param groups of the user's optimizers."""

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn, optim
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_distrec._compat.torch import without_torch_function
from lightning_distrec.errors import OptimizerError

Weights: TypeAlias = Mapping[str, nn.Parameter]
"""Full name of a table -> its unsharded weight."""
Shards: TypeAlias = Mapping[str, list[nn.Parameter]]
"""Full name of a table -> this rank's shards of it."""


@dataclass(frozen=True)
class TableParamGroup:
    """The param group that a table is in, and its optimizer."""

    optimizer: optim.Optimizer
    optimizer_index: int
    group_index: int
    shared_label: str = ""
    """The label of another group with the same settings, with whose tables one kernel updates this
    one's."""

    @property
    def group(self) -> dict[str, Any]:
        """The param group, live: schedulers write to it."""
        return self.optimizer.param_groups[self.group_index]

    @property
    def label(self) -> str:
        """A name that no other group has, unless it shares one."""
        return self.shared_label or f"{self.optimizer_index}.{self.group_index}"


STARTS = {"sum": "initial_accumulator_value", "step_size": "lr"}
"""State of torch's optimizers that begins at a setting: of Adagrad, Rprop. Others begin at 0."""


def initial_state(group: Mapping[str, Any], key: str) -> float:
    """Return the number with which a param group's optimizer begins its state `key` of a row."""
    return float(group.get(STARTS.get(key, ""), 0.0))


def find_param_groups(
    parameters: Weights,
    optimizers: list[optim.Optimizer],
    earlier: Shards,
) -> dict[int, TableParamGroup]:
    """Return id of an unsharded weight -> the param group that has it, or had its shards in an
    earlier fit.

    parameters: full name of a table -> its unsharded weight. earlier: full name -> the shards of an
    earlier fit; the weights are put back in their place.
    Raises OptimizerError: a table in two optimizers; an optimizer whose state for a table would be
    lost.
    """
    for optimizer in optimizers:
        _put_back(optimizer, parameters, earlier)
    # By identity in all of this file: == of tensors compares their elements.
    ids = {id(parameter): name for name, parameter in parameters.items()}
    param_groups: dict[int, TableParamGroup] = {}
    for parameter, param_group in _grouped_parameters(optimizers):
        if id(parameter) not in ids:
            continue
        if id(parameter) in param_groups:
            raise OptimizerError(
                f"table '{ids[id(parameter)]}' is in two optimizers, which cannot both update it "
                "exactly. Give it to one."
            )
        param_groups[id(parameter)] = param_group
    return param_groups


def _grouped_parameters(
    optimizers: Iterable[optim.Optimizer],
) -> Iterator[tuple[nn.Parameter, TableParamGroup]]:
    """Yield all parameters of the optimizers, each with its param group."""
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            param_group = TableParamGroup(optimizer, index, group_index)
            for parameter in group["params"]:
                yield parameter, param_group


def remove_from_groups(
    optimizers: Iterable[optim.Optimizer],
    parameters: Weights,
    earlier: Shards,
) -> None:
    """Remove tables from the optimizers, in place: groups keep their count and order, and may be
    empty then.

    parameters: full name -> unsharded weight. earlier: see `find_param_groups`. Raises
    OptimizerError as it does.
    """
    ids = set(map(id, parameters.values()))
    for optimizer in optimizers:
        _put_back(optimizer, parameters, earlier)
        for group in optimizer.param_groups:
            # With named parameters torch has a list of names next to them, in the same order.
            positions = [
                i for i, parameter in enumerate(group["params"]) if id(parameter) not in ids
            ]
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [group[key][i] for i in positions]
        for parameter in parameters.values():
            optimizer.state.pop(parameter, None)


def _put_back(
    optimizer: optim.Optimizer,
    parameters: Weights,
    earlier: Shards,
) -> None:
    """Put the unsharded weights in place of an earlier fit's shards; refuse state that would be
    lost."""
    names: dict[int, str] = {}
    for name, shards in earlier.items():
        if name in parameters:
            names |= {id(shard): name for shard in shards}
    weights = {id(parameter): name for name, parameter in parameters.items()} | names
    lost: list[str] = []
    for p, state in optimizer.state.items():
        if id(p) in weights and _has_begun(state):
            lost.append(weights[id(p)])
    # SGD alone is exact without what an earlier fit has accumulated: what FBGEMM kept of it is in
    # no optimizer's state.
    if type(optimizer) is not optim.SGD:
        for group in optimizer.param_groups:
            lost += [names[id(p)] for p in group["params"] if id(p) in names]
    if lost:
        raise OptimizerError(
            f"table '{lost[0]}': its {type(optimizer).__name__} has stepped before (kept from an "
            "earlier fit, or its state was loaded), and the table's state cannot be carried over "
            "to shards. Return a new optimizer in configure_optimizers, and load no state into it; "
            "with apply_optimizer_in_backward, make a new module. To go on with its state, save a "
            "checkpoint and call fit with ckpt_path."
        )
    for group in optimizer.param_groups:
        # Several shards of a table become one weight again, at the place of the first.
        weights_of_group: dict[int, nn.Parameter] = {}
        for parameter in group["params"]:
            if id(parameter) in names:
                parameter = parameters[names[id(parameter)]]
            weights_of_group[id(parameter)] = parameter
        group["params"] = list(weights_of_group.values())
    for parameter in list(optimizer.state):
        if id(parameter) in names:
            del optimizer.state[parameter]


def _has_begun(state: Mapping[str, Any]) -> bool:
    # Adagrad makes its state when it is constructed, with a counter of 0: nothing is lost with it.
    if "step" in state:
        return float(state["step"]) > 0
    return any(isinstance(value, torch.Tensor) for value in state.values())


def replace_parameters(
    optimizers: Iterable[optim.Optimizer], replacements: Mapping[int, nn.Parameter]
) -> None:
    """Put other parameters in the places of unsharded weights, by id; of their state remains that
    there was some."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [
                replacements.get(id(parameter), parameter) for parameter in group["params"]
            ]
        for parameter in list(optimizer.state):
            if id(parameter) in replacements:
                del optimizer.state[parameter]
                # `rewrite_groups` makes that of the shards
                optimizer.state[replacements[id(parameter)]] = {}


class StateOnMeta(TorchFunctionMode):
    """Makes state on meta that constructors of optimizers make for some parameters: shards get
    theirs later.

    Adagrad makes its sums there: a second copy of every table on every rank.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._ids = set(map(id, parameters))

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.full_like and args and id(args[0]) in self._ids:
            # Code of the user's own, and a step in configure_optimizers, look at what they make.
            caller: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
            module = caller.f_globals.get("__name__", "")
            is_of_torch = module.startswith(("torch.optim.", "torchrec.optim."))
            if is_of_torch and caller.f_code.co_name == "__init__":
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def find_param_group(
    parameter: nn.Parameter, optimizers: list[optim.Optimizer]
) -> TableParamGroup | None:
    """Return the param group that has `parameter` now, or None."""
    for held, param_group in _grouped_parameters(optimizers):
        if held is parameter:
            return param_group
    return None


def rewrite_groups(
    optimizers: Iterable[optim.Optimizer],
    parameters: Weights,
    shards: Shards,
    without_state: Container[str],
) -> None:
    """Put each table's shards in the place of the unsharded weight, in place: groups keep their
    count and order.

    parameters: full name -> unsharded weight. shards: full name -> this rank's shards of the tables
    that the user's optimizer steps on, or, for fused tables, finds without a gradient. Shards
    without rows on this rank are in the groups too, so that what freezes, toggles or clamps a
    group's parameters reaches every rank's alike.
    without_state: tables whose state the optimizer does not keep, because FBGEMM does.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        # Adagrad makes its state when it is constructed, for the unsharded weight: shards get
        # theirs in the same way.
        with_state = set()
        for p in parameters.values():
            if optimizer.state.pop(p, None) is not None:
                with_state.add(id(p))
        for group in optimizer.param_groups:
            replaced: list[nn.Parameter] = []
            fresh: list[nn.Parameter] = []
            positions: list[int] = []
            for i, parameter in enumerate(group["params"]):
                name = names.get(id(parameter))
                new = [parameter] if name is None else shards.get(name, [])
                replaced += new
                positions += [i] * len(new)
                fresh += new if id(parameter) in with_state and name not in without_state else []
            group["params"] = replaced
            if "param_names" in group:
                group["param_names"] = [group["param_names"][i] for i in positions]
            if fresh:
                optimizer.state.update(_fresh_state(optimizer, group, fresh))


def _fresh_state(
    optimizer: optim.Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]
) -> dict[Any, Any]:
    """Return the state that the optimizer's constructor makes for `parameters` (Adagrad makes its
    sums there)."""

    # By the class's own constructor: the initial values are arguments of it
    # (initial_accumulator_value).
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    options = {}
    for k, v in {**optimizer.defaults, **group}.items():
        if k in accepted and k != "params":
            options[k] = v
    try:
        with without_torch_function():
            return dict(kind(parameters, **options).state)
    except TypeError as error:
        raise OptimizerError(
            f"{kind.__module__}.{kind.__qualname__} cannot be made for a part of a table from its "
            f"own param_groups: {error}. Keep its constructor's arguments in `defaults`, as "
            "torch's optimizers do."
        ) from error
