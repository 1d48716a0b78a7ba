"""Compares what ranks do apart: the names of values that they log, and the data that they read.

Values of `self.log(sync_dist=True)`, and metrics, are reduced one after the other, by their order
on each rank. Where ranks have logged other names, or in another order, Lightning mixes them, or
some ranks wait.
"""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_distrec._compat.lightning_logging import reduced_values, reorder_reduced_values
from lightning_distrec._compat.patches import Patches
from lightning_distrec.batches import fingerprint
from lightning_distrec.errors import RankError
from lightning_distrec.prefetch.loaders import loaders_in, original_loader, peek_obstacle
from lightning_distrec.ranks import Ranks, number_for
from lightning_distrec.units import format_ranks

NUM_BATCHES = 2
"""How many first batches are compared: one may be alike by chance."""


class LoggedKeys:
    """Compares the names over the ranks of one trainer."""

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._num_steps = 0

    def before_step(self) -> None:
        """Collective after 1, 2, 4, 8 ... training steps. Compare what is reduced in each step.

        Raises RankError on every rank: ranks have reduced values of other names as one.
        """
        steps = self._num_steps
        self._num_steps = self._num_steps + 1
        if self._ranks.num_ranks == 1 or steps == 0 or steps & (steps - 1):
            return
        self._compare([
            (key, *value) for key, value in reduced_values(self._trainer).items() if value[1]
        ])

    def before_epoch_ends(self) -> None:
        """Collective. Compare all that is reduced, and reduce it in rank 0's order. Raises as
        `before_step`."""
        if self._ranks.num_ranks > 1:
            self._compare([(key, *value) for key, value in reduced_values(self._trainer).items()])

    def _compare(self, values: list[tuple[str, str, bool]]) -> None:
        """values: of each its key, its name, and whether it is reduced in each step."""
        number = number_for(values)
        smallest, negated = self._ranks.start_all_reduce_min(number, -number).wait()
        if smallest == -negated:
            return
        per_rank = self._ranks.all_gather(values)
        gathered = [list(map(tuple, remote)) for remote in per_rank]
        in_steps = list(map(_in_each_step, gathered))
        is_reordered = all(sorted(remote) == sorted(gathered[0]) for remote in gathered)
        if is_reordered and all(remote == in_steps[0] for remote in in_steps):
            reorder_reduced_values(self._trainer, [key for key, *_ in gathered[0]])
            return
        rank = next(rank for rank, remote in enumerate(gathered) if remote != gathered[0])
        raise RankError(
            f"self.log: rank 0 reduces {_names(gathered[0])} over the ranks, and rank {rank} "
            f"{_names(gathered[rank])}: values of different names are mixed. Log what has "
            "sync_dist=True, and metrics, on every rank, under no condition that differs between "
            "ranks or batches; or log it with sync_dist=False."
        )


def _in_each_step(values: list[Any]) -> list[Any]:
    return [value for value in values if value[2]]


def _names(values: list[Any]) -> list[str]:
    return [name for _, name, _ in values]


def compare_first_batches(strategy: Any) -> Patches:
    """Compare the ranks' first batches in the first training steps, and leave the step's path after
    them."""
    patches = Patches()
    if strategy.world_size == 1:
        return patches
    digests: list[str] = []
    training_step = strategy.training_step

    def compare_and_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        digests.append(fingerprint(batch))
        if len(digests) == NUM_BATCHES:
            patches.close()
            # Ranks of a pipeline have the same batches on purpose.
            report = {"reader": strategy.distributed_sampler_kwargs["rank"], "batches": digests}
            loaders = map(original_loader, loaders_in(strategy.module.trainer.train_dataloader))
            text = describe_same_data(strategy.exchange(report), any(map(peek_obstacle, loaders)))
            if text:
                rank_zero_warn(text)
        return training_step(batch, *args, **kwargs)

    patches.replace(strategy, "training_step", compare_and_step)
    return patches


def describe_same_data(reports: list[dict[str, Any]], is_iterable: bool) -> str:
    """Return which ranks have read the same batches, and what to do; "" for none.

    is_iterable: whether there is a loader without a sampler, which nobody divides among ranks.
    """
    ranks_by_batches: dict[tuple[str, ...], list[int]] = {}
    for rank, report in enumerate(reports):
        readers = set()
        for other in ranks_by_batches.setdefault(tuple(report["batches"]), []):
            readers.add(reports[other]["reader"])
        if report["reader"] not in readers:
            ranks_by_batches[tuple(report["batches"])].append(rank)
    shared = [
        ranks for batches, ranks in ranks_by_batches.items() if len(ranks) > 1 and all(batches)
    ]
    if not shared:
        return ""
    groups = "; ".join(f"ranks {format_ranks(ranks)}" for ranks in shared)
    cause = (
        "Nobody divides an IterableDataset among ranks: let it skip what is not this rank's, by "
        "torch.distributed.get_rank() and get_world_size()."
        if is_iterable
        else "Either their samplers draw the same items: leave Trainer(use_distributed_sampler) "
        "true, or divide them. Or items are made of random numbers, which are the same on all "
        "ranks after one seed: draw them in __getitem__ by a torch.Generator that is seeded with "
        "the item's index."
    )
    return (
        f"{groups} read the same data: their first {NUM_BATCHES} batches are equal. {cause} The "
        "callback DataReport shows what each rank reads."
    )
