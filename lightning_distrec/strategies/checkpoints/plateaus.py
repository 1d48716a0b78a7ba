"""ReduceLROnPlateau over a restart, which Lightning does not update at the end of the epoch that a run resumes in."""

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_distrec._compat.lightning_checkpoints import update_plateaus_of_this_epoch


def update_in_resumed_epoch(trainer: Trainer) -> None:
    """Let schedulers be updated at the end of a resumed epoch too, once a validation in it has given their metrics.

    Others stay without an update, as in Lightning: a training epoch's metrics are not in checkpoints.
    """
    if trainer.state.fn != TrainerFn.FITTING or not trainer.fit_loop.restarting:
        return
    monitors = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if monitors and all(monitor in trainer.callback_metrics for monitor in monitors):
        update_plateaus_of_this_epoch(trainer)


def warn_of_missed_epoch(trainer: Trainer) -> None:
    """Say which schedulers miss an epoch, where a run resumes from after an epoch's last batch and before its end."""
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "epoch":
            rank_zero_warn(
                f"ReduceLROnPlateau(monitor={config.monitor!r}) misses one epoch: the checkpoint was saved at the "
                "end of an epoch, before Lightning updated the scheduler, and Lightning resumes with the next epoch. "
                "Resume from a checkpoint of the middle of an epoch (ModelCheckpoint(every_n_train_steps=N)) to update "
                "it in each."
            )
