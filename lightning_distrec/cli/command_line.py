"""The command line: the options of each command, exit codes and the console. Nothing here loads
torch."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Literal

from lightning_distrec.errors import ConfigError, require

# These take a second to load, which --help, --version and complaints need not wait for.
if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace
    from rich.console import Console

LIGHTNING_COMMANDS = {
    "fit": "Train a module: fit --config FILE.yaml.",
    "validate": "Evaluate a module on its validation data.",
    "test": "Evaluate a module on its test data.",
    "predict": "Run a module on its prediction data.",
}
"""The commands of a LightningCLI, which parses their options."""

FOLDER_FORMATS = ("torch.export", "quantized")
"""Formats of `export` that are folders which answer requests."""

TOP_K_OPTIONS = {
    "queries": "Answer with the best rows of the table --items for what this method of the module "
    "returns of a batch, (examples, dim), in place of predict_step.",
    "items": "Path of the item table in the module, or its end, such as items.",
    "vocabulary": "Table of the columns whose values the rows of --items stand for. Default: "
    "answers are numbers of rows.",
    "index": "Find rows by an index of faiss, such as HNSW32 or 'IVF256,Flat nprobe=16'. Default: "
    "score all rows.",
}
"""Options of `export`, as the fields of `TopK`, for folders that answer with items."""

EXIT_OK = 0
EXIT_NEGATIVE = 1
EXIT_ERROR = 2
"""Exit codes as those of `diff`: 0 is a positive answer (fits, equal, ready), 1 a negative one, 2
no answer."""
PLAIN_WIDTH = 160
"""Width of tables where stdout is not a terminal."""


def console() -> Console:
    """Return a console that prints brackets in names as they are, and tables in full width into
    pipes."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(markup=False, emoji=False, highlight=False, width=width)


def check_options(options: Namespace, command: str, **minimums: int) -> None:
    """Raise ConfigError: --config is missing, or one of the numbers is below its minimum."""
    if not options.config:
        raise ConfigError(
            f"{command}: --config is missing. Give it the YAML file that fit would get."
        )
    for name, minimum in minimums.items():
        if options[name] is not None and options[name] < minimum:
            raise ConfigError(
                f"--{name.replace('_', '-')} {options[name]}: must be at least {minimum}."
            )


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that temporary files are removed and child processes are
    terminated."""
    # 128 + number is what a shell reports of a process that ended by this signal.
    earlier_handler = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier_handler)


Adder = Callable[..., object]
"""A parser's `add_argument`."""


def _advise(add: Adder) -> None:
    add(
        "--meta",
        action="store_true",
        help="Build the module without memory; leave activations out.",
    )
    add("--no-batch", action="store_true", help="Read no data; leave activations out.")
    link = "Say how long gradients take over this link: cross_node=1GB/s, on one node intra_node."
    add("--bandwidth", type=str, action="append", help=link)
    add("--json", action="store_true", help="Print JSON with all numbers in bytes.")


def _plan(add: Adder) -> None:
    add(
        "--host-memory",
        type=str | None,
        help="Let GPUs read tables from this much host memory per node.",
    )
    add(
        "--accelerator",
        type=Literal["cuda", "cpu"] | None,
        help="Plan for this accelerator instead of the YAML's.",
    )
    add(
        "--bandwidth",
        type=str,
        action="append",
        help="Set a bandwidth, such as cross_node=25GB/s; repeat for others.",
    )
    add("--reserve", type=str | None, help="Reserve memory for everything but tables: 15% or 4GB.")
    add(
        "--batch-size",
        type=int | None,
        help="Plan for this many samples per rank and step instead of the YAML's.",
    )
    add(
        "--from-data",
        type=int | None,
        help="Plan by the ids and different rows of this number of batches.",
    )
    add(
        "--plan-file",
        type=str | None,
        help="Examine this plan.json instead of searching for a plan.",
    )
    add("--html", type=str | None, help="Write the plan as a page to this file.")
    add("--save-plan", type=str | None, help="Write the plan to this file, for planning.plan_file.")
    add(
        "--quick",
        action="store_true",
        help="Skip the search for the largest batch and the minimum number of nodes.",
    )
    add("--json", action="store_true", help="Print JSON with all numbers of all ranks.")


