"""Imports inside lightning_distrec point one way, as docs/architecture.md draws them, and private
names of the packages we stand on are imported by _compat alone."""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_distrec"

MAX_FILES = 18
MAX_LINES = 500

ROOMS = {"cluster", "sharding", "optimizers", "prefetch", "checkpoint"}
GROUND = {
    "errors",
    "versions",
    "ranks",
    "spans",
    "chunks",
    "host_memory",
    "gpu",
    "units",
    "atomic_files",
    "_compat",
}
GROUND |= {
    "batches",
    "option_values",
    "kept_parameters",
    "module_shards",
    "pytorch_lightning",
    "recorded_step",
}
SHARDING = {
    "sharding",
    "sharding/mapping",
    "sharding/lookup",
    "sharding/planning",
    "sharding/scores",
    "sharding/weights",
}
BELOW_STRATEGIES = GROUND | SHARDING | {"cluster", "checkpoint", "prefetch", "optimizers"}
STRATEGIES = {
    "strategies",
    "strategies/run",
    "strategies/checkpoints",
    "strategies/data_parallel",
    "strategies/fully_sharded",
    "strategies/tables",
}
ANNEXES = {
    "pipeline",
    "observe",
    "observe/bench",
    "callbacks",
    "metrics",
    "retrieval",
    "data",
    "advice",
    "serving",
    "serving/publishing",
    "cli",
}
"""Rooms that the core never imports. The package itself names some of their classes, and loads them
when they are asked for."""

MAY_IMPORT = {
    "errors": set(),
    "versions": {"errors"},
    "spans": {"_compat"},
    "ranks": set(),
    "chunks": {"errors"},
    "kept_parameters": {"errors"},
    "module_shards": set(),
    "host_memory": set(),
    "gpu": {"errors"},
    "units": {"errors"},
    "pytorch_lightning": {"errors"},
    "option_values": {"errors"},
    "atomic_files": set(),
    "recorded_step": set(),
    "registration": {"_compat"},
    "_compat": {"errors", "versions"},
    "batches": {"_compat"},
    "optimizers": GROUND,
    "prefetch": GROUND,
    "checkpoint": GROUND,
    "cluster": GROUND,
    "sharding/mapping": GROUND,
    "sharding/weights": GROUND,
    "sharding/scores": GROUND | {"sharding/weights"},
    "sharding": GROUND | {"sharding/mapping", "sharding/scores", "sharding/weights"},
    "sharding/lookup": GROUND | {"sharding", "sharding/mapping", "sharding/weights"},
    "sharding/planning": GROUND | {"sharding"},
    "strategies/checkpoints": BELOW_STRATEGIES,
    "strategies/run": BELOW_STRATEGIES | {"strategies/checkpoints", "strategies/data_parallel"},
    "strategies/data_parallel": BELOW_STRATEGIES,
    "strategies/fully_sharded": BELOW_STRATEGIES | {"strategies/data_parallel", "strategies/run"},
    "strategies/tables": BELOW_STRATEGIES | {"strategies/data_parallel", "strategies/run"},
    "strategies": BELOW_STRATEGIES | STRATEGIES,
    "pipeline": BELOW_STRATEGIES | STRATEGIES | {"observe"},
    # For any strategy: it reads its attributes and its spans.
    "observe": GROUND | {"cluster", "sharding", "sharding/planning"},
    "observe/bench": GROUND | {"cluster", "observe", "sharding"},  # it starts processes
    "callbacks": GROUND | {"observe"},  # for any strategy, too
    "metrics": {"errors", "option_values"},  # for any strategy, and for none
    "data": {"errors", "atomic_files"},  # for any strategy, and for none
    "retrieval": GROUND | {"sharding/scores", "sharding/weights", "metrics"},
    "advice": BELOW_STRATEGIES | STRATEGIES | {"pipeline"},
    "serving": BELOW_STRATEGIES | {"data", "retrieval"},
    "serving/publishing": BELOW_STRATEGIES | STRATEGIES | {"serving"},
    "cli": BELOW_STRATEGIES | STRATEGIES | ANNEXES | {"__init__", "registration"},
    "__main__": {"cli"},
    "__init__": BELOW_STRATEGIES
    | STRATEGIES
    | {"callbacks", "observe", "pipeline", "serving/publishing"},
}
"""Folder, or file directly under the package -> those that it may import. Recipes stand on top and
may import all."""

NOT_YET: set[str] = set()
"""Arrows that still point the wrong way."""
STILL_FULL: set[str] = set()
STILL_LONG: set[str] = {"lightning_distrec/cli/command_line.py"}
"""Folders and files to be parted."""

