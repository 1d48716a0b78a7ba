"""What ranks reduce of their logged values is compared by name: values of other names would be averaged as one.

Values of `self.log(sync_dist=True)`, and metrics, are reduced one after the other, by their order on each rank. Where
ranks have logged other names, or in another order, Lightning mixes them, or some ranks wait.
"""

import hashlib

from lightning.pytorch import Trainer

from lightning_distrec._compat.lightning_logging import reduced_values, reorder_reduced_values
from lightning_distrec.errors import RankError
from lightning_distrec.ranks import Ranks


class LoggedKeys:
    """Compares the names over the ranks of one trainer."""

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self._trainer, self._ranks = trainer, ranks
        self._num_steps = 0

    def before_step(self) -> None:
        """Collective after 1, 2, 4, 8 ... training steps. Compare what is reduced in each step.

        Raises RankError on every rank: ranks have reduced values of other names as one.
        """
        steps, self._num_steps = self._num_steps, self._num_steps + 1
        if self._ranks.num_ranks == 1 or steps == 0 or steps & (steps - 1):
            return
        self._compare([(key, *value) for key, value in reduced_values(self._trainer).items() if value[1]])

    def before_epoch_ends(self) -> None:
        """Collective. Compare all that is reduced, and reduce it in rank 0's order. Raises as `before_step`."""
        if self._ranks.num_ranks > 1:
            self._compare([(key, *value) for key, value in reduced_values(self._trainer).items()])

    def _compare(self, values: list[tuple[str, str, bool]]) -> None:
        """values: of each its key, its name, and whether it is reduced in each step."""
        # The first 7 bytes, so that the number and its negative fit into int64s of the message.
        digest = hashlib.blake2b(repr(values).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "big")
        smallest, negated = self._ranks.start_all_reduce_min(number, -number).wait()
        if smallest == -negated:
            return
        gathered = [[tuple(value) for value in remote] for remote in self._ranks.all_gather(values)]
        in_steps = [[value for value in remote if value[2]] for remote in gathered]
        is_reordered = all(sorted(remote) == sorted(gathered[0]) for remote in gathered)
        if is_reordered and all(remote == in_steps[0] for remote in in_steps):
            reorder_reduced_values(self._trainer, [key for key, *_ in gathered[0]])
            return
        names = [[name for _, name, _ in remote] for remote in gathered]
        rank = next(rank for rank, remote in enumerate(gathered) if remote != gathered[0])
        raise RankError(
            f"self.log: rank 0 reduces {names[0]} over the ranks, and rank {rank} {names[rank]}: values of different "
            "names are mixed. Log what has sync_dist=True, and metrics, on every rank, under no condition that differs "
            "between ranks or batches; or log it with sync_dist=False."
        )
