"""Commands of the console script that need no Trainer: about checkpoints, and about the machines they run on.

None of them loads torchrec, and only the doctor starts a process group. Of `advise`, `bench` and `plan` only the
options are here; cli.py says what they do.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from lightning_distrec.errors import DistRecError

OF_LIGHTNING = {
    "fit": "Train a model: fit --config FILE.yaml.",
    "validate": "Evaluate a model on its validation data.",
    "test": "Evaluate a model on its test data.",
    "predict": "Run a model over its prediction data.",
}
"""The commands that a LightningCLI has, for those who ask what there is."""

A_CHECKPOINT = "A checkpoint's folder, or a .ckpt, .pt or .safetensors file."

SAME, DIFFERENT, TROUBLE = 0, 1, 2
"""Exit codes, those of `diff`."""
NARROWEST_COLUMNS = 160
"""Width of what is printed where the output is no terminal."""


Action = Callable[[Namespace], int]


def run(args: Sequence[str], more: Mapping[str, Action] | None = None) -> int:
    """Run one of the commands; returns the exit code. What cannot be done is said in one line on stderr.

    args: the command line, without the program. more: what the commands do that need strategies, which are not ours to
    load. Raises SystemExit: it asks for help, or is not understood.
    """
    parser = _parser()
    if not args:
        parser.print_help(sys.stderr)
        return TROUBLE
    given = parser.parse_args(list(args))
    command = given[given.subcommand]
    action = command[command.subcommand] if given.subcommand == "checkpoint" else command
    name = command.subcommand if given.subcommand == "checkpoint" else given.subcommand
    try:
        return (_ACTIONS | dict(more or {}))[name](action)
    except (DistRecError, OSError) as error:
        print(f"lightning-distrec: {error}", file=sys.stderr)
        return TROUBLE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-distrec",
        description="Train recommendation models with sharded embedding tables, and handle their checkpoints.",
        epilog="The options of a command: lightning-distrec fit --help.",
    )
    commands = parser.add_subcommands(title="commands", metavar="COMMAND")
    for name, text in OF_LIGHTNING.items():
        commands.add_subcommand(name, ArgumentParser(), help=text)
    commands.add_subcommand("advise", _advise_parser(), help="Say which strategy suits a model, and why.")
    commands.add_subcommand("plan", _plan_parser(), help="Plan tables for ranks that are not there: do they fit?")
    commands.add_subcommand("bench", _bench_parser(), help="Measure a recipe under several strategies.")
    commands.add_subcommand("doctor", _doctor_parser(), help="Look at the ranks, machines and links of a job.")
    commands.add_subcommand("slurm", _slurm_parser(), help="Write a script for sbatch that runs a recipe.")
    commands.add_subcommand("export", _export_parser(), help="Write a checkpoint as one plain file.")
    checkpoint = ArgumentParser(description="Look into checkpoints: folders, and plain files of torch or safetensors.")
    commands.add_subcommand("checkpoint", checkpoint, help="Look into checkpoints: inspect, diff.")
    of_checkpoint = checkpoint.add_subcommands(title="commands", metavar="COMMAND")
    of_checkpoint.add_subcommand("inspect", _inspect_parser(), help="Show what a checkpoint holds.")
    of_checkpoint.add_subcommand("diff", _diff_parser(), help="Show in what two checkpoints differ.")
    return parser


def _advise_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Say which strategy suits a model, and why: reckon the memory that each needs. The "
        "model is built, and one batch looked at, on this machine's CPU; nothing is trained."
    )
    parser.add_argument("--config", type=str, action="append", help="A YAML for fit; again for one more behind it.")
    parser.add_argument("--nodes", type=int | None, help="Number of nodes; the YAML's otherwise.")
    parser.add_argument("--devices", type=int | None, help="Devices of a node; the YAML's otherwise.")
    parser.add_argument("--device-memory", type=str | None, help="Memory of a device: 80GB, 24GiB; else this one's.")
    parser.add_argument("--meta", action="store_true", help="Build the model without memory; no activations then.")
    parser.add_argument("--no-batch", action="store_true", help="Read no data; activations are left out.")
    parser.add_argument("--json", action="store_true", help="Print JSON, with all numbers in bytes.")
    return parser


def _plan_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Plan the tables of a model for ranks that are not there: whether they fit, what each rank holds, "
        "does and sends, the largest batch, and how few nodes would do. The model is built without memory; nothing is "
        "trained, and no data is read. Exit code 0: they fit; 1: they do not; 2: it cannot be said."
    )
    parser.add_argument("--config", type=str, action="append", help="A YAML for fit; again for one more behind it.")
    parser.add_argument("--nodes", type=int | None, help="Number of nodes; the YAML's otherwise.")
    parser.add_argument("--devices", type=int | None, help="Devices of a node; the YAML's otherwise.")
    parser.add_argument("--device-memory", type=str | None, help="Memory of a rank: 80GB, 24GiB; the YAML's otherwise.")
    parser.add_argument("--host-memory", type=str | None, help="Memory of a node for tables that GPUs read from there.")
    parser.add_argument("--accelerator", type=Literal["cuda", "cpu"] | None, help="The YAML's otherwise.")
    parser.add_argument(
        "--bandwidth", type=str, action="append", help="cross_node=25GB/s and the like; again for more."
    )
    parser.add_argument("--reserve", type=str | None, help="What is not for tables: 15%%, 4GB, measure; see the docs.")
    parser.add_argument("--batch-size", type=int | None, help="Examples per rank and step; the YAML's otherwise.")
    parser.add_argument("--plan-file", type=str | None, help="Look at this plan.json instead of planning.")
    parser.add_argument("--html", type=str | None, help="A file for the plan's page.")
    parser.add_argument("--save-plan", type=str | None, help="A file for the plan, for planning.plan_file.")
    parser.add_argument("--quick", action="store_true", help="Leave out the largest batch and the fewest nodes.")
    parser.add_argument("--json", action="store_true", help="Print JSON, with all numbers of all ranks.")
    return parser


def _bench_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Run a recipe under several strategies and numbers of devices, in turns, for some steps each, "
        "without its callbacks, loggers and checkpoints. Exit code 1: nothing could be measured."
    )
    parser.add_argument("--config", type=str, action="append", help="A YAML for fit; again for one more behind it.")
    parser.add_argument("--strategies", type=str, default="ddp_tuned,fsdp_tuned,torchrec_sharded", help="Their names.")
    parser.add_argument("--devices", type=str, default="1,2", help="Numbers of devices, with commas between them.")
    parser.add_argument("--steps", type=int, default=30, help="Measured steps of a run.")
    parser.add_argument("--warmup", type=int, default=5, help="Steps before them.")
    parser.add_argument("--rounds", type=int, default=3, help="How often each is run.")
    parser.add_argument("--timeout", type=float, default=600.0, help="Seconds after which a run is given up.")
    parser.add_argument("--out", type=str, default="bench", help="A folder for results.json and results.png.")
    return parser


def _doctor_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Look at the ranks, machines and links that a job would get, and say what stands in its way. "
        "Alone, or started as the job will be: srun -N2 --ntasks-per-node=8 lightning-distrec doctor. Exit code 1: "
        "something does; 2: the ranks do not meet."
    )
    parser.add_argument("--folder", type=str, default=".", help="A folder that all ranks are to see.")
    parser.add_argument("--timeout", type=float, default=60.0, help="How many seconds ranks wait for each other.")
    parser.add_argument("--json", action="store_true", help="Print JSON, on rank 0, with all that was found.")
    return parser


def _slurm_parser() -> ArgumentParser:
    from lightning_distrec.cluster.batch_script import Wanted

    parser = ArgumentParser(
        description="Write a script for sbatch that runs a recipe: with srun, and a signal before the time is over."
    )
    parser.add_class_arguments(Wanted)
    parser.add_argument("--out", type=str, default="-", help="A file, which must not be there yet; -: print it.")
    return parser


def _export_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Write a checkpoint as one plain file, in one process and with little memory, however large the "
        "tables are."
    )
    parser.add_argument("checkpoint", type=str, help=A_CHECKPOINT)
    parser.add_argument(
        "out",
        type=str,
        help="*.pt or *.safetensors: the unsharded module's state_dict. *.ckpt: a Lightning checkpoint, which any "
        "Trainer resumes from.",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace OUT if it is there.")
    return parser


def _inspect_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Show what a checkpoint holds, who wrote it, and whether it is complete. Exit code 2: it is not."
    )
    parser.add_argument("path", type=str, help=A_CHECKPOINT)
    parser.add_argument("--json", action="store_true", help="Print JSON, with all tensors.")
    parser.add_argument("--all", action="store_true", help="List all tensors, and not only the largest.")
    parser.add_argument("--verify", action="store_true", help="Read all of it, and compare it with its checksums.")
    return parser


def _diff_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Show in what two checkpoints differ. Exit code 0: in nothing; 1: in something; 2: one of them "
        "cannot be read."
    )
    parser.add_argument("a", type=str, help=A_CHECKPOINT)
    parser.add_argument("b", type=str, help="The other one; it may be of another kind.")
    parser.add_argument("--values", action="store_true", help="Read all tensors, and compare their values.")
    parser.add_argument("--json", action="store_true", help="Print JSON, with all differences.")
    return parser


# torch loads with what is imported below, which those who ask for help need not wait for.


def _doctor(given: Namespace) -> int:
    from lightning_distrec.cluster.diagnosis import as_json, print_diagnosis, remarks_on
    from lightning_distrec.cluster.doctor import examine
    from lightning_distrec.cluster.environment import find_launched

    found = examine(Path(given.folder).absolute(), given.timeout, lambda said: print(said, file=sys.stderr, flush=True))
    remarks = remarks_on(found)
    launched = find_launched()
    if launched is None or launched.rank == 0:
        if given.json:
            print(json.dumps(as_json(found, remarks), indent=1))
        else:
            print_diagnosis(found, remarks, console())
    return DIFFERENT if any(remark.kind == "error" for remark in remarks) else SAME


def _slurm(given: Namespace) -> int:
    from lightning_distrec.cluster.batch_script import Wanted, batch_script

    options = {name: value for name, value in vars(given).items() if name != "out"}
    text = batch_script(Wanted(**options))
    if given.out == "-":
        print(text, end="")
    else:
        with open(given.out, "x") as file:
            file.write(text)
        print(f"Written: {given.out}. Submit it with: sbatch {given.out}")
    return SAME


def _export(given: Namespace) -> int:
    from lightning_distrec.checkpoint.tools.export import export

    shown = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with (
        leaving_when_asked(),
        Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress,
    ):
        task = progress.add_task("", total=None)
        export(
            Path(given.checkpoint),
            Path(given.out),
            overwrite=given.overwrite,
            on_progress=lambda written, total: progress.update(task, completed=written, total=total),
        )
    return SAME


@contextmanager
def leaving_when_asked() -> Iterator[None]:
    """Leave by an exception where the process is asked to end, so that nothing half-written stays."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _inspect(given: Namespace) -> int:
    from lightning_distrec.checkpoint.tools.describe import describe, print_description

    found = describe(Path(given.path))
    if given.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        print_description(found, console(), given.all)
    if found.problem is not None:
        print(f"lightning-distrec: {found.problem}", file=sys.stderr)
        return TROUBLE
    return _verify(Path(given.path)) if given.verify else SAME


def _verify(path: Path) -> int:
    from lightning_distrec.checkpoint.tools.verify import verify

    changed = verify(path)
    for what in changed:
        print(f"lightning-distrec: {path}: {what} is not as it was written.", file=sys.stderr)
    if not changed:
        print("All bytes are as they were written.", file=sys.stderr)
    return TROUBLE if changed else SAME


def _diff(given: Namespace) -> int:
    from lightning_distrec.checkpoint.tools.compare import compare, print_comparison

    found = compare(Path(given.a), Path(given.b), values=given["values"])  # given.values is a method
    if given.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        print_comparison(found, console())
    return SAME if found.is_same else DIFFERENT


def console() -> Console:
    """Return a console that takes names of tensors for what they are."""
    made = Console(markup=False, emoji=False, highlight=False)
    if not made.is_terminal:
        made = Console(markup=False, emoji=False, highlight=False, width=NARROWEST_COLUMNS)
    return made


_ACTIONS: dict[str, Action] = {
    "doctor": _doctor,
    "slurm": _slurm,
    "export": _export,
    "inspect": _inspect,
    "diff": _diff,
}
