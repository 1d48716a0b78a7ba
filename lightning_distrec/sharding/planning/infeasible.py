"""Why tables do not fit: the proof where there is one, the table that does not fit, and by how many bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_distrec.sharding.planning.partial_plan import MemoryBudget, PartialPlan
from lightning_distrec.sharding.planning.sharding_options import EstimatedOption
from lightning_distrec.sharding.sharding_types import EVERY_RANK_TYPES, ONE_NODE_TYPES
from lightning_distrec.units import format_bytes

WEIGHTS = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.5), (0.5, 1.0), (1.0, 0.1), (0.1, 1.0))
"""Weights of device and host memory, in search of a sum that is too large; any weights prove it."""


@dataclass(frozen=True)
class InfeasiblePlan:
    """A table that does not fit."""

    table: int
    proven: bool
    """Whether no plan can exist; otherwise none was found."""
    why: str
    """The reason, to follow "table 'x' "."""


def fits_alone(option: EstimatedOption, budget: MemoryBudget) -> bool:
    """Return whether the option fits while all ranks are empty."""
    return PartialPlan([[option]], budget).find_ranks(option) is not None


def no_option_fits(options: Sequence[EstimatedOption], table: int, budget: MemoryBudget) -> InfeasiblePlan:
    """Return by how much a table, of which no option fits on empty ranks, is too large."""
    closest = min(options, key=lambda option: max(_missing(option, budget)))
    of_one, of_all = _missing(closest, budget)
    needs, has = format_bytes(closest.device_bytes.max()), format_bytes(budget.device_bytes.max())
    if budget.host_bytes.any():
        needs += f" of its GPU's memory and {format_bytes(closest.host_bytes.max())} of its host's"
        has += f" and {format_bytes(budget.host_bytes.max())}"
    return InfeasiblePlan(
        table,
        proven=True,
        why=f"fits on no rank: even {closest.sharding_type} ({closest.kernel}) a rank needs {needs} for its rows, "
        f"their update and exchange, and has {has}: {format_bytes(max(of_one, of_all))} too few"
        f"{' for all its shards' if of_all > of_one else ''}",
    )


def _missing(option: EstimatedOption, budget: MemoryBudget) -> tuple[int, int]:
    """Return how many bytes the option's shards lack at best on empty ranks: the largest by itself, and all."""
    per_device, per_host = budget.device_bytes.max(), budget.host_bytes.max()
    if option.sharding_type in EVERY_RANK_TYPES:
        per_device, per_host = budget.device_bytes, budget.host_bytes
    of_one = max(0, int((option.device_bytes - per_device).max())) + max(0, int((option.host_bytes - per_host).max()))
    ranks = budget.ranks_on_node if option.sharding_type in ONE_NODE_TYPES else budget.num_ranks
    there = np.sort(budget.device_bytes)[-ranks:].sum(), np.sort(budget.host_bytes)[-ranks:].sum()
    of_all = max(0, int(option.device_bytes.sum() - there[0])) + max(0, int(option.host_bytes.sum() - there[1]))
    return of_one, of_all


def exceed_total_memory(options: Sequence[Sequence[EstimatedOption]], budget: MemoryBudget) -> InfeasiblePlan | None:
    """Return a reason where all tables, each with its smallest option, need more memory than all ranks have."""
    for device, host in WEIGHTS:
        sizes = np.array([
            min(device * o.device_bytes.sum() + host * o.host_bytes.sum() for o in of_table) for of_table in options
        ])
        there = device * budget.device_bytes.sum() + host * budget.host_bytes.sum()
        if (missing := int(np.ceil(sizes.sum() - there))) > 0:
            kind = {(1.0, 0.0): " of device memory", (0.0, 1.0): " of host memory"}.get((device, host), "")
            return InfeasiblePlan(
                int(sizes.argmax()),
                proven=True,
                why=f"is the largest of tables that need at least {format_bytes(sizes.sum())}{kind} together, and "
                f"all ranks have {format_bytes(there)}: {format_bytes(missing)} too few",
            )
    return None


def pack_by_memory(options: Sequence[Sequence[EstimatedOption]], budget: MemoryBudget) -> PartialPlan | InfeasiblePlan:
    """Return a plan of any speed: tables by size, each on the ranks with the most memory, with its smallest option.

    Or the first table that does not fit.
    """
    smallest = [min(int((o.device_bytes + o.host_bytes).sum()) for o in of_table) for of_table in options]
    plan = PartialPlan(options, budget)
    for table in sorted(range(len(options)), key=lambda t: -smallest[t]):
        for number in sorted(range(len(options[table])), key=lambda o: int(options[table][o].device_bytes.sum())):
            if (ranks := plan.find_ranks(options[table][number], by_memory=True)) is not None:
                plan.put(table, number, ranks)
                break
        else:
            left = MemoryBudget(plan.device_left, plan.host_left, budget.ranks_on_node)
            missing = max(1, min(max(_missing(option, left)) for option in options[table]))
            why = f"does not fit next to the other tables: {format_bytes(missing)} are missing where it came closest"
            return InfeasiblePlan(table, proven=False, why=why)
    return plan
