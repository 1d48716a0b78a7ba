"""The command `recipes`: lists the jobs that come with the package, and copies one to start
from."""

import ast
import filecmp
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from lightning_distrec.cli.command_line import EXIT_OK, console
from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.registration import short_name
from lightning_distrec.units import text_table

if TYPE_CHECKING:
    from jsonargparse import Namespace

PACKAGE = Path(__file__).parents[1]
USED = re.compile(r"\brecipes\.(\w+)")
"""Another part of the folder that a file names, in an import or a class_path."""
LINK = re.compile(r"\[([^\]]+)\]\(\.\./\.\./(docs/[^)#]+)[^)]*\)")
"""A link of a recipe's README to the documentation, which is not beside a copy."""
STRATEGIES = "strategies"
"""YAML files that READMEs put after a recipe's."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def run_recipes(options: "Namespace") -> int:
    """Run the command and return its exit code."""
    folder = recipes_folder()
    if options.subcommand == "list":
        _print_list(folder)
    else:
        _copy(folder, options.copy.name, Path(options.copy.into))
    return EXIT_OK


def recipes_folder() -> Path:
    """Return the folder of all recipes: inside of the package in a wheel, beside it in a clone.
    Raises ConfigError."""
    for folder in (PACKAGE / "recipes", PACKAGE.parent / "recipes"):
        if (folder / "__init__.py").is_file():
            return folder
    raise ConfigError(
        "recipes: this installation has none. Install the wheel again, or clone the repository."
    )


def recipe_names(folder: Path) -> list[str]:
    """Return the names: folders with a cpu.yaml."""
    return sorted(file.parent.name for file in folder.glob("*/cpu.yaml"))


def find_parts(folder: Path, name: str) -> list[str]:
    """Return what a recipe needs, as names in `folder`: itself first, then what its files name, and
    so on."""
    parts = [name]
    # The list grows meanwhile: what is appended is searched in its turn.
    for part in parts:
        path = folder / part
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.yaml")]
        for file in files:
            for word in USED.findall(file.read_text("utf-8")):
                needed = word if (folder / word).exists() else f"{word}.py"
                if (folder / needed).exists() and needed not in parts:
                    parts.append(needed)
    return parts


def _print_list(folder: Path) -> None:
    headings = ("recipe", "strategy", "what it does")
    text = text_table(headings, headings, title="Copy one: lightning-distrec recipes copy NAME")
    for name in recipe_names(folder):
        # Not imported: a recipe may need packages that are not installed.
        description = (
            ast.get_docstring(ast.parse((folder / name / "__init__.py").read_text("utf-8"))) or ""
        )
        text.add_row(name, _strategy(folder / name / "cpu.yaml"), description.splitlines()[0])
    console().print(text)


def _strategy(file: Path) -> str:
    strategy = yaml.safe_load(file.read_text("utf-8"))["trainer"]["strategy"]
    return short_name(strategy if isinstance(strategy, str) else strategy["class_path"])


def _copy(folder: Path, name: str, into: Path) -> None:
    names = recipe_names(folder)
    if name not in names:
        raise ConfigError(
            f"recipes copy {name}: there is none{did_you_mean(name, names)} There are "
            f"{', '.join(names)}."
        )
    target = into / "recipes"
    if (target / name).exists():
        raise ConfigError(
            f"recipes copy {name}: {target / name} exists already. Remove it, or set --into FOLDER."
        )
    target.mkdir(parents=True, exist_ok=True)
    for part in ["__init__.py", STRATEGIES, *find_parts(folder, name)]:
        # What several recipes share may have been changed since an earlier copy.
        if (target / part).exists():
            changed = sorted(_changed_files(folder / part, target / part))
            if changed:
                print(
                    f"Kept, though they differ from the package's: {', '.join(map(str, changed))}"
                )
        elif (folder / part).is_dir():
            shutil.copytree(folder / part, target / part, ignore=LEFT_OUT)
        else:
            shutil.copyfile(folder / part, target / part)
    for readme in target.glob("*/README.md"):
        text = readme.read_text("utf-8")
        readme.write_text(LINK.sub(r"\1 (lightning_distrec: \2)", text), "utf-8")
    print(
        f"Copied to {target / name}. Read its README.md, or run "
        f"it{'' if into == Path() else f' in {into}'}:"
    )
    print(f"  lightning-distrec fit --config recipes/{name}/cpu.yaml")


def _changed_files(original: Path, copy: Path) -> Iterator[Path]:
    """Yield the files that both have and that differ."""
    for file in [original, *original.rglob("*.py"), *original.rglob("*.yaml")]:
        copied = copy / file.relative_to(original)
        # By content: otherwise filecmp trusts equal sizes and times.
        if copied.is_file() and not filecmp.cmp(file, copied, shallow=False):
            yield copied