FOLDERS = ("prefetch", "optimizers", "strategies/data_parallel", "strategies/fully_sharded")
"""Their files import one another in one direction, so that a reader may begin at the bottom."""
MAY_BE_PRIVATE = Path("lightning_distrec/_compat")
OURS = {"lightning_distrec", "recipes", "tests"}


class Import(NamedTuple):
    """One imported name: `from a.b import c` is Import("a.b", "c", line), `import a.b` is
    Import("a.b", None, line)."""

    module: str
    name: str | None
    line: int


def imports_of(file: Path, root: Path) -> Iterator[Import]:
    """Yield every import of `file`, those in functions and under TYPE_CHECKING too; relative ones
    are made absolute.

    root: the folder that holds the top-level package.
    """
    package = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_text("utf-8"), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)


def place_of(file: Path, root: Path) -> str:
    """Return the folder under the package that `file` is in; the file itself where it is directly
    under it."""
    inside = file.relative_to(root / PACKAGE)
    return inside.parent.as_posix() if len(inside.parts) > 1 else inside.stem


def place_imported(imported: Import, root: Path) -> str | None:
    """Return the place that an import reaches into, or None for other packages."""
    top, *tail = imported.module.split(".")
    if top in ("recipes", "tests"):
        return top
    if top != PACKAGE:
        return None
    for parts in ([*tail, imported.name or ""], tail):
        file = root.joinpath(PACKAGE, *parts)
        if parts and file.with_suffix(".py").is_file():
            return place_of(file.with_suffix(".py"), root)
        if parts and parts[-1] and file.is_dir():
            return "/".join(parts)
    return "/".join(tail) or "__init__"


def forbidden_arrows(root: Path) -> list[str]:
    """Return a line for every import that the house does not allow, as "file:line: reason"."""
    actual = []
    for file in sorted((root / PACKAGE).rglob("*.py")):
        place = place_of(file, root)
        if place not in MAY_IMPORT:
            actual.append(
                f"{file.relative_to(root)}:1: '{place}' has no place in the house; give "
                "it one in MAY_IMPORT"
            )
            continue
        for imported in imports_of(file, root):
            target = place_imported(imported, root)
            if (
                target in (None, place)
                or target in MAY_IMPORT[place]
                or f"{place} -> {target}" in NOT_YET
            ):
                continue
            allowed = ", ".join(sorted(MAY_IMPORT[place])) or "nothing of the package"
            location = f"{file.relative_to(root)}:{imported.line}"
            actual.append(f"{location}: {place} may not import {target}; it may import {allowed}")
    return actual


def test_no_import_points_the_wrong_way():
    actual = forbidden_arrows(ROOT)
    assert not actual, "\n" + "\n".join(actual)


def test_packages_never_import_one_another_nor_the_core_an_annex():
    for place, allowed in MAY_IMPORT.items():
        room = place.partition("/")[0]
        if room in ROOMS:
            assert {other.partition("/")[0] for other in allowed} & ROOMS <= {room}, place
        if place not in ANNEXES | {"__init__", "__main__"}:
            assert not allowed & ANNEXES, place
    order = graphlib.TopologicalSorter({
        place: allowed - {place} for place, allowed in MAY_IMPORT.items()
    })
    assert len(list(order.static_order())) == len(MAY_IMPORT), "arrows form a circle"


def test_folders_and_files_are_small_enough_to_search():
    folders = {file.parent for file in (ROOT / PACKAGE).rglob("*.py")}
    full = {
        f.relative_to(ROOT).as_posix(): n
        for f in folders
        if (n := len(list(f.glob("*.py"))) - 1) > MAX_FILES
    }
    lengths = {
        file: len(file.read_text("utf-8").splitlines()) for file in (ROOT / PACKAGE).rglob("*.py")
    }
    long = {
        file.relative_to(ROOT).as_posix(): length
        for file, length in lengths.items()
        if length > MAX_LINES
    }
    assert full.keys() <= STILL_FULL, full
    assert long.keys() <= STILL_LONG, long


FILES = {
    "__init__.py": "",
    "errors.py": "import torch\n",
    "_compat/torch.py": "from ..errors import DistRecError\n",
    "sharding/plan.py": "from lightning_distrec._compat import x\nfrom .tables import y\n",
    "sharding/tables.py": "from lightning_distrec import errors\n",
    "strategies/torchrec.py": "from lightning_distrec.sharding.plan import z\nimport torchrec\n",
    "cli/main.py": "from lightning_distrec import __version__\n",
}
"""A small package of the same shape, in which every arrow is allowed."""


