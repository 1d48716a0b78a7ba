"""The reference pages name the options that the code has, and no others."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import lightning_distrec.data
import lightning_distrec.metrics
import lightning_distrec.retrieval
from lightning_distrec.strategies.run.strategy import DistRecStrategy

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")


def _section(page: str, heading: str) -> str:
    text = (DOCS / page).read_text("utf-8")
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def _documented(text: str) -> set[str]:
    """Return the names in the first cells of a page's tables."""
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([a-z_0-9]+)`", cell)}


def _arguments(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", ["torchrec_sharded", "ddp_tuned", "fsdp_tuned"])
def test_the_reference_has_the_arguments_of_a_strategy_and_no_others(name):
    classes = {
        "torchrec_sharded": lightning_distrec.TorchRecShardedStrategy,
        "ddp_tuned": lightning_distrec.TunedDDPStrategy,
        "fsdp_tuned": lightning_distrec.TunedFSDPStrategy,
    }
    page = "reference/strategy_options.md"
    own_part = _section(page, name).partition("| `planning` | Default |")[0]
    everywhere = _arguments(DistRecStrategy)
    assert _documented(own_part) | _documented(_section(page, "All strategies")) == (
        _arguments(classes[name]) - {"run_options"} | everywhere
    )


def test_the_reference_has_the_options_of_planning_and_of_tables():
    planning = _section("reference/strategy_options.md", "torchrec_sharded").partition(
        "| `planning` | Default |"
    )[2]
    assert _documented(planning) == {
        field.name for field in fields(lightning_distrec.PlanningOptions)
    }
    tables = (DOCS / "reference" / "table_options.md").read_text("utf-8").partition("## ")[0]
    assert _documented(tables) == {field.name for field in fields(lightning_distrec.TableOptions)}


@pytest.mark.parametrize(
    "name", ["Throughput", "Communication", "RankMonitor", "PlanLogger", "ScaledLearningRate"]
)
def test_the_reference_has_the_arguments_of_a_callback(name):
    shown = _section("reference/callbacks.md", name)
    for argument in _arguments(getattr(lightning_distrec, name)):
        assert re.search(rf"\b{argument}\b", shown), argument


def test_the_api_page_has_every_public_name_once():
    page = (DOCS / "reference" / "api.md").read_text("utf-8")
    names = re.findall(r"^::: lightning_distrec\.(\S+)$", page, re.MULTILINE)
    methods = ("exchange", "full_parameter", "full_state_dict", "gradient_norms", "unshard")
    annexes = (lightning_distrec.data, lightning_distrec.metrics, lightning_distrec.retrieval)
    modules = (lightning_distrec, *annexes)
    public = [name for module in modules for name in module.__all__]
    assert sorted(name.rpartition(".")[2] for name in names) == sorted([
        *public,
        *methods,
        "export_for_serving",
        "TopK",
    ])


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
