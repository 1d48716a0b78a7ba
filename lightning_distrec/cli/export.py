"""The command `export`: converts a checkpoint into a single file, or into a folder that answers by itself."""

from collections.abc import Callable
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from lightning_distrec.cli.output import EXIT_OK, exit_on_sigterm
from lightning_distrec.errors import ConfigError
from lightning_distrec.units import format_bytes, quantity

FOLDERS = ("torch.export", "quantized")


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        prog="lightning-distrec export",
        description="Convert a checkpoint into a single file, or into a folder that answers requests without this "
        "package. One process does it, with little memory, however large the tables are.",
    )
    parser.add_argument(
        "checkpoint", type=str, help="Convert this checkpoint: a folder, or a .ckpt, .pt or .safetensors file."
    )
    parser.add_argument(
        "out",
        type=str,
        help="Write this file. *.pt or *.safetensors: the state_dict of the unsharded module. *.ckpt: a Lightning "
        "checkpoint, from which any Trainer resumes. With --format torch.export or quantized: a folder.",
    )
    parser.add_argument(
        "--format",
        choices=["safetensors", *FOLDERS],
        metavar="FORMAT",
        default=None,
        help="torch.export: a folder with predict_step as a program, the tables, and a script that answers requests. "
        "quantized: the same with rows of 8 or 4 bits. Both need --config. safetensors: what *.safetensors names, too.",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=None,
        help="The YAML that `fit` was given; several are laid over each other. For the formats that are folders.",
    )
    parser.add_argument(
        "--bits", type=int, choices=[8, 4], default=None, help="Bits of a number in quantized rows. Default: 8."
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
    shown = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    _check(options)
    with (
        exit_on_sigterm(),
        Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress,
    ):
        task = progress.add_task("", total=None)
        if options.format in FOLDERS:
            return _export_folder(options, lambda count: progress.advance(task, count))
        from lightning_distrec.checkpoint.tools.export_checkpoint import export

        export(
            Path(options.checkpoint),
            Path(options.out),
            overwrite=options.overwrite,
            pickles=options.pickles,
            on_progress=lambda written, total: progress.update(task, completed=written, total=total),
        )
    return EXIT_OK


def _check(options: Namespace) -> None:
    """Raises ConfigError: options that do not go together."""
    if options.format not in FOLDERS and (options.config or options.bits):
        raise ConfigError("export: --config and --bits are for --format torch.export and quantized.")
    if options.format == "safetensors" and not options.out.endswith(".safetensors"):
        raise ConfigError(f"export: --format safetensors writes a file, and {options.out} is not named *.safetensors.")


def _export_folder(options: Namespace, on_progress: Callable[[int], None]) -> int:
    from lightning_distrec.cli.export_recipe import export_recipe

    served = export_recipe(options, on_progress)
    size = format_bytes(served.table_bytes)
    if options.format == "quantized":
        size += f" of {format_bytes(served.float_bytes)}"
    print(f"{options.out}: {quantity(served.num_tables, 'table')}, {size}.")
    if served.largest_answer or not served.integers:
        print(
            f"Answers to {quantity(served.num_examples, 'example')} differ from the trained module's by at most "
            f"{served.largest_difference:.3g}, {served.mean_difference:.3g} on average; the largest is "
            f"{served.largest_answer:.3g}."
        )
    if served.integers:
        print(
            f"Of {served.integers:,} integers in answers to {quantity(served.num_examples, 'example')}, "
            f"{served.other_integers:,} differ from the trained module's."
        )
    if served.only_this_size:
        print(
            f"The program takes batches of {served.num_examples} examples alone: predict_step makes a number of the "
            "size. There len(tensor) is a fixed number; tensor.shape[0] stays free."
        )
    print(
        f"It needs {', '.join(['torch', 'numpy', 'safetensors', *served.needs])}. Ask it: python {options.out}/serve.py"
    )
    return EXIT_OK
