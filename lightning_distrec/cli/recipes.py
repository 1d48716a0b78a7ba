"""The command `recipes`: lists the jobs that come with the package, and copies one to start from."""

import ast
import filecmp
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser, Namespace
from rich.table import Table as TextTable

from lightning_distrec.cli.output import EXIT_OK, console
from lightning_distrec.errors import ConfigError, did_you_mean

PACKAGE = Path(__file__).parents[1]
USED = re.compile(r"\brecipes\.(\w+)")
"""Another part of the folder that a file names, in an import or a class_path."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        prog="lightning-distrec recipes",
        description="List the jobs that come with the package, or copy one: model, data and YAML files to run and to "
        "change.",
    )
    commands = parser.add_subcommands()
    commands.add_subcommand("list", ArgumentParser(description="Print the name of each recipe and what it does."))
    copy = ArgumentParser(description="Copy a recipe, and what it shares with others, to FOLDER/recipes.")
    copy.add_argument("name", type=str, help="Copy this recipe.")
    copy.add_argument("--into", type=str, default=".", help="Copy into this folder, from which it then runs.")
    commands.add_subcommand("copy", copy)
    return parser


def run(options: Namespace) -> int:
    """Run the command and return its exit code."""
    folder = recipes_folder()
    if options.subcommand == "list":
        _print_list(folder)
    else:
        _copy(folder, options.copy.name, Path(options.copy.into))
    return EXIT_OK


def recipes_folder() -> Path:
    """Return the folder of all recipes: inside of the package in a wheel, beside it in a clone. Raises ConfigError."""
    for folder in (PACKAGE / "recipes", PACKAGE.parent / "recipes"):
        if (folder / "__init__.py").is_file():
            return folder
    raise ConfigError("recipes: this installation has none. Install the wheel again, or clone the repository.")


def names_of_recipes(folder: Path) -> list[str]:
    """Return the names: folders with a cpu.yaml."""
    return sorted(file.parent.name for file in folder.glob("*/cpu.yaml"))


def parts_of(folder: Path, name: str) -> list[str]:
    """Return what a recipe needs, as names in `folder`: itself first, then what its files name, and so on."""
    parts = [name]
    for part in parts:
        path = folder / part
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.yaml")]
        for file in files:
            for other in USED.findall(file.read_text("utf-8")):
                found = next((p for p in (other, f"{other}.py") if (folder / p).exists()), None)
                if found and found not in parts:
                    parts.append(found)
    return parts


def _print_list(folder: Path) -> None:
    text = TextTable(title="Copy one: lightning-distrec recipes copy NAME", title_justify="left")
    for heading in ("recipe", "strategy", "what it does"):
        text.add_column(heading)
    for name in names_of_recipes(folder):
        does = ast.get_docstring(ast.parse((folder / name / "__init__.py").read_text("utf-8"))) or ""
        text.add_row(name, _strategy(folder / name / "cpu.yaml"), does.splitlines()[0])
    console().print(text)


def _strategy(file: Path) -> str:
    strategy = yaml.safe_load(file.read_text("utf-8"))["trainer"]["strategy"]
    return strategy if isinstance(strategy, str) else strategy["class_path"].rpartition(".")[2]


def _copy(folder: Path, name: str, into: Path) -> None:
    names = names_of_recipes(folder)
    if name not in names:
        raise ConfigError(
            f"recipes copy {name}: there is none{did_you_mean(name, names)} There are {', '.join(names)}."
        )
    target = into / "recipes"
    if (target / name).exists():
        raise ConfigError(f"recipes copy {name}: {target / name} exists already. Remove it, or set --into FOLDER.")
    target.mkdir(parents=True, exist_ok=True)
    for part in ["__init__.py", *parts_of(folder, name)]:
        if (target / part).exists():
            if changed := sorted(_different(folder / part, target / part)):
                print(f"Kept, though they differ from the package's: {', '.join(map(str, changed))}")
        elif (folder / part).is_dir():
            shutil.copytree(folder / part, target / part, ignore=LEFT_OUT)
        else:
            shutil.copyfile(folder / part, target / part)
    print(f"Copied to {target / name}. Read its README.md, or run it{'' if into == Path() else f' in {into}'}:")
    print(f"  lightning-distrec fit --config recipes/{name}/cpu.yaml")


def _different(original: Path, there: Path) -> Iterator[Path]:
    """Yield the files that both have and that differ."""
    files = (
        [original] if original.is_file() else [file for file in original.rglob("*") if file.suffix in (".py", ".yaml")]
    )
    for file in files:
        copied = there / file.relative_to(original) if original.is_dir() else there
        if copied.is_file() and not filecmp.cmp(file, copied, shallow=False):
            yield copied
