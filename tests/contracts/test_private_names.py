"""Private names of the packages we stand on are imported by _compat alone."""

import sys
from pathlib import Path

from tests.contracts.imports_of import Import, imports_of

ROOT = Path(__file__).resolve().parents[2]
MAY_BE_PRIVATE = Path("lightning_distrec/_compat")
OURS = {"lightning_distrec", "recipes", "tests"}


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
