"""A plan as text: what each table is, where its shards are, what it costs per rank, and what updates it."""

from collections.abc import Iterable

import torch
from rich.console import Console
from rich.table import Table as TextTable
from torchrec.distributed.types import EnumerableShardingSpec
from torchrec.modules.embedding_configs import DataType

from lightning_distrec.errors import NoRoomError
from lightning_distrec.sharding.planning.plan import Plan
from lightning_distrec.sharding.planning.plan_cost import PlanCost
from lightning_distrec.sharding.planning.planned_tables import UpdateCost
from lightning_distrec.sharding.planning.reservation import Reservation
from lightning_distrec.sharding.planning.topology import RankMemory
from lightning_distrec.sharding.planning.traffic import Traffic
from lightning_distrec.sharding.quantized_comms import QuantizedComms
from lightning_distrec.sharding.tables import Table
from lightning_distrec.words import bytes_in_words, counted, ranks_in_words

NARROWEST_COLUMNS = 150
"""Width of the printed table where the output is no terminal."""
MOST_TABLES = 60
"""So many tables are printed; of more, the largest."""
MOST_RANKS = 8
"""So many ranks are named one by one."""


def shards_by_rank(table: Table, plan: Plan, num_ranks: int) -> dict[int, tuple[int, int]]:
    """Return rank -> (rows, elements) of `table` that it holds."""
    spec = plan[table.full_name].sharding_spec
    config = table.config
    if not isinstance(spec, EnumerableShardingSpec):
        return dict.fromkeys(range(num_ranks), (config.num_embeddings, config.num_embeddings * config.embedding_dim))
    held: dict[int, tuple[int, int]] = {}
    for shard in spec.shards:
        assert shard.placement is not None
        rank = shard.placement.rank()
        assert rank is not None
        rows, elements = held.get(rank, (0, 0))
        held[rank] = (rows + shard.shard_sizes[0], elements + shard.shard_sizes[0] * shard.shard_sizes[1])
    return held


def bytes_by_rank(tables: Iterable[Table], plan: Plan, updates: dict[str, UpdateCost], num_ranks: int) -> list[int]:
    """Return what each rank holds for the tables in its own memory: rows, optimizer state, kept gradients, in bytes.

    Tables that a GPU reads from its host's memory (fused_uvm kernels) are the planner's to count.
    """
    totals = [0.0] * num_ranks
    for table in tables:
        if plan[table.full_name].compute_kernel.startswith("fused_uvm"):
            continue
        update = updates[table.full_name]
        element_bytes = torch.finfo(table.parameter.dtype).bits / 8 + update.bytes_per_element
        for rank, (rows, elements) in shards_by_rank(table, plan, num_ranks).items():
            totals[rank] += elements * element_bytes + rows * update.bytes_per_row
    return [round(total) for total in totals]


def check_memory(totals: list[int], memory: RankMemory, reservation: Reservation) -> None:
    """Raise NoRoomError where a rank would hold more for its tables than it has.

    The planner counts the rows only; gradients and state of dense updates come on top.
    """
    usable = memory.less(reservation).device_bytes
    worst = max(range(len(totals)), key=lambda rank: totals[rank] - usable[rank])
    if totals[worst] > usable[worst]:
        raise NoRoomError(
            f"rank {worst} would hold {totals[worst]:,} bytes for its tables (rows, gradients, optimizer state), but "
            f"has {usable[worst]:,} (memory_bytes_per_rank={memory.device_bytes[worst]:,} less "
            f"{reservation.in_words}). Use more ranks, or an optimizer with a fused update (SGD, Adagrad, "
            "RowWiseAdagrad), which keeps no gradient."
        )


