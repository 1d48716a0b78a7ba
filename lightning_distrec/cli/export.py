"""The command `export`: converts a checkpoint into a single file."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from lightning_distrec.cli.output import EXIT_OK, exit_on_sigterm


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        prog="lightning-distrec export",
        description="Convert a checkpoint into a single file. One process does it, with little memory, however large "
        "the tables are.",
    )
    parser.add_argument(
        "checkpoint", type=str, help="Convert this checkpoint: a folder, or a .ckpt, .pt or .safetensors file."
    )
    parser.add_argument(
        "out",
        type=str,
        help="Write this file. *.pt or *.safetensors: the state_dict of the unsharded module. *.ckpt: a Lightning "
        "checkpoint, from which any Trainer resumes.",
    )
    parser.add_argument(
        "--since",
        type=str,
        default=None,
        help="Write only what has changed since this checkpoint: of tables NAME.ids and NAME.rows, of other layers all "
        "weights. For *.pt and *.safetensors.",
    )
    parser.add_argument(
        "--pickles",
        action="store_true",
        help="Read a checkpoint that was saved with `checkpoint: {pickles: true}`. Code in it is run: set it for files "
        "that you trust.",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace OUT if it exists.")
    return parser


def run(options: Namespace) -> int:
    """Run the command and return its exit code."""
    from lightning_distrec.checkpoint.tools.export import export

    shown = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with (
        exit_on_sigterm(),
        Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress,
    ):
        task = progress.add_task("", total=None)
        export(
            Path(options.checkpoint),
            Path(options.out),
            overwrite=options.overwrite,
            since=None if options.since is None else Path(options.since),
            pickles=options.pickles,
            on_progress=lambda written, total: progress.update(task, completed=written, total=total),
        )
    return EXIT_OK
