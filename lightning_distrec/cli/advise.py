"""The command `advise`: prints which strategy suits the module of a recipe's YAML. Nothing is trained."""

import json

from jsonargparse import ArgumentParser, Namespace

from lightning_distrec.cli.output import EXIT_OK, console


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        prog="lightning-distrec advise",
        description="Print which strategy suits a module, and why: estimate the memory that each strategy needs per "
        "rank. The module is built, and runs one batch, on this machine's CPU; nothing is trained.",
    )
    add = parser.add_argument
    add("--config", type=str, action="append", help="Read this YAML file, as fit does; repeat to merge several.")
    add("--nodes", type=int | None, help="Assume this many nodes instead of the YAML's.")
    add("--devices", type=int | None, help="Assume this many devices per node instead of the YAML's.")
    add("--device-memory", type=str | None, help="Assume this memory per device (80GB, 24GiB), not this machine's.")
    add("--meta", action="store_true", help="Build the module without memory; leave activations out.")
    add("--no-batch", action="store_true", help="Read no data; leave activations out.")
    add("--json", action="store_true", help="Print JSON with all numbers in bytes.")
    return parser


def run(options: Namespace) -> int:
    """Run the command and return its exit code."""
    # Here, so that --help does not load torchrec.
    from lightning_distrec.advice.advise import as_json, print_advice
    from lightning_distrec.cli.advise_recipe import advise_on

    advice = advise_on(options)
    if options.json:
        print(json.dumps(as_json(advice), indent=1))
    else:
        print_advice(advice, console())
    return EXIT_OK
