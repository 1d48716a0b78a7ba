"""What a job's first batches look up in its tables: used for a plan, and saved beside it; nothing is trained."""

import json
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_distrec.advice.dry_module import DryModule
from lightning_distrec.atomic_files import replace_file
from lightning_distrec.errors import ConfigError
from lightning_distrec.prefetch.peek import first_batches, loaders_in, why_not
from lightning_distrec.sharding.planning.id_counts import IdStatistics
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.units import shortened


def look_at_data(module: Any, data: Any, num_batches: int) -> IdStatistics:
    """Return what the first batches of each training dataloader look up, as one rank would draw them.

    module, data: as the YAML describes them; hooks run as `fit` runs them on one rank. What a module computes of a
    batch is seen where it has `sparse_inputs`. Raises ConfigError: there is no data, or it fails.
    """
    found = IdStatistics()
    declare = getattr(module, "sparse_inputs", None)
    try:
        for loader in loaders_in(_loaders(module, data)):
            batches = first_batches(loader, num_batches) if not why_not(loader) else islice(iter(loader), num_batches)
            for batch in batches:
                found.look_at(batch, *([] if declare is None else [declare(batch)]))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--from-data: the data cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]}). "
            "It is built as for fit, but without a Trainer; plan without --from-data, or set pooling_factor."
        ) from error
    if not found.num_batches:
        raise ConfigError("--from-data: the training dataloader has no batch.")
    return found


def _loaders(module: Any, data: Any) -> Any:
    if data is not None:
        data.prepare_data()
        data.setup("fit")
        return data.train_dataloader()
    if not is_overridden("train_dataloader", module):
        raise ConfigError("--from-data: the YAML has no data, and its module no train_dataloader.")
    return module.train_dataloader()


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
