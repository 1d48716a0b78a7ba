"""`fit`, `validate`, `test` and `predict`: a LightningCLI whose complaints are one block, and say
what to do."""

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

import lightning_distrec
from lightning_distrec._compat.jsonargparse import take_names_of_strategies
from lightning_distrec._compat.lightning_checkpoints import reads_hyperparameters
from lightning_distrec.callbacks.prediction_writer import PredictionWriter
from lightning_distrec.checkpoint.contents import read_contents
from lightning_distrec.cli.lightning_cli import CommandLineError, OneBlockParser
from lightning_distrec.errors import (
    CheckpointError,
    ConfigError,
    DistRecError,
    RankError,
    did_you_mean,
)
from lightning_distrec.registration import STRATEGIES, class_path, register, short_name

register()  # Trainers find strategies by name
take_names_of_strategies(class_path)

HELP = (
    "Options of a strategy or a callback: lightning-distrec {} --trainer.strategy.help "
    "lightning_distrec.TorchRecShardedStrategy. --debug shows the traceback of an error."
)
CHECKPOINT_KEYWORDS = ("best", "last", "hpc", "registry")
"""Values of ckpt_path that are no paths."""
SECONDS_FOR_PRINTING = 30.0
"""How long a rank whose command line is refused waits for the one of its node that prints the
reason."""


@reads_hyperparameters
class FitCLI(LightningCLI):
    """Runs one of Lightning's commands; options can come from the environment too
    (PL_FIT__TRAINER__MAX_EPOCHS).

    args: the command line; without a command, all commands are parsed.
    """

    def __init__(self, args: Sequence[str]) -> None:
        self._args = list(args)
        # Of a run's own process: Lightning warns of arguments that are not those of sys.argv.
        warnings.filterwarnings("ignore", ".*LightningCLI's args parameter")
        super().__init__(
            subclass_mode_model=True,
            subclass_mode_data=True,
            # Lightning refuses to write its config twice into one folder; running a recipe twice
            # must work.
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"default_env": True, "allow_abbrev": False},
            parser_class=OneBlockParser,
            args=self._args,
        )

    @override
    # Lightning calls it on the instance.
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        every = super().subcommands()
        # A parser takes as long for each command.
        return {
            name: skipped for name, skipped in every.items() if [name] == self._args[:1]
        } or every

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = super().init_parser(**kwargs)
        parser.epilog = HELP.format(self._args[0] if self._args else "fit")
        return parser

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        if self._args[:1] == ["predict"]:
            parser.add_argument(
                "--out", type=str | None, help="Write the predictions to this file, *.parquet."
            )
            parser.add_argument(
                "--columns", type=str, default="", help="Columns of the batches to write, too: a,b."
            )

    def read_hyperparameters(self, checkpoint: Any) -> None:
        """Take what a checkpoint, a path or None, says of the module."""
        config = self.config[self.config.subcommand]
        if not isinstance(checkpoint, str):
            return
        if not Path(checkpoint).exists():
            # URLs have a colon, and so have names of a registry.
            if ":" not in checkpoint and checkpoint not in CHECKPOINT_KEYWORDS:
                raise CommandLineError(f"ckpt_path {checkpoint}: there is no such file or folder.")
            return
        try:
            stored = dict(read_contents(Path(checkpoint)).checkpoint.get("hyper_parameters") or {})
        except CheckpointError:  # the run itself says so, or reads it by other options
            return
        path = stored.pop("_class_path", None)
        _ = stored.pop("_instantiator", None)
        model: Any = config.get("model")
        if model is None and path is None:
            return
        explicit = self._explicit_arguments()
        arguments: Any = (model.get("init_args") if model is not None else None) or Namespace()
        if model is None:
            init_args = stored
        else:
            init_args = {
                name: stored[name] for name in stored if name in arguments and name not in explicit
            }
        init_args = {
            name: value
            for name, value in init_args.items()
            if model is None or arguments.get(name) != value
        }
        if init_args or model is None:
            class_path = path if model is None else model.class_path
            update = {"model": {"class_path": class_path, "init_args": init_args}}
            self.config = self.parser.parse_object({self.config.subcommand: update}, self.config)
        differing = {
            name: stored[name]
            for name in stored
            if name in explicit and explicit[name] != stored[name]
        }
        _log_hyperparameters(
            checkpoint, init_args, {name: (explicit[name], differing[name]) for name in differing}
        )

    def _explicit_arguments(self) -> dict[str, Any]:
        """Return the module's arguments that files, options or the environment set."""
        model = self.parser.parse_args(self._args, defaults=False)[self.config.subcommand].get(
            "model"
        )
        return dict(vars((model.get("init_args") if model is not None else None) or Namespace()))

    @override
    def before_instantiate_classes(self) -> None:
        """Refuse what would fail with less of a reason later."""
        config = self.config[self.config.subcommand]
        strategy = config.trainer.strategy
        names = [*StrategyRegistry.available_strategies(), "auto"]
        if isinstance(strategy, str) and strategy not in names:
            raise CommandLineError(
                "trainer.strategy: there is no strategy "
                f"'{strategy}'{did_you_mean(strategy, names)} Those of lightning_distrec are "
                f"{', '.join(STRATEGIES)}."
            )
        if config.get("columns") and config.out is None:
            raise CommandLineError("predict: --columns is for --out FILE.parquet.")
        if config.get("out") is not None:
            config.return_predictions = False

    @override
    def instantiate_classes(self) -> None:
        """Build the module with tables without rows where its strategy makes them by ranks."""
        with tables_context(self.config[self.subcommand].trainer.strategy):
            try:
                super().instantiate_classes()
            except DistRecError:
                raise
            # By the Trainer, by jsonargparse around what a constructor has raised, or by a class
            # whose package is missing.
            except (TypeError, ValueError, ImportError) as error:
                raise ConfigError(str(error)) from error
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        config = self.config[self.subcommand]
        if config.get("out") is not None:
            columns = [name.strip() for name in config.columns.split(",") if name.strip()]
            callbacks.append(PredictionWriter(config.out, columns))
        elif self.subcommand == "predict" and not any(
            isinstance(c, BasePredictionWriter) for c in callbacks
        ):
            rank_zero_info(
                "Predictions are not kept. Name a file for them: --out predictions.parquet."
            )


