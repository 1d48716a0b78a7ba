"""The reference pages name the options that the code has, and no others."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import lightning_distrec.data
import lightning_distrec.metrics
import lightning_distrec.retrieval
from lightning_distrec.cli.command_line import COMMANDS
from lightning_distrec.strategies.run.strategy import DistRecStrategy
from tests.docs.command_help import with_help

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = ("strategy_options", "callbacks", "api")
"""Pages of the reference that the site fills with docstrings."""
CLASSES = [
    name for name in lightning_distrec.__all__ if inspect.isclass(getattr(lightning_distrec, name))
]
CLASSES.remove("LaunchedRanks")  # strategies make it
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")


def _documented_arguments(owner: type) -> list[str]:
    """Return the arguments that a docstring in Google's style explains."""
    text = inspect.getdoc(owner) or ""
    return re.findall(r"^    (\w+):", text.partition("\nArgs:\n")[2], re.MULTILINE)


@pytest.mark.parametrize("name", [*CLASSES, "DistRecStrategy"])
def test_a_docstring_has_the_arguments_of_its_class_and_no_others(name):
    owner = getattr(lightning_distrec, name, DistRecStrategy)
    if dataclasses.is_dataclass(owner):
        return  # its fields have docstrings of their own
    assert sorted(_documented_arguments(owner)) == sorted(inspect.signature(owner).parameters)


@pytest.mark.parametrize("name", [name for name in CLASSES if name.endswith("Options")])
def test_each_field_of_options_has_a_docstring(name):
    owner = getattr(lightning_distrec, name)
    body = ast.parse(inspect.getsource(owner)).body[0].body
    fields = [at for at, line in enumerate(body) if isinstance(line, ast.AnnAssign)]
    assert len(fields) == len(dataclasses.fields(owner))
    for at in fields:
        following = body[at + 1]
        assert isinstance(following, ast.Expr), ast.unparse(body[at])
        assert isinstance(following.value, ast.Constant), ast.unparse(body[at])


def test_the_reference_has_every_public_name_once():
    pages = [DOCS / "reference" / f"{page}.md" for page in GENERATED]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    names = re.findall(r"^::: lightning_distrec\.(\S+)$", text, re.MULTILINE)
    methods = ("exchange", "full_parameter", "full_state_dict", "gradient_norms", "unshard")
    bases = ("DistRecStrategy", "IncrementalOptions", "tables")
    annexes = (lightning_distrec.data, lightning_distrec.metrics, lightning_distrec.retrieval)
    modules = (lightning_distrec, *annexes)
    public = [name for module in modules for name in module.__all__]
    assert sorted(name.rpartition(".")[2] for name in names) == sorted([
        *public,
        *methods,
        *bases,
        "export_for_serving",
        "TopK",
    ])


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_page_of_commands_has_the_help_of_each(command):
    page = (DOCS / "reference" / "command_line.md").read_text("utf-8")
    assert f"<!-- help: {command} " in page
    assert f"usage: lightning-distrec {command}" in with_help(page)


def test_the_reference_has_every_error():
    from lightning_distrec import errors

    text = (DOCS / "faq.md").read_text("utf-8")
    own_part = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, Exception)
    }
    assert own_part - {"DistRecError"} == set(
        re.findall(r"^\| `(\w+Error)` \|", text, re.MULTILINE)
    )


def test_the_files_that_the_architecture_names_exist():
    named = FILE.findall((DOCS / "architecture.md").read_text("utf-8"))
    missing = [
        name
        for name in named
        if not any((top / name).exists() for top in (ROOT, ROOT / "lightning_distrec"))
    ]
    assert named
    assert missing == []


def test_the_tree_of_the_architecture_has_every_folder():
    page = (DOCS / "architecture.md").read_text("utf-8")
    folders = {
        path.name
        for path in (ROOT / "lightning_distrec").rglob("*")
        if (path / "__init__.py").exists()
    }
    assert {folder for folder in folders if f" {folder}/ " not in page} == set()
