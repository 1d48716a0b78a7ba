"""Imports inside lightning_distrec point one way; docs/architecture.md draws the picture, this file
holds it true."""

import graphlib
from pathlib import Path

import pytest

from tests.contracts.imports_of import Import, imports_of

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
