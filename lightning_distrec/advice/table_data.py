"""What a job's own batches look up in its tables: used for a plan, and saved beside it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from lightning_distrec.advice.dry_module import DryModule
from lightning_distrec.atomic_files import replace_file
from lightning_distrec.sharding.planning.id_counts import IdStatistics
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.units import shortened

MAX_NAMED = 4
"""Number of tables that a message names."""


def with_data(dry: DryModule, statistics: IdStatistics) -> DryModule:
    """Return the module with what batches look up, for estimates; options that are set stay."""
    found = {table.full_name: data for table in dry.selection.tables if (data := statistics.of(table)) is not None}
    settings, assumed = dry.settings, list(dry.assumed)
    if settings.batch_size_per_rank is None and statistics.examples:
        settings = replace(settings, batch_size_per_rank=statistics.examples, batch_size_origin="of the first batch")
    unknown = [table.full_name for table in dry.selection.tables if table.full_name not in found]
    if unknown:
        assumed.append(
            f"--from-data: no batch holds the features of {shortened(unknown, MAX_NAMED)} by name, nor does what "
            "sparse_inputs(batch) returns"
        )
    return replace(dry, data=found, settings=settings, assumed=assumed)


def save_data(path: Path, plan: ShardingPlan) -> None:
    """Write what batches look up as JSON, by table. Raises OSError: it cannot be written."""
    tables = {
        name: asdict(table.data) | {"ids_per_row_of_a_batch": round(table.data.repeats, 4)}
        for name, table in plan.tables.items()
        if table.data is not None
    }
    replace_file(path, (json.dumps({"batch_size": plan.batch_size, "tables": tables}, indent=1) + "\n").encode())
