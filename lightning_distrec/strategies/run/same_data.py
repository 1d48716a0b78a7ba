"""Warns where ranks read the same data: their first batches are compared once, through the store."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_distrec._compat.patches import Patches
from lightning_distrec.batches import RankReports, fingerprint
from lightning_distrec.units import format_ranks

NUM_BATCHES = 2
"""How many are compared: one may be alike by chance."""
MAX_TRIES = 100
"""In how many steps rank 0 looks for the other ranks' reports, which it does not wait for."""


def compare_first_batches(strategy: Any) -> Patches:
    """Compare the ranks' first batches in the first training steps, and leave the step's path after them."""
    patches, reports = Patches(), RankReports()
    if strategy.world_size == 1:
        return patches
    digests: list[str] = []
    tries = 0
    training_step = strategy.training_step

    def compare_and_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal tries
        if len(digests) < NUM_BATCHES:
            digests.append(fingerprint(batch))
            if len(digests) == NUM_BATCHES:
                # Ranks of a pipeline have the same batches on purpose.
                reports.put({"reader": strategy.distributed_sampler_kwargs["rank"], "batches": digests})
        elif (all_reports := reports.take() if strategy.global_rank == 0 else []) is not None or tries == MAX_TRIES:
            patches.close()
            if text := describe_same_data(all_reports or []):
                rank_zero_warn(text)
        else:
            tries += 1
        return training_step(batch, *args, **kwargs)

    patches.replace(strategy, "training_step", compare_and_step)
    return patches


def describe_same_data(reports: list[dict[str, Any]]) -> str:
    """Return which ranks have read the same batches, and what to do; "" for none."""
    ranks_by_batches: dict[tuple[str, ...], list[int]] = {}
    for rank, report in enumerate(reports):
        readers = {reports[other]["reader"] for other in ranks_by_batches.setdefault(tuple(report["batches"]), [])}
        if report["reader"] not in readers:
            ranks_by_batches[tuple(report["batches"])].append(rank)
    same = [ranks for batches, ranks in ranks_by_batches.items() if len(ranks) > 1 and all(batches)]
    if not same:
        return ""
    groups = "; ".join(f"ranks {format_ranks(ranks)}" for ranks in same)
    return (
        f"{groups} read the same data: their first {NUM_BATCHES} batches are equal. Nobody divides an IterableDataset "
        "among ranks: let it skip what is not this rank's, by torch.distributed.get_rank() and get_world_size(). A "
        "dataset with a length is divided, unless Trainer(use_distributed_sampler=False). The callback DataReport "
        "shows what each rank reads."
    )