def _bench(add: Adder) -> None:
    strategies = "Measure these strategies, and variants: YAML files that are laid over the job's."
    add("--strategies", type=str, default="ddp_tuned,fsdp_tuned,torchrec_sharded", help=strategies)
    devices = (
        "Measure on these numbers of devices. Default: 1,2; under srun or torchrun the ranks that "
        "these start."
    )
    add("--devices", type=str | None, help=devices)
    add("--steps", type=int, default=30, help="Measure this many steps of each run.")
    add("--warmup", type=int, default=5, help="Run this many steps before measuring.")
    add("--rounds", type=int, default=3, help="Run each case this many times.")
    add("--timeout", type=float, default=600.0, help="Stop a run after this many seconds.")
    add(
        "--samples-from",
        type=str | None,
        help="Count samples in this tensor of the batch, such as label or 0.ids.",
    )
    synthetic = (
        "In place of the job's data, look up random ids in all tables, for this many samples per "
        "rank and step."
    )
    add("--synthetic", type=int | None, help=synthetic)
    add(
        "--synthetic-ids",
        type=int,
        default=1,
        help="Draw this many ids for each feature of a sample.",
    )
    add(
        "--out",
        type=str,
        default="bench",
        help="Write results.json and results.png to this folder.",
    )


def _doctor(add: Adder) -> None:
    add("--folder", type=str, default=".", help="Check that all ranks share this folder.")
    add("--timeout", type=float, default=60.0, help="Wait this many seconds for the other ranks.")
    add("--json", action="store_true", help="Print JSON with all findings, on rank 0.")


def _slurm(add: Adder) -> None:
    add("--nodes", type=int, required=True, help="Request this many nodes.")
    add(
        "--ranks-per-node",
        type=int,
        required=True,
        help="Start this many ranks on each node, usually one per GPU.",
    )
    add("--gpus", type=bool, default=True, help="Request one GPU for each rank.")
    add(
        "--cpus-per-rank",
        type=int,
        default=8,
        help="Request CPU cores for a rank and the workers of its dataloaders.",
    )
    add(
        "--time",
        type=str,
        default="24:00:00",
        help="Set the time limit, in any format of Slurm, such as 7-00:00:00.",
    )
    add(
        "--partition",
        type=str,
        default="",
        help="Submit to this partition; empty: Slurm's default.",
    )
    add("--account", type=str, default="", help="Charge this account; empty: Slurm's default.")
    add(
        "--signal-seconds",
        type=int,
        default=120,
        help="Save a checkpoint this many seconds before the time limit.",
    )
    add(
        "--job-name",
        type=str,
        default="",
        help="Name the job; empty: the folder of the first YAML file.",
    )
    add(
        "--output",
        type=str,
        default="%x-%j.out",
        help="Write the log to this file, as in sbatch, with its patterns for names and numbers.",
    )
    add(
        "--error",
        type=str,
        default="",
        help="Write stderr to this file, as in sbatch; empty: into the log.",
    )
    add(
        "--setup",
        type=str,
        action="append",
        help='Run this line first: "module load cuda"; repeat for others.',
    )
    add(
        "--sbatch",
        type=str,
        action="append",
        help='Add this option, such as "qos=high"; repeat for others.',
    )
    launcher = (
        "Start ranks with srun, or with one torchrun on each node, which starts them again after a "
        "failure."
    )
    add("--launcher", type=Literal["srun", "torchrun"], default="srun", help=launcher)
    add(
        "overrides",
        type=str,
        nargs="*",
        help="Pass these to fit. Write them after --, as last ones.",
    )
    add("--out", type=str, default="-", help="Write the script to this new file; -: print it.")


def _export(add: Adder) -> None:
    add(
        "checkpoint",
        type=str,
        help="Convert this checkpoint: a folder, or a .ckpt, .pt or .safetensors file.",
    )
    add(
        "out",
        type=str,
        help="Write this file. *.pt or *.safetensors: the state_dict of the unsharded module. "
        "*.ckpt: a Lightning checkpoint, from which any Trainer resumes. With --format "
        "torch.export or quantized: a folder.",
    )
    add(
        "--format",
        choices=["safetensors", *FOLDER_FORMATS],
        metavar="FORMAT",
        help="torch.export: a folder with predict_step as a program, the tables, and a script "
        "that answers requests. quantized: the same with rows of 8 or 4 bits. Both need --config. "
        "safetensors: what *.safetensors names, too.",
    )
    add(
        "--config",
        action="append",
        help="The YAML that `fit` was given, for formats that are folders; repeatable.",
    )
    add("--bits", type=Literal[8, 4] | None, help="Bits of a number in quantized rows. Default: 8.")
    for name, help_text in TOP_K_OPTIONS.items():
        add(f"--{name}", help=help_text)
    pickles = (
        "Read a checkpoint saved with `checkpoint: {pickles: true}`. Its code is run: set it for "
        "files you trust."
    )
    add("--pickles", action="store_true", help=pickles)
    add("--overwrite", action="store_true", help="Replace OUT if it exists.")


def _completion(add: Adder) -> None:
    add("shell", type=Literal["bash", "zsh", "tcsh"], help="Print the script of this shell.")


