"""Callbacks for embedding tables: write their plan, log how mapped ids fill them, and keep their
rows at a norm."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_distrec.errors import ConfigError, require
from lightning_distrec.observe.plan_page import write_page, write_pictures
from lightning_distrec.observe.plan_pictures import draw_plan
from lightning_distrec.observe.steps import LogTimes, log


class PlanLogger(Callback):
    """Writes the sharding plan and its costs when a fit begins: plan.html, and figures for the
    loggers.

    The page has what each rank holds, spends and sends, and where each table is. Loggers that
    accept images (TensorBoard, Weights & Biases) get the figures, as `plan/memory`, `plan/time`,
    `plan/traffic`, `plan/traffic_matrix` and `plan/tables`; without such a logger they are files
    next to the page. Rank 0 writes, which delays the first step by a few seconds. Figures need
    matplotlib, which `[plots]` brings.

    Args:
        path: the folder; None: that of the first logger, or the Trainer's default_root_dir.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        self._path = path

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigError: the folder is not a local one; MissingPackageError: no matplotlib."""
        folder = self._path or next(
            (logger.save_dir for logger in trainer.loggers if logger.save_dir), None
        )
        folder = str(folder or trainer.default_root_dir)
        if "://" in folder:
            raise ConfigError(
                f"PlanLogger: '{folder}' is not a local folder. Set PlanLogger(path=...)."
            )
        require("matplotlib", "PlanLogger")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the plan on rank 0. Raises ConfigError: the folder is not writable."""
        # Set where Lightning's types do not look.
        trial = trainer.fast_dev_run  # type: ignore[attr-defined]
        # Nothing below is a collective, so that other ranks may go on to the first step.
        if trial or not trainer.is_global_zero:
            return
        setup = getattr(trainer.strategy, "run_tables", None)  # TorchRecShardedStrategy's
        if setup is None:
            rank_zero_warn(
                "PlanLogger: no tables are sharded, so there is no plan. Use "
                "strategy='torchrec_sharded'."
            )
            return
        loggers: list[Any] = trainer.loggers
        image_loggers = []
        for x in loggers:
            if isinstance(x, TensorBoardLogger) or callable(getattr(x, "log_image", None)):
                image_loggers.append(x)
        folder = Path(self._path or _folder_of(trainer))
        try:
            pictures = draw_plan(setup.plan)
            write_page(folder / "plan.html", setup.plan, pictures)
            if not image_loggers:
                write_pictures(folder, pictures)
        except OSError as error:
            raise ConfigError(
                f"PlanLogger cannot write to '{folder}': {error}. Set another path."
            ) from error
        for logger in image_loggers:
            for name, data in pictures.items():
                pixels = _pixels(data)
                step = trainer.global_step
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_image(
                        f"plan/{name}", pixels, global_step=step, dataformats="HWC"
                    )
                else:
                    logger.log_image(key=f"plan/{name}", images=[pixels])
        rank_zero_info(f"PlanLogger: wrote the sharding plan to {folder / 'plan.html'}.")


def _folder_of(trainer: Trainer) -> str:
    """Return the folder that loggers write to."""
    # Not Trainer.log_dir: it broadcasts, and this runs on one rank only.
    for logger in trainer.loggers:
        folder = logger.log_dir or logger.save_dir
        if folder:
            return str(folder)
    return str(trainer.default_root_dir)


def _pixels(png: bytes) -> Any:
    """Return the pixels of a figure, (height, width, 3) bytes."""
    # Optional, and slow to import: only where there are figures to log.
    from matplotlib.image import imread

    # imread gives floats from 0 to 1, and an alpha channel after the colors.
    return np.rint(imread(io.BytesIO(png), format="png")[..., :3] * 255).astype(np.uint8)


