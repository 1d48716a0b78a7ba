"""Logs how tables without a fixed range of ids fill, collide and evict."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_distrec.callbacks.steps import LogTimes, log


class DynamicIds(Callback):
    """Logs, for each table that maps ids to rows, over all ranks:

    `dynamic_ids/<table>/occupancy`, the share of rows that an id has for itself; `dynamic_ids/<table>/collisions`, the
    share of the distinct ids that were looked up since the last entry and share a row; `dynamic_ids/<table>/evictions`,
    the rows that were taken from an id since then.

    Args:
        every_n_steps: optimizer steps between two entries; None: the Trainer's log_every_n_steps.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        self._log_times = LogTimes("DynamicIds", every_n_steps)
        self._before: dict[str, tuple[int, ...]] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_times.start()
        self._before = self._numbers(trainer)
        if not self._before:
            rank_zero_warn(
                "DynamicIds: no table maps ids to rows, so there is nothing to log. Use strategy='torchrec_sharded' "
                "with tables={'<name>': {'ids': 'dynamic'}}, or remove the callback."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._before or not self._log_times.due(trainer):
            return
        numbers, entry = self._numbers(trainer), {}
        for table, (rows, taken, looked_up, shared, evicted) in numbers.items():
            _, _, looked_up_before, shared_before, evicted_before = self._before[table]
            entry[f"dynamic_ids/{table}/occupancy"] = taken / rows
            entry[f"dynamic_ids/{table}/collisions"] = (shared - shared_before) / max(1, looked_up - looked_up_before)
            entry[f"dynamic_ids/{table}/evictions"] = float(evicted - evicted_before)
        self._before = numbers
        log(trainer, entry)

    @staticmethod
    def _numbers(trainer: Trainer) -> dict[str, tuple[int, ...]]:
        counts = getattr(trainer.strategy, "dynamic_id_counts", None)
        return {} if counts is None else counts()  # type: ignore[no-any-return]
