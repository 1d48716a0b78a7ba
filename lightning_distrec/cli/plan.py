"""The command `plan`: a dry run of a recipe's YAML. Its module is built on the meta device, and nothing is trained."""

import json
import sys
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from lightning_distrec.cli.output import EXIT_NEGATIVE, EXIT_OK, console


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        prog="lightning-distrec plan",
        description="Plan the embedding tables of a module for any cluster, without running on it. Print whether they "
        "fit, what each rank stores, computes and sends, the largest batch, and the minimum number of nodes. The "
        "module is built without memory; data is read with --from-data only, and nothing is trained. Exit codes: 0: "
        "the tables fit; 1: they do not; 2: the recipe or an option is wrong.",
    )
    add = parser.add_argument
    add("--config", type=str, action="append", help="Read this YAML file, as fit does; repeat to merge several.")
    add("--nodes", type=int | None, help="Plan for this many nodes instead of the YAML's.")
    add("--devices", type=int | None, help="Plan for this many devices per node instead of the YAML's.")
    add("--device-memory", type=str | None, help="Plan for this memory per rank (80GB, 24GiB) instead of the YAML's.")
    add("--host-memory", type=str | None, help="Let GPUs read tables from this much host memory per node.")
    add("--accelerator", type=Literal["cuda", "cpu"] | None, help="Plan for this accelerator instead of the YAML's.")
    add("--bandwidth", type=str, action="append", help="Set a bandwidth, such as cross_node=25GB/s; repeat for others.")
    add("--reserve", type=str | None, help="Reserve memory for everything but tables: 15% or 4GB.")
    add("--batch-size", type=int | None, help="Plan for this many samples per rank and step instead of the YAML's.")
    add("--from-data", type=int | None, help="Plan by the ids and different rows of this number of batches.")
    add("--plan-file", type=str | None, help="Examine this plan.json instead of searching for a plan.")
    add("--html", type=str | None, help="Write the plan as a page to this file.")
    add("--save-plan", type=str | None, help="Write the plan to this file, for planning.plan_file.")
    add("--quick", action="store_true", help="Skip the search for the largest batch and the minimum number of nodes.")
    add("--json", action="store_true", help="Print JSON with all numbers of all ranks.")
    return parser


def run(options: Namespace) -> int:
    """Run the command and return its exit code."""
    # Here, so that --help does not load torchrec.
    from lightning_distrec.advice.dry_run_report import as_json, print_dry_run
    from lightning_distrec.cli.plan_recipe import plan_ahead

    found = plan_ahead(options)
    if options.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        print_dry_run(found, console())
    if found.plan is None and (options.html or options.save_plan):
        print("lightning-distrec: there is no plan, so no file was written.", file=sys.stderr)
    return EXIT_OK if found.fits else EXIT_NEGATIVE
