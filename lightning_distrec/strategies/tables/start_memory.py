"""Whether each rank has the memory that sharding takes, asked before anything is sharded."""

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_distrec.errors import InfeasiblePlanError
from lightning_distrec.host_memory import free_host_bytes, free_process_bytes, host_memory_bytes
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.tables.set_up_inputs import SetUpInputs
from lightning_distrec.units import format_bytes

NUM_LISTED = 10
"""How many tables the message lists."""
UNLIMITED = 2**62
LARGE_PART = 8
"""Part of a node's memory above which full tables of all of its ranks are a warning."""


def check_start_memory(inputs: SetUpInputs, tables: list[Table], plan: ShardingPlan) -> None:
    """Collective. Raise InfeasiblePlanError on every rank: a node, process or GPU lacks memory for its shards.

    The plan has seen how much memory there is; this is about what is free of it, beside tables that were built in full.
    """
    _warn_of_full_tables(tables, max(inputs.layout.ranks_by_node))
    ranks, layout, on_gpu = inputs.consensus, inputs.layout, inputs.device.type == "cuda"
    position = ranks.rank % inputs.groups.size
    device_share, host_share = int(plan.table_bytes()[position]), int(plan.table_bytes(on_host=True)[position])
    if not on_gpu:
        device_share, host_share = 0, device_share + host_share
    if ranks.rank:  # these free their full tables before any shard is made
        device_share -= sum(t.parameter.nbytes for t in tables if t.parameter.is_cuda)
        host_share -= sum(t.parameter.nbytes for t in tables if t.parameter.device.type == "cpu")
    free_device = torch.cuda.mem_get_info(inputs.device)[0] if on_gpu else UNLIMITED
    needs = ranks.all_gather((host_share, device_share, free_host_bytes(), free_process_bytes(), free_device))
    lacks = [(f"rank {r}'s process", host, process) for r, (host, _, _, process, _) in enumerate(needs)]
    lacks += [(f"rank {r}'s GPU", device, free) for r, (_, device, _, _, free) in enumerate(needs)]
    for node in range(layout.num_nodes):
        node_needs = [need for need, rank_node in zip(needs, layout.node_of_rank, strict=True) if rank_node == node]
        lacks.append((f"node {node}", sum(need[0] for need in node_needs), min(need[2] for need in node_needs)))
    for place, needed, free in lacks:
        if needed > free:
            raise InfeasiblePlanError(_message(place, needed, free, tables, plan))


def _warn_of_full_tables(tables: list[Table], ranks_on_node: int) -> None:
    full, node_bytes = sum(t.parameter.nbytes for t in tables if t.parameter.device.type == "cpu"), host_memory_bytes()
    if ranks_on_node > 1 and full * ranks_on_node > node_bytes / LARGE_PART:
        rank_zero_warn(
            f"{ranks_on_node} ranks of a node have built {format_bytes(full)} of full tables each, "
            f"{format_bytes(full * ranks_on_node)} of its {format_bytes(node_bytes)}, before the strategy could share "
            "them out. Build tables in configure_model, under lightning_distrec.meta_tables() or under "
            "trainer.init_module(): each rank makes its own rows only."
        )


def _message(place: str, needed: int, free: int, tables: list[Table], plan: ShardingPlan) -> str:
    largest_first = sorted(tables, key=lambda table: -table.parameter.nbytes)
    lines = []
    for table in largest_first[:NUM_LISTED]:
        rows, columns = table.parameter.shape
        full = "" if table.parameter.is_meta else f"{format_bytes(table.parameter.nbytes)} in full on every rank, "
        shards = format_bytes(float(plan.tables[table.full_name].shard_bytes(updates=True).max()))
        lines.append(f"\n  - table '{table.full_name}' ({rows:,} x {columns}): {full}{shards} in its largest shard")
    if len(tables) > NUM_LISTED:
        lines.append(f"\n  - and {len(tables) - NUM_LISTED} more")
    way_out = "Use more ranks, so that each holds less."
    if not all(table.parameter.is_meta for table in tables):
        way_out = (
            "Build tables in configure_model or under meta_tables(): no rank holds a full one then. Or u" + way_out[1:]
        )
    return (
        f"{place} cannot hold its shards (rows, gradients, optimizer state): sharding takes {format_bytes(needed)} "
        f"more, and {format_bytes(free)} are free.{''.join(lines)}\n{way_out}"
    )
