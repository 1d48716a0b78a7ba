"""Which plan file a run follows, and where it leaves its own."""

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_distrec.sharding.planning.plan_file import PLAN_FILE, load_plan, save_plan
from lightning_distrec.sharding.planning.plan_fits import fitting_plan
from lightning_distrec.sharding.planning.planning_options import PlanningOptions
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.sharding.planning.written_plan import WrittenPlan
from lightning_distrec.strategies.tables.decisions import Decisions

VARIABLE = "LIGHTNING_DISTREC_PLAN_FILE"
"""Names a plan file where the strategy's argument does not."""


def wanted_plan(planning: PlanningOptions, variables: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the path of the plan file that a run follows, and what it is called in messages; None for no file.

    The argument wins over the environment variable, and a line says so where they differ. Call it on one rank.
    """
    given, by_variable = planning.plan_file, variables.get(VARIABLE) or None
    if given is not None:
        if by_variable not in (None, given):
            rank_zero_info(f"planning: plan_file='{given}' is followed, and {VARIABLE}={by_variable} is not.")
        return given, f"plan_file='{given}'"
    return None if by_variable is None else (by_variable, f"{VARIABLE}={by_variable}")


def follow(path: str, what: str, look: Decisions, places: NodeLayout, device: str) -> WrittenPlan:
    """Return the plan in a file for this run's tables and ranks. Call it on one rank.

    what: what the file is called in messages. device: type of the ranks' devices.
    Raises ConfigError, PlanError: see `load_plan` and `fitting_plan`.
    """
    resting = [name for name, update in look.updates.items() if update.kind == "frozen"]
    plan = fitting_plan(load_plan(path), what, look.tables, look.demands, places, device, resting)
    rank_zero_info(f"Tables are placed as {what} says.")
    return plan


def save_beside_logs(trainer: Trainer, plan: WrittenPlan) -> None:
    """Leave the plan of a fit in the folder of the first logger that has one. A disk that refuses is a warning.

    Nothing is exchanged: rank 0 writes.
    """
    fits = trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run  # type: ignore[attr-defined]
    folder = next(filter(None, map(folder_of, trainer.loggers)), None)
    if not fits or not trainer.is_global_zero or folder is None:
        return
    try:
        save_plan(folder / PLAN_FILE, plan)
    except OSError as error:
        rank_zero_warn(
            f"the plan is not saved: {folder / PLAN_FILE} cannot be written ({error.strerror or error}). The run goes "
            "on; planning={'save_plan': False} saves none."
        )


def folder_of(logger: Logger) -> Path | None:
    """Return the folder of one run: that of its logs, or the one above its checkpoints; None for a logger without."""
    log_dir = getattr(logger, "log_dir", None)
    if isinstance(log_dir, str):  # those of Lightning that stand in for loggers have a function for any name
        return Path(log_dir)
    if logger.save_dir is None or logger.name is None or logger.version is None:
        return None
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir) / logger.name / version
