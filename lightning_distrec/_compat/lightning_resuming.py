"""Private names of lightning: where a fit resumes."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lightning_distrec._compat.patches import Patches


def resume_from(trainer: Any, find: Callable[[Any], str | None]) -> Patches:
    """Let a fit resume from the checkpoint that `find` returns; None: do as `ckpt_path` says.

    find: gets the ckpt_path, None if the user has given none.
    Upstream resumes from the newest `hpc_ckpt_*` in the folder, whichever job wrote it, where it detects Slurm. That is
    wrong for a new job in an old folder, and for jobs that restart without Slurm. `_hpc_resume_path` is a property,
    which an instance cannot override, so the connector's `__class__` is replaced by a subclass.
    Can go when Lightning asks the strategy or the environment for the checkpoint to resume from.
    Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py, `_select_ckpt_path`, which fit calls once.
    """
    patches, connector = Patches(), trainer._checkpoint_connector
    patches.replace_class(connector, _Resumes)
    patches.replace(connector, "find", find)
    patches.callback(connector.__dict__.pop, "chosen_path", None)
    return patches


def resumed_path(trainer: Any) -> str | None:
    """Return the checkpoint that the fit in progress resumes from, also before it is loaded; None for none.

    Upstream hands the path from function to function, and sets `trainer.ckpt_path` when it loads, after set-up. It is
    known to the connector of `resume_from` alone.
    """
    path = getattr(trainer._checkpoint_connector, "chosen_path", None)
    return None if path is None else str(path)


def update_plateaus_of_this_epoch(trainer: Any) -> None:
    """Let the fit loop update ReduceLROnPlateau at the end of the epoch that it has resumed in.

    Upstream leaves them out there, since their metrics are not in checkpoints. The public setter sets it for the loops
    inside, too, and to True where a fit is limited by steps.
    Source: lightning/pytorch/loops/fit_loop.py, `on_advance_end`, which alone reads it after an epoch has begun.
    """
    trainer.fit_loop._restarting = False


class _Resumes(_CheckpointConnector):
    """What `resume_from` makes of a trainer's connector; at the top of the file, so that pickle finds it."""

    find: Callable[[Any], str | None] | None = None
    chosen_path: Any = None

    @property
    def _hpc_resume_path(self) -> str | None:
        return None

    def _select_ckpt_path(self, state_fn: Any, ckpt_path: Any, *args: Any, **options: Any) -> Any:
        requested = ckpt_path or (self._ckpt_path if self._user_managed else None)
        path: Any = self.find(requested) if state_fn == "fit" and self.find is not None else None
        if path is None:
            path = super()._select_ckpt_path(state_fn, ckpt_path, *args, **options)
        self.chosen_path = path
        return path

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "find"}  # the next fit sets it again
