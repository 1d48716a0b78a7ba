"""The commands `checkpoint inspect`, `checkpoint merge` and `export`, by one process and without
torchrec."""

import json
import sys
from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from lightning_distrec.checkpoint.contents import verify
from lightning_distrec.cli.command_line import (
    EXIT_ERROR,
    EXIT_OK,
    FOLDER_FORMATS,
    TOP_K_OPTIONS,
    console,
    exit_on_sigterm,
)
from lightning_distrec.errors import ConfigError
from lightning_distrec.serving.describe import describe, print_description
from lightning_distrec.serving.export_checkpoint import export, merge
from lightning_distrec.units import format_bytes


def run_checkpoint(options: Namespace) -> int:
    """Run a command and return its exit code."""
    if options.subcommand == "inspect":
        return _inspect(Path(options.inspect.path), options.inspect)
    merge(Path(options.merge.difference), Path(options.merge.out))
    return EXIT_OK


def _inspect(path: Path, options: Namespace) -> int:
    description = describe(path)
    if options.json:
        print(json.dumps(description.as_json(), indent=1))
    else:
        print_description(description, console(), options.all)
    if description.problem is not None:
        print(f"lightning-distrec: {description.problem}", file=sys.stderr)
        return EXIT_ERROR
    if not options.verify:
        return EXIT_OK
    changed = verify(path)
    for name in changed:
        print(f"lightning-distrec: {path}: {name} does not match its checksum.", file=sys.stderr)
    if not changed:
        print("All bytes match their checksums.", file=sys.stderr)
    return EXIT_ERROR if changed else EXIT_OK


def run_export(options: Namespace) -> int:
    """Run the command and return its exit code."""
    is_folder = options.format in FOLDER_FORMATS
    folder_options = ["config", "bits", *TOP_K_OPTIONS]
    for name in folder_options if not is_folder else ():
        if options[name] is not None:
            raise ConfigError(f"export: --{name} is for --format torch.export and quantized.")
    if options.format == "safetensors" and not options.out.endswith(".safetensors"):
        raise ConfigError(
            f"export: --format safetensors writes a file, and {options.out} is not named "
            "*.safetensors."
        )
    stderr = Console(stderr=True)  # what is printed for programs goes to stdout
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with (
        exit_on_sigterm(),
        Progress(
            *columns, console=stderr, transient=True, disable=not stderr.is_terminal
        ) as progress,
    ):
        # For a file the total comes with the first report; for a folder it stays unknown.
        task = progress.add_task("", total=None)
        if is_folder:
            from lightning_distrec.cli.export_recipe import export_recipe  # loads torchrec

            export_recipe(options, lambda count: progress.advance(task, count))
        else:
            export(
                Path(options.checkpoint),
                Path(options.out),
                overwrite=options.overwrite,
                pickles=options.pickles,
                on_progress=lambda written, total: progress.update(
                    task, completed=written, total=total
                ),
            )
    if not is_folder:
        print(f"Wrote {options.out}, {format_bytes(Path(options.out).stat().st_size)}.")
    return EXIT_OK