def print_plan(
    tables: list[Table],
    plan: Plan,
    updates: dict[str, UpdateCost],
    totals: list[int],
    output_dtype: torch.dtype | None = None,
    comms: QuantizedComms | None = None,
    planned_with: str = "",
    console: Console | None = None,
    cost: PlanCost | None = None,
    traffic: Traffic | None = None,
) -> None:
    """Print the start table. Call it on one rank.

    output_dtype: the type of looked up rows; None for float32. comms: the types in which they travel.
    planned_with: a line about what the planner went by. cost: its estimates; None: not known. traffic: what ranks send;
    None: not told.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=NARROWEST_COLUMNS, file=console.file)
    num_ranks = len(totals)
    text = TextTable(
        title=_title(totals),
        title_justify="left",
        caption=_caption(tables, totals, output_dtype)
        + _travel(comms)
        + _time(cost)
        + _sent(traffic)
        + _rest(tables)
        + (f"\n{planned_with}" if planned_with else ""),
        caption_justify="left",
    )
    for heading in ("table", "rows x dim", "cut", "on ranks", "largest shard", "update", "why"):
        text.add_column(heading, justify="right" if heading in ("rows x dim", "largest shard") else "left")
    for table in _printed(tables):
        held = shards_by_rank(table, plan, num_ranks)
        update = updates[table.full_name]
        largest = max(elements for _, elements in held.values()) * torch.finfo(table.parameter.dtype).bits // 8
        text.add_row(
            table.full_name,
            f"{table.config.num_embeddings:,} x {table.config.embedding_dim}",
            plan[table.full_name].sharding_type,
            some_ranks_in_words(sorted(held)),
            bytes_in_words(largest),
            update.kind,
            update.why,
        )
    console.print(text)


def some_ranks_in_words(ranks: list[int]) -> str:
    """Return the ranks one by one, or how many they are where that would fill a line. ranks: sorted."""
    said = ranks_in_words(ranks)
    return said if said.count(",") < MOST_RANKS else f"{len(ranks)} of {ranks[0]}-{ranks[-1]}"


def _printed(tables: list[Table]) -> list[Table]:
    """Return the tables that are printed, in their order."""
    if len(tables) <= MOST_TABLES:
        return tables
    largest = sorted(tables, key=lambda t: -t.config.num_embeddings * t.config.embedding_dim)[:MOST_TABLES]
    names = {table.full_name for table in largest}
    return [table for table in tables if table.full_name in names]


def _rest(tables: list[Table]) -> str:
    more = len(tables) - MOST_TABLES
    return f"\n{counted(more, 'smaller table')} not shown; the callback PlanLogger writes them all" if more > 0 else ""


def _time(cost: PlanCost | None) -> str:
    """Return a line about the estimated time of a step, where it is known."""
    if cost is None:
        return ""
    by_rank = cost.milliseconds_by_rank
    said = f"\nEstimated time for tables in a step: {cost.critical_path:.3g} ms"
    if len(by_rank) == 1:
        return said
    mean = float(by_rank.mean())
    if cost.critical_path <= 1.005 * mean:
        return f"{said} on every rank"
    return f"{said} on the slowest rank ({int(by_rank.argmax())}), {mean:.3g} ms in the mean of ranks"


def _sent(traffic: Traffic | None) -> str:
    """Return a line about what ranks send, where there are several."""
    if traffic is None or traffic.places.num_ranks == 1:
        return ""
    sent, within, across = traffic.sent(), traffic.within_node(), traffic.across_nodes()
    nodes = ""
    if traffic.places.num_nodes > 1:
        nodes = f" ({bytes_in_words(within.mean())} within its node, {bytes_in_words(across.mean())} across nodes)"
    most = f"; the most, {bytes_in_words(sent.max())}, by rank {int(sent.argmax())}" if sent.max() > sent.min() else ""
    return f"\nSent for tables by a rank in a step, estimated: {bytes_in_words(sent.mean())}{nodes}{most}"


def _title(totals: list[int]) -> str:
    ranks = "1 rank: nothing is shared out" if len(totals) == 1 else f"{len(totals)} ranks"
    return f"Embedding tables over {ranks}"


def _caption(tables: list[Table], totals: list[int], output_dtype: torch.dtype | None) -> str:
    per_rank = ", ".join(f"rank {rank}: {bytes_in_words(total)}" for rank, total in enumerate(totals[:8]))
    more = f" ... largest {bytes_in_words(max(totals))}" if len(totals) > 8 else ""
    return f"Memory for tables, gradients and optimizer state: {per_rank}{more}{_types(tables, output_dtype)}"


def _travel(comms: QuantizedComms | None) -> str:
    """Return a line about how rows travel, where they are rounded for it."""
    if comms is None or comms.is_exact:
        return ""
    ways = f"rows travel as {comms.forward}, their gradients as {comms.backward}"
    return f"\nquantized_comms: {ways}: not the same numbers"


def _types(tables: list[Table], output_dtype: torch.dtype | None) -> str:
    """Return a line about types where they are not all float32."""
    rows = list(dict.fromkeys(_row_type(table) for table in tables))
    if rows == ["float32"] and output_dtype is None:
        return ""
    looked_up = "" if output_dtype is None else f" and are looked up as {_short(output_dtype)}"
    names = {kind: [t.full_name for t in tables if _row_type(t) == kind] for kind in rows}
    of = "" if len(rows) == 1 else "; ".join(f" {kind}: {', '.join(names[kind])}" for kind in rows[1:])
    return f"\nrows are {' or '.join(rows)}{looked_up}{f' ({of.strip()})' if of else ''}"


def _row_type(table: Table) -> str:
    return "float16" if table.config.data_type == DataType.FP16 else "float32"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
