"""What ranks hold for the tables of a plan, and whether they have as much."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lightning_distrec.errors import InfeasiblePlanError
from lightning_distrec.sharding.planning.planned_tables import PlannedTable
from lightning_distrec.sharding.planning.reservation import Reservation
from lightning_distrec.sharding.planning.topology import RankMemory


def held_bytes(tables: Iterable[PlannedTable], num_ranks: int, on_host: bool = False) -> NDArray[np.int64]:
    """Return, (num_ranks,), what each rank holds for tables: rows, optimizer state, kept gradients, in bytes.

    on_host: of the tables that a GPU reads from its host's memory, rather than of the others.
    """
    totals = np.zeros(num_ranks)
    for table in tables:
        if table.on_host == on_host:
            elements = table.shard_rows * table.shard_columns
            held = elements * (table.element_bytes + table.update_bytes_per_element)
            totals += np.bincount(
                table.ranks, held + table.shard_rows * table.update_bytes_per_row, minlength=num_ranks
            )
    return np.rint(totals).astype(np.int64)


def check_memory(tables: Iterable[PlannedTable], memory: RankMemory, reservation: Reservation) -> None:
    """Raise InfeasiblePlanError where a rank would hold more for its tables than it has.

    Plans of the planner fit; those of files and of earlier runs may not. Tables that a GPU reads from its host's memory
    are the planner's to count.
    """
    usable = memory.less(reservation).device_bytes
    held = held_bytes(tables, len(usable))
    worst = int((held - np.asarray(usable)).argmax())
    if held[worst] > usable[worst]:
        raise InfeasiblePlanError(
            f"rank {worst} would hold {held[worst]:,} bytes for its tables (rows, gradients, optimizer state), but "
            f"has {usable[worst]:,} (memory_bytes_per_rank={memory.device_bytes[worst]:,} less "
            f"{reservation.in_words}). Use more ranks, or an optimizer with a fused update (SGD, Adagrad, "
            "RowWiseAdagrad), which keeps no gradient."
        )
