"""The command `completion`: prints a script with which a shell completes commands and options."""

import inspect
from argparse import ArgumentParser as PlainParser
from importlib import import_module, util
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from lightning_distrec.cli.main import COMMANDS, LIGHTNING_COMMANDS
from lightning_distrec.cli.output import EXIT_OK
from lightning_distrec.errors import ConfigError


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        prog="lightning-distrec completion",
        description="Print a script that completes commands and options. For this shell alone: "
        'eval "$(lightning-distrec completion bash)". For all: write it to a file that the shell reads.',
    )
    parser.add_argument("shell", type=Literal["bash", "zsh", "tcsh"], help="Print the script of this shell.")
    return parser


def run(options: Namespace) -> int:
    """Run the command and return its exit code."""
    if not util.find_spec("shtab"):
        raise ConfigError("completion: the package shtab is not installed. Run pip install shtab.")
    import shtab

    print(shtab.complete(full_parser(), shell=options.shell))
    return EXIT_OK


def full_parser() -> PlainParser:
    """Return one parser with all commands and options. It only lists them: each command parses its own."""
    full = PlainParser(prog="lightning-distrec")
    full.add_argument("--version", action="store_true", help="Print versions.")
    commands = full.add_subparsers()
    for name, text in LIGHTNING_COMMANDS.items():
        command = commands.add_parser(name, help=text)
        for option in ("--config", "--print_config", "--ckpt_path", "--seed_everything", "--model", "--data"):
            command.add_argument(option)
        for option in _trainer_options():
            command.add_argument(f"--trainer.{option}")
    for name, text in COMMANDS.items():
        of_command = import_module(f"lightning_distrec.cli.{name}").parser()
        # Each parser has its own --help.
        commands.add_parser(name, help=text, parents=[of_command], conflict_handler="resolve")
    return full


def _trainer_options() -> list[str]:
    from lightning.pytorch import Trainer

    return [name for name in inspect.signature(Trainer.__init__).parameters if name not in ("self", "kwargs")]
