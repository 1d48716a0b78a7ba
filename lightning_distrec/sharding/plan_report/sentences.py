"""Findings about a plan, one sentence each: the titles of its pictures and the head of its page."""

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.plan.planned_table import PlannedTable
from lightning_distrec.sharding.plan.sharding_plan import RankUsage, ShardingPlan
from lightning_distrec.units import format_bytes, quantity


def headline(plan: ShardingPlan) -> str:
    """Return the number of tables and ranks, and whether the tables fit."""
    layout = plan.layout
    nodes = f" on {quantity(layout.num_nodes, 'node')}" if layout.num_nodes > 1 else ""
    where = f"{quantity(len(plan.tables), 'table')} over {quantity(layout.num_ranks, 'rank')}{nodes}"
    if layout.num_replicas > 1:
        where += f" in each of {layout.num_replicas} groups"
    return f"{where}: {'all tables fit' if plan.fits else 'the tables do not fit into memory'}"


def memory_in_words(memory: RankUsage, where: str) -> str:
    """Return whether the memory suffices, and which rank has the least left. where: "GPU" or "host"."""
    worst = memory.worst
    held, usable = int(memory.tables[worst]), int(memory.usable[worst])
    alone = len(memory.tables) == 1
    sizes = f"{format_bytes(held)} of {format_bytes(usable)}"
    if held > usable:
        over = int((memory.tables > memory.usable).sum())
        others = f", and {quantity(over - 1, 'more rank')} would need too much" if over > 1 else ""
        return f"Too full: {'the rank' if alone else f'rank {worst}'} would need {sizes} of {where} memory{others}"
    who = "The rank" if alone else f"Rank {worst}, the fullest,"
    share = held / usable if usable else 0.0
    return f"{who} fills {f'{share:.0%}' if share >= 0.01 or not held else 'under 1%'} of its {where} memory: {sizes}"


def time_in_words(plan: ShardingPlan) -> str:
    """Return how long the slowest rank spends on tables; "" if the plan was not estimated."""
    if not plan.cost.known:
        return ""
    by_rank = plan.cost.milliseconds_by_rank
    slowest, mean = float(by_rank.max()), float(by_rank.mean())
    if len(by_rank) == 1:
        return f"A step spends {milliseconds_in_words(slowest)} on tables"
    more = ", as all ranks do"
    if slowest > 1.005 * mean:
        more = f", {slowest / mean - 1:.0%} more than the average of {milliseconds_in_words(mean)}"
    who = f"Rank {int(by_rank.argmax())}, the slowest,"
    path = plan.cost.critical_path
    waits = ""
    if path > 1.005 * slowest:
        waits = f"; with waits for the slowest rank of each exchange a step takes {milliseconds_in_words(path)}"
    return f"{who} spends {milliseconds_in_words(slowest)} of a step on tables{more}{waits}"


def updates_in_words(plan: ShardingPlan) -> str:
    """Return what takes most of the updates, and what would change it; "" unless updates outweigh all else.

    Of the slowest rank.
    """
    if not plan.cost.known:
        return ""
    slowest = plan.cost.slowest
    all_of_it, updates = float(plan.cost.milliseconds_by_rank[slowest]), float(plan.cost.part("update")[slowest])
    if 2 * updates <= all_of_it:
        return ""
    kinds: dict[tuple[str, str], list[PlannedTable]] = {}
    for table in plan.tables.values():
        kinds.setdefault((table.update, table.optimizer), []).append(table)
    times = {key: sum(table.update_on(slowest) for table in tables) for key, tables in kinds.items()}
    kind, optimizer = max(times, key=times.__getitem__)
    tables, time = kinds[kind, optimizer], times[kind, optimizer]
    name = f"'{tables[0].name}'" if len(tables) == 1 else quantity(len(tables), "table")
    share = f"{time:.3g} of {milliseconds_in_words(all_of_it)} on rank {slowest}"
    rows = f"{'all' if kind == 'dense' else 'touched'} rows of {name}"
    found = f"Updates outweigh lookups: {kind} {optimizer} moves {rows} in each step, {share}"
    if kind != "dense":
        return found
    lazy = " or, not with the same numbers, embedding_update fused_lazy" if plan.on_gpu and "Adam" in optimizer else ""
    if tables[0].sharding_type == "data_parallel":
        return f"{found}. Sharded over the ranks, each would move its share"
    return f"{found}. table_optimizer Adagrad{lazy} would move those that a step looks up"


def sent_in_words(plan: ShardingPlan) -> str:
    """Return how much ranks send, how much of it to other nodes, and which rank sends the most."""
    traffic = plan.traffic
    if traffic.layout.num_ranks == 1:
        return "Nothing is sent: there is only one rank"
    sent = traffic.sent()
    across = ""
    if traffic.layout.num_nodes > 1 and sent.sum() > 0:
        across = f", {traffic.across_nodes().sum() / sent.sum():.0%} of it to other nodes"
    largest = ""
    if sent.max() > 1.005 * sent.mean():
        largest = f"; rank {int(sent.argmax())} sends the most, {format_bytes(float(sent.max()))}"
    return f"A rank sends {format_bytes(float(sent.mean()))} per step on average{across}{largest}"


def replicas_in_words(plan: ShardingPlan) -> str:
    """Return what groups of ranks with a replica of the tables each send to each other; "" for one group."""
    if plan.layout.num_replicas == 1:
        return ""
    size = format_bytes(float(plan.replica_bytes.mean()))
    if plan.sync_interval == 1:
        return f"Between groups: gradients of rows at each step, {size} per rank, which is exact"
    what = f"rows and their state are averaged once in {plan.sync_interval} steps"
    return f"Between groups: {what}, {size} per rank and step. Not the numbers of one process"


def matrix_in_words(matrix: NDArray[np.float64], what: str) -> str:
    """Return the largest entry of a matrix of bytes from row to column, without its diagonal. what: rank or node."""
    away = matrix - np.diag(matrix.diagonal())
    if not away.any():
        return f"Nothing is sent from {what} to {what}"
    row, column = np.unravel_index(int(away.argmax()), away.shape)
    return f"Most is sent from {what} {row} to {what} {column}: {format_bytes(float(away[row, column]))} per step"


def milliseconds_in_words(number: float) -> str:
    """Return a time: 0.0123 ms, 3.25 ms, 1,250 ms."""
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"
