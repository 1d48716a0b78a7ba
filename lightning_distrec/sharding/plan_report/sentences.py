"""What is to be said of a plan in a sentence: the findings above its pictures and on top of its page."""

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.sharding.plan_report.facts import MemoryOfRanks, PlanFacts
from lightning_distrec.units import format_bytes, quantity


def headline(facts: PlanFacts) -> str:
    """Return how many tables there are over how many ranks, and whether they fit."""
    places = facts.places
    nodes = f" on {quantity(places.num_nodes, 'node')}" if places.num_nodes > 1 else ""
    where = f"{quantity(len(facts.tables), 'table')} over {quantity(places.num_ranks, 'rank')}{nodes}"
    return f"{where}: {'all fits' if facts.fits else 'too much for the memory there is'}"


def memory_in_words(memory: MemoryOfRanks, where: str) -> str:
    """Return whether a memory is enough, and for whom it is scarcest. where: "GPU" or "host"."""
    worst = memory.worst
    held, usable = int(memory.tables[worst]), int(memory.usable[worst])
    alone = len(memory.tables) == 1
    sizes = f"{format_bytes(held)} of {format_bytes(usable)}"
    if held > usable:
        over = int((memory.tables > memory.usable).sum())
        others = f", and {quantity(over - 1, 'more rank')} too much" if over > 1 else ""
        return f"Too full: {'the rank' if alone else f'rank {worst}'} would need {sizes} of {where} memory{others}"
    who = "The rank" if alone else f"Rank {worst}, the fullest,"
    share = held / usable if usable else 0.0
    return f"{who} fills {f'{share:.0%}' if share >= 0.01 or not held else 'under 1%'} of its {where} memory: {sizes}"


def time_in_words(facts: PlanFacts) -> str:
    """Return who spends how long on tables; "" where that is not known."""
    if facts.cost is None:
        return ""
    by_rank = facts.cost.milliseconds_by_rank
    slowest, mean = facts.cost.critical_path, float(by_rank.mean())
    if len(by_rank) == 1:
        return f"A step spends {milliseconds_in_words(slowest)} on tables"
    more = ", as do all"
    if slowest > 1.005 * mean:
        more = f", {slowest / mean - 1:.0%} more than the mean of {milliseconds_in_words(mean)}"
    who = f"Rank {int(by_rank.argmax())}, the slowest,"
    return f"{who} spends {milliseconds_in_words(slowest)} of a step on tables{more}"


def sent_in_words(facts: PlanFacts) -> str:
    """Return how much ranks send, how much of it to other nodes, and who the most."""
    traffic = facts.traffic
    if traffic.places.num_ranks == 1:
        return "Nothing is sent: there is one rank"
    sent = traffic.sent()
    across = ""
    if traffic.places.num_nodes > 1 and sent.sum() > 0:
        across = f", {traffic.across_nodes().sum() / sent.sum():.0%} of it to other nodes"
    most = ""
    if sent.max() > 1.005 * sent.mean():
        most = f"; rank {int(sent.argmax())} the most, {format_bytes(float(sent.max()))}"
    return f"A rank sends {format_bytes(float(sent.mean()))} a step in the mean{across}{most}"


def matrix_in_words(matrix: NDArray[np.float64], what: str) -> str:
    """Return who sends most to whom. matrix: from row to column; the diagonal does not count. what: rank or node."""
    away = matrix - np.diag(matrix.diagonal())
    if not away.any():
        return f"Nothing is sent from {what} to {what}"
    row, column = np.unravel_index(int(away.argmax()), away.shape)
    return f"Most goes from {what} {row} to {what} {column}: {format_bytes(float(away[row, column]))} a step"


def milliseconds_in_words(number: float) -> str:
    """Return a time: 0.0123 ms, 3.25 ms, 1,250 ms."""
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"
