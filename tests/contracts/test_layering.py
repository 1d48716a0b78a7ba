"""Imports inside lightning_distrec point one way; docs/architecture.md draws the picture, this file holds it true."""

from pathlib import Path

import pytest

from tests.contracts.imports_of import Import, imports_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_distrec"

ROOMS = {"cluster", "sharding", "optimizers", "pipeline", "checkpoint"}
GROUND = {"errors", "versions", "_compat", "spans", "parts", "machine", "words", "sizes", "on_disk"}

MAY_IMPORT = {
    "errors": set(),
    "versions": {"errors"},
    "spans": set(),
    "parts": set(),
    "machine": set(),
    "words": set(),
    "sizes": {"errors"},
    "on_disk": set(),
    "_compat": {"errors", "versions"},
    **{room: GROUND for room in ROOMS},  # and never one another: strategies join them
    "strategies": GROUND | ROOMS,
    "callbacks": {"errors", "_compat", "spans"},  # any strategy will do: they read what it exposes, and hear its spans
    "commands": GROUND | {"checkpoint", "cluster"},  # without strategies, so that they start at once
    "advising": GROUND | ROOMS | {"strategies", "callbacks"},
    "planning_ahead": GROUND | ROOMS | {"strategies", "advising"},
    "bench": GROUND | {"callbacks"},  # strategies are names to it: it starts processes
    "cli": GROUND | ROOMS | {"strategies", "callbacks", "commands", "advising", "planning_ahead", "bench", "__init__"},
    "__init__": GROUND | ROOMS | {"strategies", "callbacks"},
}
"""Part of the package -> the parts that it may import. Recipes stand on top and may import all of them."""


def part_of(file: Path, root: Path) -> str:
    """Return the folder or file directly under the package that `file` belongs to."""
    return file.relative_to(root / PACKAGE).parts[0].removesuffix(".py")


def part_imported(imported: Import, parts: set[str]) -> str | None:
    """Return the part that an import reaches into, or None for other packages."""
    top, *rest = imported.module.split(".")
    if top in ("recipes", "tests"):
        return top
    if top != PACKAGE:
        return None
    if rest:
        return rest[0]
    return imported.name if imported.name in parts else "__init__"


def forbidden_arrows(root: Path) -> list[str]:
    """Return a line for every import that the house does not allow, as "file:line: reason"."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    parts = {part_of(file, root) for file in files}
    found = []
    for file in files:
        part = part_of(file, root)
        if part not in MAY_IMPORT:
            found.append(f"{file.relative_to(root)}:1: '{part}' has no place in the house; give it one in MAY_IMPORT")
            continue
        for imported in imports_of(file, root):
            target = part_imported(imported, parts)
            if target is not None and target != part and target not in MAY_IMPORT[part]:
                allowed = ", ".join(sorted(MAY_IMPORT[part])) or "nothing of the package"
                where = f"{file.relative_to(root)}:{imported.line}"
                found.append(f"{where}: {part} may not import {target}; it may import {allowed}")
    return found


def test_no_import_points_the_wrong_way():
    found = forbidden_arrows(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_rooms_never_import_one_another():
    assert all(not MAY_IMPORT[room] & ROOMS for room in ROOMS)


def test_plans_are_made_without_sharded_modules():
    allowed = {"planning", "tables", "quantized_comms"}  # of the room
    for file in (ROOT / PACKAGE / "sharding" / "planning").glob("*.py"):
        for imported in imports_of(file, ROOT):
            path = f"{imported.module}.{imported.name}".split(".")
            if path[:2] == [PACKAGE, "sharding"]:
                assert path[2] in allowed, f"{file.name}:{imported.line}"


@pytest.fixture
def house(tmp_path):
    """A small package of the same shape, in which every arrow is allowed."""

    def write(path: str, text: str) -> None:
        file = tmp_path / PACKAGE / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("__init__.py", "")
    write("errors.py", "import torch\n")
    write("_compat.py", "from .errors import DistRecError\n")
    for room in ROOMS:
        write(f"{room}/__init__.py", "")
    write("sharding/plan.py", "from lightning_distrec._compat import x\nfrom .tables import y\n")
    write("sharding/tables.py", "from lightning_distrec import errors\n")
    write("strategies/torchrec.py", "from lightning_distrec.sharding.plan import z\nimport torchrec\n")
    write("cli.py", "from lightning_distrec import __version__\n")
    return tmp_path, write


def test_the_checker_accepts_a_house_in_order(house):
    root, _ = house
    assert forbidden_arrows(root) == []


@pytest.mark.parametrize(
    ("path", "text", "arrow"),
    [
        ("sharding/plan.py", "\nimport lightning_distrec.pipeline\n", "plan.py:2: sharding may not import pipeline"),
        ("sharding/plan.py", "from ..optimizers import x\n", "sharding may not import optimizers"),
        ("sharding/plan.py", "from .. import checkpoint\n", "sharding may not import checkpoint"),
        ("sharding/plan.py", "from lightning_distrec import cluster\n", "sharding may not import cluster"),
        ("sharding/plan.py", "from lightning_distrec import __version__\n", "sharding may not import __init__"),
        ("sharding/plan.py", "def f():\n    import lightning_distrec.cli\n", "plan.py:2: sharding may not import cli"),
        (
            "pipeline/fetcher.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightning_distrec.sharding import Plan\n",
            "pipeline/fetcher.py:3: pipeline may not import sharding",
        ),
        ("errors.py", "from lightning_distrec._compat import x\n", "errors may not import _compat"),
        ("callbacks/memory.py", "from lightning_distrec.sharding import x\n", "callbacks may not import sharding"),
        (
            "callbacks/memory.py",
            "from lightning_distrec.strategies.torchrec import x\n",
            "callbacks may not import strategies",
        ),
        ("strategies/ddp.py", "from lightning_distrec.cli import main\n", "strategies may not import cli"),
        ("cli.py", "import recipes.movielens_dlrm.model\n", "cli may not import recipes"),
        ("utils.py", "", "'utils' has no place in the house"),
    ],
)
def test_the_checker_catches(house, path, text, arrow):
    root, write = house
    write(path, text)
    found = forbidden_arrows(root)
    assert len(found) == 1
    assert arrow in found[0]