def _recipes(parser: ArgumentParser) -> None:
    from jsonargparse import ArgumentParser

    commands = parser.add_subcommands()
    commands.add_subcommand(
        "list", ArgumentParser(description="Print the name of each recipe and what it does.")
    )
    copy = ArgumentParser(
        description="Copy a recipe, and what it shares with others, to FOLDER/recipes."
    )
    copy.add_argument("name", type=str, help="Copy this recipe.")
    copy.add_argument(
        "--into", type=str, default=".", help="Copy into this folder, from which it then runs."
    )
    commands.add_subcommand("copy", copy)


def _checkpoint(parser: ArgumentParser) -> None:
    from jsonargparse import ArgumentParser

    commands = parser.add_subcommands(title="commands", metavar="COMMAND")
    inspect = ArgumentParser(
        description="Print what a checkpoint contains, which version wrote it, and whether it is "
        "complete. Exit codes: 0: complete; 2: incomplete, damaged or unreadable."
    )
    inspect.add_argument(
        "path", type=str, help="Inspect this folder, or this .ckpt, .pt or .safetensors file."
    )
    inspect.add_argument("--json", action="store_true", help="Print JSON with all tensors.")
    inspect.add_argument(
        "--all", action="store_true", help="List all tensors instead of the largest ones."
    )
    inspect.add_argument(
        "--verify",
        action="store_true",
        help="Read all files and compare them with their checksums.",
    )
    commands.add_subcommand("inspect", inspect, help="Print what a checkpoint contains.")
    merge = ArgumentParser(
        description="Write a checkpoint by difference and its base as one full checkpoint, with "
        "little memory. Exit codes: 0: written; 2: it cannot be."
    )
    merge.add_argument(
        "difference", type=str, help="Merge this difference; its base is next to it."
    )
    merge.add_argument("out", type=str, help="Write this folder, which must not exist.")
    commands.add_subcommand(
        "merge", merge, help="Write a difference and its base as one full checkpoint."
    )
    inspect.prog = f"{parser.prog} inspect"
    merge.prog = f"{parser.prog} merge"


def _publish(parser: ArgumentParser) -> None:
    from jsonargparse import ArgumentParser

    commands = parser.add_subcommands(title="commands", metavar="COMMAND")
    inspect = ArgumentParser(
        description="Print the publications of a folder, their steps, rows, bytes and gaps. Exit "
        "codes: 0: a server can follow from the newest with all rows on; 2: it cannot."
    )
    inspect.add_argument("folder", type=str, help="Read this folder, or this URL.")
    inspect.add_argument(
        "--verify", action="store_true", help="Read all files and compare them with checksums."
    )
    commands.add_subcommand("inspect", inspect, help="Print the publications of a folder.")
    inspect.prog = f"{parser.prog} inspect"


