"""The command `slurm`: writes an sbatch script that runs a recipe."""

from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from lightning_distrec.cli.output import EXIT_OK
from lightning_distrec.cluster.batch_script import BatchJob, batch_script


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        prog="lightning-distrec slurm",
        description="Write an sbatch script that runs a recipe: it checks the job with `doctor`, starts `fit` with "
        "srun, saves a checkpoint before the time limit and resumes from it when Slurm requeues the job.",
    )
    add = parser.add_argument
    add("--config", type=str, action="append", help="Run this YAML file, as fit does; repeat to merge several.")
    add("--nodes", type=int, required=True, help="Request this many nodes.")
    add("--ranks-per-node", type=int, required=True, help="Start this many ranks on each node, usually one per GPU.")
    add("--gpus", type=bool, default=True, help="Request one GPU for each rank.")
    add("--cpus-per-rank", type=int, default=8, help="Request CPU cores for a rank and the workers of its dataloaders.")
    add("--time", type=str, default="24:00:00", help="Set the time limit, in any format of Slurm, such as 7-00:00:00.")
    add("--partition", type=str, default="", help="Submit to this partition; empty: Slurm's default.")
    add("--account", type=str, default="", help="Charge this account; empty: Slurm's default.")
    add("--signal-seconds", type=int, default=120, help="Save a checkpoint this many seconds before the time limit.")
    add("--job-name", type=str, default="", help="Name the job; empty: the folder of the first YAML file.")
    add("--error", type=str, default="", help="Write stderr to this file, such as %%x-%%j.err; empty: into the log.")
    add(
        "--setup", type=str, action="append", help='Run this line first, such as "module load cuda"; repeat for others.'
    )
    add("--sbatch", type=str, action="append", help='Add this option, such as "qos=high"; repeat for others.')
    add(
        "--launcher",
        type=Literal["srun", "torchrun"],
        default="srun",
        help="Start ranks with srun, or with one torchrun on each node, which starts them again after a failure.",
    )
    add("overrides", type=str, nargs="*", help="Pass these to fit. Write them after --, as last ones.")
    add("--out", type=str, default="-", help="Write the script to this new file; -: print it.")
    return parser


def run(options: Namespace) -> int:
    """Run the command and return its exit code."""
    given = {name: value for name, value in vars(options).items() if name != "out"}
    for name in ("config", "setup", "sbatch", "overrides"):
        given[name] = tuple(given[name] or ())
    given["configs"] = given.pop("config")
    text = batch_script(BatchJob(**given))
    if options.out == "-":
        print(text, end="")
    else:
        with open(options.out, "x") as file:
            file.write(text)
        print(f"Wrote {options.out}. Submit it with: sbatch {options.out}")
    return EXIT_OK
