"""The console script `lightning-distrec`: fit, validate, test and predict from a YAML recipe, and our own commands."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from lightning_distrec.cli import commands


def main(args: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code. args: the command line, sys.argv's where None."""
    args = sys.argv[1:] if args is None else list(args)
    if _is_for_lightning(args):
        run_lightning(args)
        return 0
    _make_working_directory_importable()
    return commands.run(args, {"advise": _advise, "bench": _bench, "plan": _plan})


def _is_for_lightning(args: Sequence[str]) -> bool:
    """Whether LightningCLI is to read the command line; what nobody knows is for ours, who tell all that there is."""
    if not args:
        return "PL_SUBCOMMAND" in os.environ
    return args[0] in commands.OF_LIGHTNING or (args[0].startswith("-") and args[0] not in ("-h", "--help"))


def run_lightning(args: Sequence[str]) -> None:
    """Run a LightningCLI over any LightningModule and LightningDataModule, named in YAML by class_path.

    The working directory is importable, so that `class_path: recipes.movielens_dlrm.model.ClickModel` is found where
    the recipe is started. Every option can come from the environment too (PL_FIT__TRAINER__MAX_EPOCHS and the like).
    """
    from lightning.pytorch.cli import LightningCLI  # slow to load, and our own commands have no use for it

    _make_working_directory_importable()
    LightningCLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        # Lightning refuses to run twice in a folder; a second run of a recipe must not surprise anyone.
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"default_env": True},
        args=None if list(args) == sys.argv[1:] else list(args),  # Lightning warns where it is given both
    )


def _make_working_directory_importable() -> None:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)


def _advise(given: Namespace) -> int:
    from lightning_distrec.advice.report import as_json, print_advice
    from lightning_distrec.cli.advise import advise_on

    advice = advise_on(given)
    if given.json:
        print(json.dumps(as_json(advice), indent=1))
    else:
        print_advice(advice, commands.console())
    return commands.SAME


def _bench(given: Namespace) -> int:
    from lightning_distrec.bench.report import NO_PICTURE, can_draw, draw, print_results
    from lightning_distrec.bench.rounds import as_json
    from lightning_distrec.cli.bench import bench

    with commands.leaving_when_asked():  # so that no run outlives this process
        results = bench(given, lambda said: print(said, file=sys.stderr, flush=True))
    print_results(results, given.steps, commands.console())
    folder = Path(given.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(as_json(results), indent=1))
    has_numbers = any(not result.why_not for result in results)
    if not has_numbers:
        return commands.DIFFERENT
    if can_draw():
        draw(results, folder / "results.png")
    else:
        print(f"lightning-distrec: {NO_PICTURE}", file=sys.stderr)
    return commands.SAME


def _plan(given: Namespace) -> int:
    from lightning_distrec.advice.dry_run_report import as_json, print_dry_run
    from lightning_distrec.cli.plan import plan_ahead

    found = plan_ahead(given)
    if given.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        print_dry_run(found, commands.console())
    if found.facts is None and (given.html or given.save_plan):
        print("lightning-distrec: there is no plan, so that no file was written.", file=sys.stderr)
    return commands.SAME if found.fits else commands.DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