def _columns(parser: ArgumentParser) -> None:
    from jsonargparse import ArgumentParser

    commands = parser.add_subcommands(title="commands", metavar="COMMAND")
    fit = ArgumentParser(
        description="Read all training rows once, and write vocabularies, quantiles and moments to "
        "the data's cache_dir, from which jobs with the same files and features take them. Workers "
        "of Dask do it: one for each core of this machine, or those of a cluster."
    )
    fit.add_argument(
        "--config",
        type=str,
        action="append",
        help="Fit the data of this YAML file, as fit does; repeat to merge several.",
    )
    fit.add_argument(
        "--scheduler",
        type=str | None,
        help="Use the workers of this scheduler, such as tcp://10.0.0.1:8786. They read the same "
        "paths, and have this package.",
    )
    commands.add_subcommand("fit", fit, help="Fit vocabularies, quantiles and moments.")
    fit.prog = f"{parser.prog} fit"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of ours, which a file of this folder runs by a function `run_NAME`."""

    help: str
    file: str
    """A name and no module: importing one loads torch."""
    details: str = ""
    """What its --help says beside `help`."""
    options: Adder | None = None
    """Adds its options."""
    subcommands: Callable[[ArgumentParser], None] | None = None
    config: str = ""
    """The verb of --config; "" for a command without, or with its own."""
    ranks: str = ""
    """The verb of --nodes, --devices and --device-memory."""

    def parser(self, name: str) -> ArgumentParser:
        """Return the parser of its command line."""
        from jsonargparse import ArgumentParser

        parser = ArgumentParser(
            prog=f"lightning-distrec {name}", description=f"{self.help} {self.details}"
        )
        add = parser.add_argument
        if self.config:
            text = f"{self.config} this YAML file, as fit does; repeat to merge several."
            add("--config", type=str, action="append", help=text)
        if self.ranks:
            add(
                "--nodes",
                type=int | None,
                help=f"{self.ranks} this many nodes instead of the YAML's.",
            )
            add(
                "--devices",
                type=int | None,
                help=f"{self.ranks} this many devices per node instead of the YAML's.",
            )
            add(
                "--device-memory",
                type=str | None,
                help=f"{self.ranks} this memory per device (80GB, 24GiB).",
            )
        if self.options is not None:
            self.options(add)
        if self.subcommands is not None:
            self.subcommands(parser)
        return parser


COMMANDS = {
    "advise": Command(
        help="Print which strategy suits a module, and why.",
        details="Add up the memory that each strategy needs per rank. The module is built, and "
        "runs one batch, on this machine's CPU; nothing is trained.",
        options=_advise,
        config="Read",
        ranks="Assume",
        file="advice_commands",
    ),
    "plan": Command(
        help="Plan embedding tables for any cluster, and print whether they fit.",
        details="Print what each rank stores, computes and sends, the largest batch, and the "
        "minimum number of nodes. The module is built without memory; data is read with "
        "--from-data only, and nothing is trained. Exit codes: 0: the tables fit; 1: they do not; "
        "2: it cannot be decided, or the recipe or an option is wrong.",
        options=_plan,
        config="Read",
        ranks="Plan for",
        file="advice_commands",
    ),
    "bench": Command(
        help="Measure a recipe under several strategies and numbers of devices.",
        details="The cases run in turns for a few steps each, without the recipe's callbacks, "
        "loggers and checkpoints. Exit code 1: no case could be measured.",
        options=_bench,
        config="Read",
        file="job_commands",
    ),
    "doctor": Command(
        help="Check the ranks, machines and network links of a job.",
        details="Print what prevents it from running. Run it alone, or start it as the job will "
        "be started: srun -N2 --ntasks-per-node=8 lightning-distrec doctor. Exit codes: 0: no "
        "errors found; 1: errors found; 2: the ranks did not find each other.",
        options=_doctor,
        file="job_commands",
    ),
    "recipes": Command(
        help="List the jobs that come with the package, or copy one.",
        details="A job is a model, data and YAML files to run and to change.",
        subcommands=_recipes,
        file="recipes",
    ),
    "slurm": Command(
        help="Write an sbatch script that runs a recipe.",
        details="It checks the job with `doctor`, starts `fit` with srun, saves a checkpoint "
        "before the time limit and resumes from it when Slurm requeues the job.",
        options=_slurm,
        config="Run",
        file="job_commands",
    ),
    "export": Command(
        help="Convert a checkpoint into a single file, or into a folder that answers requests.",
        details="The folder needs no more of this package. One process does it, with little "
        "memory, however large the tables are.",
        options=_export,
        file="checkpoint_commands",
    ),
    "checkpoint": Command(
        help="Inspect a checkpoint, or merge a difference.",
        subcommands=_checkpoint,
        file="checkpoint_commands",
    ),
    "columns": Command(
        help="Fit the features of columns before a job, on many cores or machines.",
        subcommands=_columns,
        file="columns_commands",
    ),
    "publish": Command(
        help="Inspect what a training job publishes for servers.",
        subcommands=_publish,
        file="publish_commands",
    ),
    "completion": Command(
        help="Print a script with which a shell completes commands and options.",
        details='For this shell alone: eval "$(lightning-distrec completion bash)". For all: '
        "write it to a file that the shell reads.",
        options=_completion,
        file="command_line",
    ),
}


def run_completion(options: Namespace) -> int:
    """Run the command and return its exit code."""
    require("shtab", "completion")
    import shtab  # no dependency of ours

    print(shtab.complete(_full_parser(), shell=options.shell))
    return EXIT_OK


def _full_parser() -> PlainParser:
    """Return one parser with all commands and options. It only lists them: each command parses its
    own."""
    from lightning.pytorch import Trainer  # takes a second to load

    full = PlainParser(prog="lightning-distrec")
    full.add_argument("--version", action="store_true", help="Print versions.")
    # Lightning's parsers take seconds to build.
    commands = full.add_subparsers()
    for name, text in LIGHTNING_COMMANDS.items():
        lightning_parser = commands.add_parser(name, help=text)
        for option in (
            "--config",
            "--print_config",
            "--ckpt_path",
            "--seed_everything",
            "--model",
            "--data",
        ):
            lightning_parser.add_argument(option)
        for option in signature(Trainer).parameters:
            lightning_parser.add_argument(f"--trainer.{option}")
    for name, command in COMMANDS.items():
        # Each parser has its own --help.
        commands.add_parser(
            name, help=command.help, parents=[command.parser(name)], conflict_handler="resolve"
        )
    return full