class DynamicIds(Callback):
    """Logs, for each table that maps ids to rows, over all ranks:

    - `dynamic_ids/<table>/occupancy`: the share of rows that an id has for itself.
    - `dynamic_ids/<table>/collisions`: the share of the distinct ids that were looked up since the
      last entry and share a row.
    - `dynamic_ids/<table>/evictions`: the rows that were taken from an id since then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._log_times = LogTimes()
        self._last_numbers: dict[str, tuple[int, ...]] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_times.start()
        self._last_numbers = self._numbers(trainer)
        if not self._last_numbers:
            rank_zero_warn(
                "DynamicIds: no table maps ids to rows, so there is nothing to log. Use "
                "strategy='torchrec_sharded' with tables={'<name>': {'ids': 'dynamic'}}, or remove "
                "the callback."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The counts are a collective. All ranks have the same tables and number of steps, so all
        # return here or none does.
        if not self._last_numbers or not self._log_times.due(trainer):
            return
        # The mapping counts from its beginning on; an entry is about the time since the one before.
        numbers = self._numbers(trainer)
        entry = {}
        for table, (rows, occupied, looked_up, shared, evicted) in numbers.items():
            _, _, looked_up_before, shared_before, evicted_before = self._last_numbers[table]
            entry[f"dynamic_ids/{table}/occupancy"] = occupied / rows
            entry[f"dynamic_ids/{table}/collisions"] = (shared - shared_before) / max(
                1, looked_up - looked_up_before
            )
            entry[f"dynamic_ids/{table}/evictions"] = float(evicted - evicted_before)
        self._last_numbers = numbers
        log(trainer, entry)

    @staticmethod
    def _numbers(trainer: Trainer) -> dict[str, tuple[int, ...]]:
        counts = getattr(trainer.strategy, "dynamic_id_counts", None)
        return {} if counts is None else counts()  # type: ignore[no-any-return]


class NormalizeRows(Callback):
    """Scales rows after every training batch, exactly also where tables are sharded, by rows or by
    columns; for shards of columns the ranks exchange one number per row.

    Args:
        parameters: names of weights in the module, such as ["items.weight"], each (num_rows, dim).
        max_norm: scale rows whose 2-norm is above it to it; None: scale all rows to norm 1, as
            torch.nn.functional.normalize does.
    """

    def __init__(self, parameters: list[str], max_norm: float | None = None) -> None:
        if isinstance(parameters, str) or not parameters:
            raise ConfigError(
                f"NormalizeRows: parameters={parameters!r}: a list of names of weights is needed."
            )
        if max_norm is not None and max_norm <= 0:
            raise ConfigError(f"NormalizeRows: max_norm={max_norm} must be above 0.")
        self._names = parameters
        self._max_norm = max_norm

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Also the second names of shared weights: users may name either.
        parameters = dict(pl_module.named_parameters(remove_duplicate=False))
        for name in self._names:
            if name not in parameters:
                raise ConfigError(
                    f"NormalizeRows: the module has no parameter '{name}'; it has "
                    f"{', '.join(parameters)}."
                )
            # By attributes, since callbacks know no strategies: under ddp_tuned there is nothing to
            # refuse.
            refuse = getattr(trainer.strategy, "refuse_to_scale", None)
            if refuse:
                refuse(name, self._max_norm)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        scale_table = getattr(trainer.strategy, "scale_rows", None)
        for name in self._names:
            # A sharded table's weight is not in the module as a tensor of all rows: the strategy
            # scales its shards.
            # False: it is no sharded table.
            if scale_table is None or not scale_table(name, self._max_norm):
                scale_rows(pl_module.get_parameter(name).detach(), self._max_norm)


@torch.no_grad()
def scale_rows(weight: Tensor, max_norm: float | None) -> None:
    """Scale the rows of `weight`, (num_rows, dim), in place; see NormalizeRows."""
    # 1e-12 is the eps of torch.nn.functional.normalize: rows of zeros stay zeros.
    norms = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
    weight.mul_((max_norm / norms.clamp_min(1e-12)).clamp(max=1.0)) if max_norm else weight.div_(
        norms.clamp_min(1e-12)
    )
