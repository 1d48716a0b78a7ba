"""Reports what a step sends, by the ids of the first one, where nothing has counted them before.

No loader is asked for a batch before its time: the lookups of the first training step show rank 0
their ids. The plan stays, as it depends on nothing that ranks may see differently.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_distrec._compat.patches import Patches
from lightning_distrec.sharding.planning.report_text import ids_in_words, sent_in_words
from lightning_distrec.sharding.planning.sharding_plan import NOT_ESTIMATED, ShardingPlan
from lightning_distrec.strategies.tables.run_tables import RunTables
from lightning_distrec.strategies.tables.set_up_inputs import SetUpInputs


def estimate_by_first_step(inputs: SetUpInputs, tables: RunTables) -> Patches:
    """Let this rank print, after the lookups of its first training step, what is sent for them."""
    patches = Patches()
    strategy: Any = inputs.trainer.strategy
    training_step = strategy.training_step
    requests: list[Any] = []

    def keep(note_call: Any, request: Any) -> None:
        requests.append(request)
        note_call(request)

    def step_and_estimate(*args: Any) -> Any:
        for lookup in tables.lookups:
            patches.replace(lookup, "note_call", partial(keep, lookup.note_call))
        output = training_step(*args)
        patches.close()
        plan = _with_ids_of(requests, tables, inputs.settings.batch_size_per_rank)
        text = f"{sent_in_words(plan)}. {ids_in_words(plan)}"
        rank_zero_info(f"torchrec_sharded: by the ids of the first step: {text}.")
        return output

    patches.replace(strategy, "training_step", step_and_estimate)
    return patches


def _with_ids_of(requests: list[Any], tables: RunTables, size: int | None) -> ShardingPlan:
    """Return the plan with the ids that lookups of a step send, and without times.

    size: examples of a rank; None: as in the lookups.
    """
    size = size or max([1, *(request.features.stride() for request in requests)])
    sent: Counter[tuple[str, str]] = Counter()
    for request in requests:
        features = request.padded_features
        for key, number in zip(features.keys(), features.length_per_key(), strict=True):
            sent[request.setup.path, key] += number
    planned = {}
    for table in tables.shards.tables:
        name = table.full_name
        factors = tuple(sent[table.collection, key] / size for key in table.config.feature_names)
        planned[name] = replace(
            tables.plan.tables[name], pooling_factors=factors, distinct_share=1.0
        )
    return replace(tables.plan, tables=planned, batch_size=size, cost=NOT_ESTIMATED)
