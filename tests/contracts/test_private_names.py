"""Private names of the packages we stand on are imported by _compat alone."""

import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("from torch import _foreach_norm\n", "plan.py:1: torch._foreach_norm"),
        (
            "from torch.distributed._tensor import DTensor\n",
            "plan.py:1: torch.distributed._tensor.DTensor",
        ),
        ("import torchrec.distributed._x\n", "plan.py:1: torchrec.distributed._x"),
        (
            "def f():\n    from lightning.pytorch.loops import _FitLoop\n",
            "plan.py:2: lightning.pytorch.loops._FitLoop",
        ),
        ("from fbgemm_gpu import _load_library\n", "plan.py:1: fbgemm_gpu._load_library"),
    ],
)
def test_the_checker_catches(tmp_path, text, reported):
    file = tmp_path / "lightning_distrec" / "plan.py"
    file.parent.mkdir()
    file.write_text(text)
    assert private_imports(tmp_path) == [f"lightning_distrec/{reported}"]


def test_the_checker_lets_public_names_our_own_and_those_of_compat_pass(tmp_path):
    (tmp_path / "lightning_distrec" / "_compat").mkdir(parents=True)
    text = (
        "from __future__ import annotations\nfrom torch import __version__\nfrom "
        "lightning_distrec import _compat\n"
    )
    (tmp_path / "lightning_distrec" / "plan.py").write_text(text)
    (tmp_path / "lightning_distrec" / "_compat" / "torch.py").write_text(
        "from torch import _foreach_norm\n"
    )
    assert private_imports(tmp_path) == []
