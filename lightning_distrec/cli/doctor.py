"""The command `doctor`: checks the ranks, machines and network links of a job before it is submitted."""

import json
import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lightning_distrec.cli.output import EXIT_NEGATIVE, EXIT_OK, console


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        prog="lightning-distrec doctor",
        description="Check the ranks, machines and network links that a job would get, and print what prevents it from "
        "running. Run it alone, or start it as the job will be started: srun -N2 --ntasks-per-node=8 lightning-distrec "
        "doctor. Exit codes: 0: no errors found; 1: errors found; 2: the ranks did not find each other.",
    )
    parser.add_argument("--folder", type=str, default=".", help="Check that all ranks share this folder.")
    parser.add_argument("--timeout", type=float, default=60.0, help="Wait this many seconds for the other ranks.")
    parser.add_argument("--json", action="store_true", help="Print JSON with all findings, on rank 0.")
    return parser


def run(options: Namespace) -> int:
    """Run the command and return its exit code."""
    from lightning_distrec.cluster.diagnosis import as_json, print_diagnosis, problems_of
    from lightning_distrec.cluster.doctor import examine
    from lightning_distrec.cluster.environment import find_launched

    findings = examine(
        Path(options.folder).absolute(), options.timeout, lambda line: print(line, file=sys.stderr, flush=True)
    )
    problems = problems_of(findings)
    launched = find_launched()
    if launched is None or launched.rank == 0:
        if options.json:
            print(json.dumps(as_json(findings, problems), indent=1))
        else:
            print_diagnosis(findings, problems, console())
    return EXIT_NEGATIVE if any(problem.kind == "error" for problem in problems) else EXIT_OK
