"""Files import one another in one direction, so that a reader may begin at the bottom."""

import graphlib
from pathlib import Path

import pytest

from tests.contracts.imports_of import imports_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_distrec"
FOLDERS = ("prefetch", "optimizers", "strategies/data_parallel", "strategies/fully_sharded")


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
    order = graphlib.TopologicalSorter(arrows(PACKAGE / folder, ROOT))
    assert len(list(order.static_order())) == len(list((PACKAGE / folder).glob("*.py")))


def test_a_circle_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "door.py").write_text("from house import key\n")
    (tmp_path / "house" / "key.py").write_text("def lock():\n    from house.door import Door\n")
    order = graphlib.TopologicalSorter(arrows(tmp_path / "house", tmp_path))
    with pytest.raises(graphlib.CycleError):
        order.prepare()
