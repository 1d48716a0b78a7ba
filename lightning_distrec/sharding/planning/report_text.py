"""The start table: each table with its sharding type, ranks and update; and findings about a plan
in sentences."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console, JustifyMethod
from rich.table import Table as TextTable

from lightning_distrec.sharding.planning.planned_table import PlannedTable
from lightning_distrec.sharding.planning.sharding_plan import RankUsage, ShardingPlan
from lightning_distrec.sharding.planning.traffic import TRAFFIC_KINDS
from lightning_distrec.sharding.sharders import HOST_KERNELS, QuantizedComms
from lightning_distrec.units import format_bytes, format_ranks, print_wide, quantity, shortened


def headline(plan: ShardingPlan) -> str:
    """Return the number of tables and ranks, and whether the tables fit."""
    layout = plan.layout
    nodes = f" on {quantity(layout.num_nodes, 'node')}" if layout.num_nodes > 1 else ""
    text = f"{quantity(len(plan.tables), 'table')} over {quantity(layout.num_ranks, 'rank')}{nodes}"
    if layout.num_replicas > 1:
        text += f" in each of {layout.num_replicas} groups"
    return f"{text}: {'all tables fit' if plan.fits else 'the tables do not fit into memory'}"


def memory_in_words(memory: RankUsage, memory_kind: str) -> str:
    """Return whether the memory suffices, and which rank has the least left. memory_kind: GPU or
    host."""
    # The rank with the fewest free bytes, which is not always the one with the largest tables:
    # memories may differ.
    worst = memory.worst
    held = int(memory.tables[worst])
    usable = int(memory.usable[worst])
    is_single = len(memory.tables) == 1
    sizes = f"{format_bytes(held)} of {format_bytes(usable)}"
    if held > usable:
        over = int((memory.tables > memory.usable).sum())
        excess = f", and {quantity(over - 1, 'more rank')} would need too much" if over > 1 else ""
        subject = "the rank" if is_single else f"rank {worst}"
        return f"Too full: {subject} would need {sizes} of {memory_kind} memory{excess}"
    subject = "The rank" if is_single else f"Rank {worst}, the fullest,"
    share = held / usable if usable else 0.0
    filled = f"{share:.0%}" if share >= 0.01 or not held else "under 1%"
    return f"{subject} fills {filled} of its {memory_kind} memory: {sizes}"


def time_in_words(plan: ShardingPlan) -> str:
    """Return how long the slowest rank spends on tables; "" if the plan was not estimated."""
    if not plan.cost.known:
        return ""
    rank_times = plan.cost.milliseconds_by_rank
    path = plan.cost.critical_path
    slowest = float(rank_times.max())
    mean = float(rank_times.mean())
    # Within half a percent ranks count as equal: the numbers are printed with three digits.
    is_even = slowest <= 1.005 * mean
    text = f"Estimated time for tables, per step: {milliseconds_in_words(slowest)}"
    if is_even and len(rank_times) > 1:
        text += " on every rank"
    if not is_even:
        text += f" on the slowest rank ({int(rank_times.argmax())})"
        text += f", {milliseconds_in_words(mean)} on average"
    if path > 1.005 * slowest:
        text += f"; {milliseconds_in_words(path)} with waits for the slowest rank of each exchange"
    return text


def updates_in_words(plan: ShardingPlan) -> str:
    """Return what takes most of the slowest rank's updates and what would change it; "" where that
    helps little."""
    if not plan.cost.known:
        return ""
    slowest = plan.cost.slowest
    all_of_it = plan.cost.milliseconds_by_rank[slowest]
    updates = plan.cost.part("update")[slowest]
    if updates < UPDATES_THAT_MATTER_MS or 2 * updates <= all_of_it:
        return ""
    times: dict[tuple[str, str], float] = defaultdict(float)
    tables_by_update: dict[tuple[str, str], list[PlannedTable]] = defaultdict(list)
    for table in plan.tables.values():
        times[table.update, table.optimizer] += table.update_on(slowest)
        tables_by_update[table.update, table.optimizer].append(table)
    kind, optimizer = max(times, key=times.__getitem__)
    time = times[kind, optimizer]
    tables = tables_by_update[kind, optimizer]
    name = f"'{tables[0].name}'" if len(tables) == 1 else quantity(len(tables), "table")
    share = f"{time:.3g} of {milliseconds_in_words(all_of_it)} on rank {slowest}"
    rows = f"{'all' if kind == 'dense' else 'touched'} rows of {name}"
    text = f"Updates outweigh lookups: {kind} {optimizer} moves {rows} in each step, {share}"
    if kind != "dense":
        return text
    # Lazy Adam gives other numbers and runs on GPUs only, so that it is mentioned and never chosen.
    lazy = ""
    if plan.on_gpu and "Adam" in optimizer:
        lazy = " or, not with the same numbers, embedding_update fused_lazy"
    if tables[0].sharding_type == "data_parallel":
        return f"{text}. Sharded over the ranks, each would move its share"
    return f"{text}. table_optimizer Adagrad{lazy} would move those that a step looks up"


def ids_in_words(plan: ShardingPlan) -> str:
    """Return how many ids the estimates count on; "" for a plan that was made for no batch."""
    if not plan.batch_size:
        return ""
    factors = [factor for table in plan.tables.values() for factor in table.pooling_factors]
    low = min(factors)
    high = max(factors)
    ids = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    return (
        f"Estimates take each example to have {ids} ids per feature; planning.estimate_pooling "
        "counts them"
    )


def sent_in_words(plan: ShardingPlan) -> str:
    """Return how much ranks send, how much of it to other nodes, and which rank sends the most; ""
    for a plan that was made for no batch."""
    if not plan.batch_size:
        return ""
    traffic = plan.traffic
    if traffic.layout.num_ranks == 1:
        return "Nothing is sent: there is only one rank"
    sent = traffic.sent()
    text = f"Estimated bytes sent for tables, per rank and step: {format_bytes(float(sent.mean()))}"
    if traffic.layout.num_nodes > 1 and sent.sum() > 0:
        text += f", {traffic.across_nodes().sum() / sent.sum():.0%} of it to other nodes"
    if sent.max() > 1.005 * sent.mean():
        text += f"; most by rank {int(sent.argmax())}: {format_bytes(float(sent.max()))}"
    return text


def replicas_in_words(plan: ShardingPlan) -> str:
    """Return what groups of ranks with a replica of the tables each send to each other; "" for one
    group."""
    if plan.layout.num_replicas == 1:
        return ""
    size = format_bytes(float(plan.replica_bytes.mean()))
    if plan.sync_interval == 1:
        return f"Between groups: gradients of rows at each step, {size} per rank, which is exact"
    description = f"rows and their state are averaged once in {plan.sync_interval} steps"
    return (
        f"Between groups: {description}, {size} per rank and step. Not the numbers of one process"
    )


def start_in_words(plan: ShardingPlan) -> str:
    """Return what tables take of the host while ranks start, by how they are built."""
    shards = plan.start_bytes(full=False)
    full = plan.start_bytes(full=True)
    text = (
        f"Host memory for tables while a rank starts: {format_bytes(int(shards.max()))} if "
        f"configure_model builds them; if __init__ does, {format_bytes(int(full[0]))} on rank 0"
    )
    if len(full) > 1:
        text += f", {format_bytes(int(full[1:].max()))} on others"
    ranks = max(plan.layout.ranks_by_node)
    if ranks > 1:
        tables = sum(table.num_bytes for table in plan.tables.values())
        text += f", {format_bytes(ranks * tables)} on a node of {ranks} that build them"
    return text


def matrix_in_words(matrix: NDArray[np.float64], kind: str) -> str:
    """Return the largest entry of a matrix of bytes from row to column, without its diagonal. kind:
    rank or node."""
    # The diagonal is what stays, on a node often the most.
    away = matrix - np.diag(matrix.diagonal())
    if not away.any():
        return f"Nothing is sent from {kind} to {kind}"
    row, column = np.unravel_index(int(away.argmax()), away.shape)
    return (
        f"Most is sent from {kind} {row} to {kind} {column}: "
        f"{format_bytes(float(away[row, column]))} per step"
    )


def milliseconds_in_words(number: float) -> str:
    """Return a time: 0.0123 ms, 3.25 ms, 1,250 ms."""
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"


UPDATES_THAT_MATTER_MS = 1.0
"""Updates of less time are a small part of any step."""
MAX_TABLES = 60
"""Number of printed tables; of more, the largest are printed."""
MAX_RANKS = 8
"""Number of ranks that are listed one by one."""


def print_plan(
    plan: ShardingPlan,
    output_dtype: torch.dtype | None = None,
    planned_with: str = "",
    left_alone: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> None:
    """Print the start table. Call it on one rank.

    output_dtype: of looked up rows; None for float32. left_alone: path -> reason, of modules that
    are not sharded.
    """
    tables = list(plan.tables.values())
    layout = plan.layout
    title = f"Embedding tables over {quantity(layout.num_ranks, 'rank')}"
    title += f" in each of {layout.num_replicas} groups" if layout.num_replicas > 1 else ""
    lines = [
        _memory(plan),
        _types(tables, output_dtype),
        _comms(plan.comms),
        time_in_words(plan),
        updates_in_words(plan),
        sent_in_words(plan),
        ids_in_words(plan),
        replicas_in_words(plan),
        _deduplicated(tables),
        _in_host_memory(tables),
        _rest(tables),
        planned_with,
        *_left_alone(left_alone or {}),
    ]
    caption = "\n".join(line for line in lines if line)
    text = TextTable(title=title, title_justify="left", caption=caption, caption_justify="left")
    headings = ("table", "rows x dim", "sharding type", "ranks", "largest shard", "update", "why")
    for heading in headings:
        justify: JustifyMethod = "right" if heading in ("rows x dim", "largest shard") else "left"
        text.add_column(heading, justify=justify, overflow="fold")
    # The largest are selected, and printed in the model's order, in which users look for them.
    largest = sorted(tables, key=lambda table: -table.num_rows * table.dim)[:MAX_TABLES]
    names = {table.name for table in largest}
    for table in tables:
        if table.name not in names:
            continue
        text.add_row(
            table.name,
            f"{table.num_rows:,} x {table.dim}",
            table.sharding_type,
            some_ranks_in_words(np.unique(table.ranks).tolist()),
            format_bytes(table.largest_shard_bytes),
            table.update,
            table.update_reason,
        )
    print_wide(text, console)


def some_ranks_in_words(ranks: list[int]) -> str:
    """Return the ranks one by one, or their number and range where there are many. ranks:
    sorted."""
    text = format_ranks(ranks)
    return text if text.count(",") < MAX_RANKS else f"{len(ranks)} of {ranks[0]}-{ranks[-1]}"


def _rest(tables: Sequence[PlannedTable]) -> str:
    num_hidden = len(tables) - MAX_TABLES
    if num_hidden <= 0:
        return ""
    hidden = quantity(num_hidden, "smaller table")
    return f"{hidden} not shown; the callback PlanLogger writes them all"


def _deduplicated(tables: Sequence[PlannedTable]) -> str:
    """Return a line about tables whose repeated ids are sent once."""
    texts = []
    for table in tables:
        if table.deduplicated:
            texts.append(f"{table.name} ({table.distinct_share:.0%} are different)")
    return f"Ids that a batch repeats are sent once: {shortened(texts, MAX_RANKS)}" if texts else ""


def _in_host_memory(tables: Sequence[PlannedTable]) -> str:
    """Return a line about tensors that a GPU reads from host memory (UVM)."""
    texts = []
    for table in tables:
        if table.compute_kernel in HOST_KERNELS:
            # FBGEMM keeps state of one number for each row on the GPU.
            tensors = "rows and optimizer state" if table.update_bytes_per_element else "rows"
            share = table.cache_load_factor
            cached = f", {share:.0%} cached on the GPU" if share else ""
            texts.append(f"{table.name} ({tensors}{cached})")
    return f"In host memory (UVM): {shortened(texts, MAX_RANKS)}" if texts else ""


def _left_alone(reasons: Mapping[str, str]) -> list[str]:
    lines = []
    for path, reason in reasons.items():
        lines.append(f"'{path}' is not sharded, every rank has all of it: {reason}")
    if len(lines) <= MAX_TABLES:
        return lines
    more = quantity(len(lines) - MAX_TABLES, "more module")
    return [*lines[:MAX_TABLES], f"{more} not sharded"]


def _memory(plan: ShardingPlan) -> str:
    held = plan.table_bytes()
    per_rank = ", ".join(
        f"rank {rank}: {format_bytes(total)}" for rank, total in enumerate(held[:MAX_RANKS])
    )
    suffix = f" ... largest {format_bytes(held.max())}" if len(held) > MAX_RANKS else ""
    return f"Memory for tables, gradients and optimizer state: {per_rank}{suffix}"


def _comms(comms: QuantizedComms) -> str:
    """Return a line about the types in which rows are sent, where they are rounded."""
    ways = f"rows are sent as {comms.forward}, their gradients as {comms.backward}"
    return "" if comms.is_exact else f"quantized_comms: {ways}, which rounds them"


def _types(tables: Sequence[PlannedTable], output_dtype: torch.dtype | None) -> str:
    """Return a line about types, unless all are float32."""
    names: dict[str, list[str]] = {}
    for table in tables:
        names.setdefault(f"float{8 * table.element_bytes}", []).append(table.name)
    kinds = list(names)
    if kinds == ["float32"] and output_dtype is None:
        return ""
    text = f"rows are {' or '.join(kinds)}"
    if output_dtype is not None:
        text += f" and are looked up as {str(output_dtype).removeprefix('torch.')}"
    other_tables = "; ".join(f"{kind}: {', '.join(names[kind])}" for kind in kinds[1:])
    return f"{text} ({other_tables})" if other_tables else text


def rank_columns(plan: ShardingPlan) -> list[tuple[str, NDArray[Any], Callable[[float], str]]]:
    """Return what each rank holds, takes and sends: name, (R,) numbers, how one of them is
    written."""
    memory = plan.memory
    sent = plan.traffic
    columns: list[tuple[str, NDArray[Any], Callable[[float], str]]] = [
        ("memory for tables", memory.tables, format_bytes),
    ]
    for part, part_bytes in plan.memory_parts().items():
        columns.append((f"... {part}", part_bytes, format_bytes))
    columns.append(("usable memory", memory.usable, format_bytes))
    if plan.dense_bytes:
        layers = np.full(plan.num_ranks, plan.dense_bytes)
        columns.append(("layers without tables", layers, format_bytes))
    if plan.host_memory is not None:
        columns.append(("host memory for tables", plan.host_memory.tables, format_bytes))
    if plan.cost.known:
        columns.append(("estimated time", plan.cost.milliseconds_by_rank, milliseconds_in_words))
    for kind in TRAFFIC_KINDS:
        kind_bytes = sent.sent(kind)
        if kind_bytes.any():
            columns.append((f"sent: {kind}", kind_bytes, format_bytes))
    if sent.layout.num_nodes > 1:
        columns.append(("sent to other nodes", sent.across_nodes(), format_bytes))
    return columns
