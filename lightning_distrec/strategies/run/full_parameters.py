"""Full parameters on the host of every rank, for people and callbacks that look at weights."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_distrec.errors import ConfigError, ShardingError, did_you_mean
from lightning_distrec.host_memory import free_host_bytes
from lightning_distrec.ranks import Ranks
from lightning_distrec.units import format_bytes

Rows = tuple[int, int] | None


def check_call(name: str, rows: Rows, parameters: Mapping[str, Any], ranks: Ranks) -> None:
    """Collective. Raise ConfigError on every rank: there is no such parameter, or the ranks ask for different ones."""
    calls = ranks.all_gather((name, rows))
    if any(call != calls[0] for call in calls):
        raise ConfigError(
            f"full_parameter: the ranks ask for different parameters, {calls}. Call it with the same one on every rank."
        )
    if name not in parameters:
        raise ConfigError(f"full_parameter: the module has no parameter '{name}'{did_you_mean(name, parameters)}")


def rows_of(name: str, rows: Rows, num_rows: int) -> tuple[int, int]:
    """Return the first row and the row after the last. Raises ConfigError: they are not rows of the parameter."""
    first, last = (0, num_rows) if rows is None else rows
    if not 0 <= first <= last <= num_rows:
        raise ConfigError(f"full_parameter: rows={rows} are not within the {num_rows:,} rows of '{name}'.")
    return first, last


def check_memory(name: str, needed_bytes: int, ranks_on_node: int, ranks: Ranks) -> None:
    """Collective. Raise ShardingError on every rank: the host of one has not enough memory for all of its ranks."""
    free = free_host_bytes()
    if not ranks.all_reduce_min(int(needed_bytes * ranks_on_node <= free)):
        raise ShardingError(
            f"full_parameter: '{name}' takes {format_bytes(needed_bytes)} on each of {ranks_on_node} ranks of a "
            f"node, and {format_bytes(free)} are free here. Ask for some rows at a time, as in "
            f"full_parameter('{name}', rows=(0, 1000))."
        )


def full_parameter(module: nn.Module, name: str, rows: Rows, ranks_on_node: int, ranks: Ranks) -> Tensor:
    """Collective. Return a copy of a parameter, which may be a DTensor, or of some of its rows, on the host."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    check_call(name, rows, parameters, ranks)
    parameter: Tensor = parameters[name]
    first, last = rows_of(name, rows, parameter.shape[0] if parameter.dim() else 1)
    check_memory(name, parameter.nbytes, ranks_on_node, ranks)
    full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    full = full.detach()
    return (full[first:last] if full.dim() else full).cpu().clone()