def _log_hyperparameters(
    checkpoint: str, init_args: dict[str, Any], differing: dict[str, tuple[Any, Any]]
) -> None:
    if init_args:
        values = ", ".join(f"model.{name}={value!r}" for name, value in init_args.items())
        rank_zero_info(f"From {checkpoint}, as the command line does not set them: {values}.")
    if differing:
        values = ", ".join(
            f"model.{name}={value!r} (there {other!r})"
            for name, (value, other) in differing.items()
        )
        rank_zero_info(f"Set here, and different in {checkpoint}: {values}.")


def tables_context(strategy: Any) -> AbstractContextManager[None]:
    """Return a context in which the tables that the strategy will shard are built without rows."""
    name = strategy if isinstance(strategy, str) else getattr(strategy, "class_path", "")
    if short_name(name) != "torchrec_sharded":
        return nullcontext()
    # torchrec loads where it is needed only
    from lightning_distrec.sharding.meta_tables import meta_tables

    options = getattr(strategy, "init_args", None) or Namespace()
    return meta_tables(options.get("convert_embeddings", "auto"), options.get("min_rows", 100_000))


def run_lightning(args: Sequence[str]) -> None:
    """Run one of Lightning's commands. Raises DistRecError, and what the user's code raises."""
    if any("help" in argument for argument in args):
        # jsonargparse lists the classes that are loaded.
        for name in lightning_distrec.__all__:
            with suppress(ImportError):
                getattr(lightning_distrec, name)
    FitCLI(args)


def complaint(error: Exception) -> Exception | None:
    """Return the error to print without its traceback; None: a bug, or of the user's code."""
    return error if isinstance(error, (DistRecError, MisconfigurationException)) else None


def leave_after_failure(error: Exception) -> None:
    """Let the exit wait for no other rank: it takes an exception that nobody has caught for a
    failure."""
    from lightning_distrec.strategies.run.process_runs import PROCESS

    PROCESS.has_failed = True
    if isinstance(error, CommandLineError) and not speaks(error):
        # torchrun ends all ranks when one has failed: the one that prints has to be first. It ends
        # this sleep, too.
        time.sleep(SECONDS_FOR_PRINTING)


def speaks(error: Exception) -> bool:
    """Return whether this rank prints the error: one of a node does, or one whose message may be on
    no other."""
    from lightning_distrec.strategies.run.process_runs import PROCESS

    rank_of_node = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    is_shared = PROCESS.heartbeat is not None or isinstance(error, (CommandLineError, RankError))
    return rank_of_node == "0" or not is_shared
