"""Publishes the rows that training changes, for servers that answer meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_distrec.errors import CheckpointError, ConfigError, require
from lightning_distrec.serving.publishing.publications import PublicationWriter
from lightning_distrec.serving.publishing.published_fit import STATE, PublishedFit, num_writes


class PublishRows(Callback):
    """Publishes, while a fit trains, the rows of tables that changed since the last publication,
    and all other weights; a served folder follows: `app.py --port 8000 --follow FOLDER`.

    A publication has a Parquet file of each table and rank, with the row, its number and its raw
    id; the dynamic ids that lost their row; other weights as safetensors; and a manifest, which is
    written last. The last steps are published when training ends. A run that goes on from a
    checkpoint goes on with its publications. Raises ConfigError before training: the folder has the
    publications of another job, or there are no sharded tables; CheckpointError on every rank: a
    publication cannot be written.

    Args:
        folder: one that all ranks share, or a URL of an object store (s3://, gs://) that fsspec
            reads.
        every_n_steps: publish after this number of optimizer steps.
        every_seconds: or after this time.
        full_every: every this many publications a snapshot: all rows, for servers that start later.
        keep: how many publications stay; those from the newest snapshot on stay as well.
        vocabularies: table -> the column of ColumnData whose vocabulary it has rows for, where its
            raw ids are values; a TorchRec table's is known by its feature.
        on_error: "raise" ends training where a publication fails; "warn" trains on, and the next
            publication has its rows, too.
    """

    def __init__(
        self,
        folder: str,
        every_n_steps: int | None = None,
        every_seconds: float | None = None,
        full_every: int = 100,
        keep: int = 10,
        vocabularies: dict[str, str] | None = None,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        super().__init__()
        if (every_n_steps is None) == (every_seconds is None):
            raise ConfigError("PublishRows: set every_n_steps or every_seconds, and not both.")
        intervals = {"every_n_steps": every_n_steps, "every_seconds": every_seconds}
        for name, value in {**intervals, "full_every": full_every, "keep": keep}.items():
            if value is not None and not value > 0:
                raise ConfigError(f"PublishRows: {name}={value!r} must be above 0.")
        if on_error not in ("raise", "warn"):
            raise ConfigError(f"PublishRows: on_error={on_error!r} must be 'raise' or 'warn'.")
        require("pyarrow", "PublishRows")
        self._writer = PublicationWriter(str(folder))
        self._every_n_steps = every_n_steps
        self._every_seconds = every_seconds
        self._full_every = full_every
        self._keep = keep
        self._vocabularies = dict(vocabularies or {})
        self._on_error = on_error
        self._loaded: dict[str, Any] = {}
        """What a checkpoint has, until the fit goes on from it: by job."""
        self._writes: Any = None
        self._fit: PublishedFit | None = None
        self._last_step = self._next_look = 0
        self._last_time = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigError: the averages of WeightAveraging would be exported, not what is
        published."""
        if stage != "fit":
            return
        self._loaded = {}
        others: list[Callback] = []
        checkpoints: list[Callback] = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if callback is not self:
                (checkpoints if isinstance(callback, Checkpoint) else others).append(callback)
        # After those that write rows, as checkpoints are saved. In another list, since Lightning
        # goes through this one.
        trainer.callbacks = [*others, self, *checkpoints]  # type: ignore[attr-defined]
        for callback in others:
            if isinstance(callback, WeightAveraging):
                raise ConfigError(
                    "PublishRows publishes the weights that train, and checkpoints have those that "
                    f"{type(callback).__name__} averages, which all change in every step. Remove "
                    "one of the two."
                )

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for job, state in checkpoint.get(STATE, {}).items():
            self._loaded[job] = {**state, "step": checkpoint["global_step"]}
        # What is written from now on is not in the checkpoint.
        self._writes = num_writes(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Collective. Complete the publication in flight: the checkpoint is of a step after it."""
        fit = self._fit
        if fit is not None and fit.is_sharded:
            self._report(fit.finish)
            checkpoint.setdefault(STATE, {})[fit.job] = fit.state()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Raises ConfigError on every rank: see the class."""
        # Set where Lightning's types do not look.
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        loaded = self._loaded
        self._loaded = {}
        job = None if self._fit is None else self._fit.job
        was_written = self._writes is not None and num_writes(trainer) != self._writes
        self._fit = PublishedFit(
            trainer, self._writer, self._vocabularies, self._full_every, self._keep
        )
        self._fit.begin(loaded, job, was_written)
        self._begin_interval(trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        fit = self._fit
        step = trainer.global_step
        if fit is not None:
            self._report(lambda: fit.look(step))
            if self._is_due(fit, step):
                self._publish(fit, step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Publish the last steps, and wait until that is written."""
        if self._fit is not None:
            # What other callbacks have written at the end is published without a new step.
            if trainer.global_step > self._fit.last_step or self._fit.has_changes():
                self._publish(self._fit, trainer.global_step)
            self._report(self._fit.finish)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # It stays: a script that saves a checkpoint now saves where publications are, too.
        if self._fit is not None:
            self._fit.release()

    def _publish(self, fit: PublishedFit, step: int) -> None:
        self._report(fit.finish)
        fit.publish(step)
        self._begin_interval(step)

    def _report(self, action: Callable[[], None]) -> None:
        """Collective. Complete a publication; one that failed is an error or a warning."""
        try:
            action()
        except CheckpointError as error:
            if self._on_error == "raise":
                raise
            rank_zero_warn(str(error))

    def _begin_interval(self, step: int) -> None:
        self._last_step = step
        self._next_look = step + 1
        self._last_time = time.monotonic()

    def _is_due(self, fit: PublishedFit, step: int) -> bool:
        """Collective now and then, at steps that all ranks know. Return whether to publish."""
        every = self._every_n_steps
        if every is not None:
            # By quotients: with several optimizers global_step jumps over multiples, and while
            # gradients accumulate it stays.
            last = self._last_step
            self._last_step = step
            return step // every > last // every
        if step < self._next_look:
            return False
        assert self._every_seconds is not None
        # Rank 0's clock counts. Until it is time, the steps to go are estimated from those so far.
        seconds = fit.ranks.all_gather(time.monotonic() - self._last_time)[0]
        share = seconds / self._every_seconds
        num_steps = step - self._last_step
        # At most twice as many: a first step may be faster than all others.
        self._next_look = step + max(1, min(num_steps, int(num_steps * (1 / max(share, 0.1) - 1))))
        return bool(share >= 1)