def _write_house(root, files):
    for path, text in files.items():
        file = root / PACKAGE / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_the_checker_accepts_a_house_in_order(tmp_path):
    _write_house(tmp_path, FILES)
    assert forbidden_arrows(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "text", "arrow"),
    [
        ("sharding/plan.py", "\nimport lightning_distrec.prefetch\n", ":2: sharding {} prefetch"),
        ("sharding/plan.py", "from ..optimizers import x\n", "sharding {} optimizers"),
        ("sharding/plan.py", "from lightning_distrec import __version__\n", "{} __init__"),
        ("sharding/plan.py", "def f():\n    import lightning_distrec.cli.main\n", ":2: sharding {} cli"),
        ("prefetch/x.py", "if TYPE_CHECKING:\n    from ..sharding import Plan\n", "prefetch {} sharding"),
        ("cli/main.py", "import recipes.movielens_dlrm.model\n", "cli {} recipes"),
        ("sharding/helpers/x.py", "", "'sharding/helpers' has no place in the house"),
    ],
)  # fmt: skip
def test_the_checker_catches(tmp_path, path, text, arrow):
    rooms = ("prefetch", "optimizers")
    _write_house(tmp_path, {f"{room}/__init__.py": "" for room in rooms} | FILES | {path: text})
    (problem,) = forbidden_arrows(tmp_path)
    assert arrow.format("may not import") in problem


def arrows(folder: Path, root: Path) -> dict[str, set[str]]:
    """Return file -> files of this folder that it imports, under TYPE_CHECKING too."""
    package = ".".join(folder.relative_to(root).parts)
    files = {f"{package}.{file.stem}": file for file in folder.glob("*.py")}
    imported: dict[str, set[str]] = {}
    for module, file in files.items():
        names: set[str] = set()
        for statement in imports_of(file, root):
            names |= {statement.module, f"{statement.module}.{statement.name}"}
        imported[module] = names & files.keys() - {module}
    return imported


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_of_a_folder_import_one_another_in_no_circle(folder: str) -> None:
    order = graphlib.TopologicalSorter(arrows(ROOT / PACKAGE / folder, ROOT))
    assert len(list(order.static_order())) == len(list((ROOT / PACKAGE / folder).glob("*.py")))


def test_a_circle_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "door.py").write_text("from house import key\n")
    (tmp_path / "house" / "key.py").write_text("def lock():\n    from house.door import Door\n")
    order = graphlib.TopologicalSorter(arrows(tmp_path / "house", tmp_path))
    with pytest.raises(graphlib.CycleError):
        order.prepare()


def is_private(imported: Import) -> bool:
    """Tell whether an import names something private of another package; __version__ and its like
    are public."""
    top, *tail = imported.module.split(".")
    if top in OURS or top in sys.stdlib_module_names:
        return False
    names = [*tail, imported.name or ""]
    return any(name.startswith("_") and not name.endswith("__") for name in names)


def private_imports(root: Path) -> list[str]:
    """Return a line for every import of a private name outside of _compat, as "file:line: name"."""
    files = [*sorted(root.glob("lightning_distrec/**/*.py")), *sorted(root.glob("recipes/**/*.py"))]
    return [
        f"{file.relative_to(root)}:{imported.line}: {imported.module}.{imported.name or ''}".rstrip(
            "."
        )
        for file in files
        if MAY_BE_PRIVATE not in file.relative_to(root).parents
        for imported in imports_of(file, root)
        if is_private(imported)
    ]


def test_private_upstream_names_are_imported_by_compat_only():
    actual = private_imports(ROOT)
    assert not actual, (
        "import these in lightning_distrec/_compat/, with a test of their own:\n"
        + "\n".join(actual)
    )


def test_the_checker_catches_private_names_of_others_outside_of_compat(tmp_path):
    (tmp_path / "lightning_distrec" / "_compat").mkdir(parents=True)
    (tmp_path / "lightning_distrec" / "plan.py").write_text(
        "from __future__ import annotations\nfrom torch import __version__\n"
        "from lightning_distrec import _compat\nfrom torch import _foreach_norm\n"
        "import torchrec.distributed._x\n"
        "def f():\n    from lightning.pytorch.loops import _FitLoop\n"
    )
    (tmp_path / "lightning_distrec" / "_compat" / "torch.py").write_text(
        "from torch import _foreach_norm\n"
    )
    reported = [
        line.removeprefix("lightning_distrec/plan.py:") for line in private_imports(tmp_path)
    ]
    assert reported == [
        "4: torch._foreach_norm",
        "5: torchrec.distributed._x",
        "7: lightning.pytorch.loops._FitLoop",
    ]
