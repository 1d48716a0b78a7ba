"""The console script `lightning-distrec`: finds the command and runs it."""

import argparse
import os
import platform
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from lightning_distrec.cli.asked_ranks import asked_ranks
from lightning_distrec.cli.command_line import COMMANDS, EXIT_ERROR, LIGHTNING_COMMANDS
from lightning_distrec.cluster.early_ranks import early_ranks, without_collections
from lightning_distrec.errors import DistRecError, did_you_mean
from lightning_distrec.versions import find_installed, problem_with


def main(args: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code. args: the command line; None: that of the process.

    Errors that users can act on are printed in one line. Raises SystemExit: the command line asks
    for help or is wrong.
    """
    args = sys.argv[1:] if args is None else list(args)
    _make_working_directory_importable()
    if _is_for_lightning(args):
        # Other ranks run the command line of this process.
        num_ranks, strategy = asked_ranks(args) if args == sys.argv[1:] else (1, "")
        with early_ranks(num_ranks, strategy, args):
            return _run_lightning(args)
    name = _find_command(args)
    options = COMMANDS[name].parser(name).parse_args(args[1:])
    try:
        # Only this command's file is imported: torchrec takes seconds to load, and most commands do
        # not need it.
        commands = import_module(f"lightning_distrec.cli.{COMMANDS[name].file}")
        code: int = getattr(commands, f"run_{name}")(options)
        return code
    # All others are bugs, or of the user's code: they keep their traceback.
    except (DistRecError, OSError) as error:
        return _complain(error)
    except KeyboardInterrupt:
        # As a shell reports a process that ended by the signal.
        return 128 + signal.SIGINT


def _run_lightning(args: list[str]) -> int:
    """Run one of Lightning's commands; an error of ours is its message, on one rank, unless --debug
    asks for more."""
    args, debug = [argument for argument in args if argument != "--debug"], "--debug" in args
    with without_collections():
        fit_cli = import_module("lightning_distrec.cli.fit_cli")
    try:
        fit_cli.run_lightning(args)
    except Exception as error:
        complaint = fit_cli.complaint(error)
        if debug or complaint is None:
            raise
        fit_cli.leave_after_failure(error)
        return _complain(complaint) if fit_cli.speaks(error) else EXIT_ERROR
    return 0


def _complain(error: Exception) -> int:
    print(f"lightning-distrec: {error}", file=sys.stderr, flush=True)
    return EXIT_ERROR


def _is_for_lightning(args: Sequence[str]) -> bool:
    """Return whether LightningCLI parses the command line. Unknown commands go to our parser."""
    if not args:
        # With default_env, LightningCLI takes its command from there.
        return "PL_SUBCOMMAND" in os.environ
    package_options = ("-h", "--help", "--version")
    return args[0] in LIGHTNING_COMMANDS or (
        args[0].startswith("-") and args[0] not in package_options
    )


def _find_command(args: Sequence[str]) -> str:
    """Return the name of our command. Raises SystemExit: there is none, or it is unknown."""
    texts = LIGHTNING_COMMANDS | {name: command.help for name, command in COMMANDS.items()}
    commands = "\n".join(f"    {name:<10}  {text}" for name, text in texts.items())
    parser = argparse.ArgumentParser(
        prog="lightning-distrec",
        usage="lightning-distrec COMMAND ...",
        description="Train recommendation models with sharded embedding tables; examine plans and "
        "checkpoints.",
        epilog=f"commands:\n{commands}\n\nPrint the options of a command: lightning-distrec "
        "COMMAND --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="Print this help.")
    parser.add_argument(
        "--version", action="store_true", help="Print the versions of the package and what it uses."
    )
    if not args:
        parser.print_help(sys.stderr)
        raise SystemExit(EXIT_ERROR)
    if args[0] in ("-h", "--help"):
        parser.print_help()
        raise SystemExit(0)
    if args[0] == "--version":
        print(_versions())
        raise SystemExit(0)
    if args[0] not in COMMANDS:
        near = did_you_mean(args[0], [*LIGHTNING_COMMANDS, *COMMANDS])
        parser.error(
            f"unknown command '{args[0]}'{near} List all commands: lightning-distrec --help."
        )
    return args[0]


def _versions() -> str:
    lines = []
    for name in (
        "lightning-distrec",
        "torch",
        "lightning",
        "torchrec",
        "fbgemm-gpu",
        "fbgemm-gpu-cpu",
    ):
        with suppress(PackageNotFoundError):
            lines.append(f"{name} {version(name)}")
    lines.append(f"Python {platform.python_version()}")
    problem = problem_with(find_installed())
    if problem is not None:
        lines.append(f"\ntorchrec_sharded cannot be used. {problem}")
    return "\n".join(lines)


def _make_working_directory_importable() -> None:
    """Let `class_path: recipes.movielens_dlrm.model.ClickModel` be found from the folder that the
    command runs in."""
    # A console script has its own folder on the path, and not this one.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)


if __name__ == "__main__":
    sys.exit(main())
