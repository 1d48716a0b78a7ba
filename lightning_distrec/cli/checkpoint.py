"""The commands `checkpoint inspect` and `checkpoint merge`."""

import json
import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lightning_distrec.cli.output import EXIT_ERROR, EXIT_OK, console


def parser() -> ArgumentParser:
    """Return the parser of the commands."""
    parser = ArgumentParser(
        prog="lightning-distrec checkpoint",
        description="Inspect a checkpoint, a folder or a single file, or merge a difference with its base.",
    )
    commands = parser.add_subcommands(title="commands", metavar="COMMAND")
    inspect, merge = _inspect_parser(), _merge_parser()
    commands.add_subcommand("inspect", inspect, help="Print what a checkpoint contains.")
    commands.add_subcommand("merge", merge, help="Write a difference and its base as one full checkpoint.")
    inspect.prog, merge.prog = "lightning-distrec checkpoint inspect", "lightning-distrec checkpoint merge"
    return parser


def run(options: Namespace) -> int:
    """Run a command and return its exit code."""
    command = {"inspect": _inspect, "merge": _merge}[options.subcommand]
    return command(options[options.subcommand])


def _inspect_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Print what a checkpoint contains, which version wrote it, and whether it is complete. "
        "Exit codes: 0: complete; 2: incomplete, damaged or unreadable."
    )
    parser.add_argument(
        "path", type=str, help="Inspect this checkpoint: a folder, or a .ckpt, .pt or .safetensors file."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON with all tensors.")
    parser.add_argument("--all", action="store_true", help="List all tensors instead of the largest ones.")
    parser.add_argument("--verify", action="store_true", help="Read all files and compare them with their checksums.")
    return parser


def _merge_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Write a checkpoint by difference and its base as one full checkpoint, with little memory. Exit "
        "codes: 0: written; 2: it cannot be."
    )
    parser.add_argument("difference", type=str, help="Merge this difference; its base is next to it.")
    parser.add_argument("out", type=str, help="Write this folder, which must not exist.")
    return parser


# What is imported below loads torch, which --help need not wait for.


def _inspect(options: Namespace) -> int:
    from lightning_distrec.checkpoint.tools.describe import describe, print_description

    description = describe(Path(options.path))
    if options.json:
        print(json.dumps(description.as_json(), indent=1))
    else:
        print_description(description, console(), options.all)
    if description.problem is not None:
        print(f"lightning-distrec: {description.problem}", file=sys.stderr)
        return EXIT_ERROR
    return _verify(Path(options.path)) if options.verify else EXIT_OK


def _verify(path: Path) -> int:
    from lightning_distrec.checkpoint.contents import verify

    changed = verify(path)
    for name in changed:
        print(f"lightning-distrec: {path}: {name} does not match its checksum.", file=sys.stderr)
    if not changed:
        print("All bytes match their checksums.", file=sys.stderr)
    return EXIT_ERROR if changed else EXIT_OK


def _merge(options: Namespace) -> int:
    from lightning_distrec.checkpoint.tools.merge import merge

    merge(Path(options.difference), Path(options.out))
    return EXIT_OK
