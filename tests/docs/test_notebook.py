"""The notebook's cells train on two ranks, and the search of hyperparameters runs where optuna is
installed."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.docs.root_pages import page_of_notebook
from tests.docs.snippets import blocks_of
from tests.support.console import finished

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "docs/notebook.ipynb").read_text("utf-8"))


def _sources_of(kind: str) -> list[str]:
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == kind]
    return ["".join(cell["source"]) for cell in cells]


def _run(folder: Path, *arguments: str, stdin: str = "") -> str:
    """Run python in a folder, as a user with the environment activated; return what it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path}
    done = finished([sys.executable, *arguments], folder, env=variables, input=stdin)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_notebooks_cells_train_on_two_ranks(tmp_path: Path) -> None:
    output = _run(tmp_path, "-", stdin="\n".join(_sources_of("code")))
    assert "Embedding tables over 2 ranks" in output
    assert int(output.partition("% of the clicks")[0].split()[-1]) > 90
    assert (tmp_path / "clicks.pt").exists()


def test_the_notebook_is_one_that_jupyter_opens() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    assert all(cell["outputs"] == [] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code")
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.from_dict(NOTEBOOK))


def test_the_notebooks_page_has_its_cells_and_a_link_to_it() -> None:
    page = page_of_notebook(json.dumps(NOTEBOOK))
    blocks = list(blocks_of(page))
    assert [block.text.rstrip() for block in blocks] == _sources_of("code")
    assert {block.language for block in blocks} == {"python"}
    title, _, rest = _sources_of("markdown")[0].partition("\n\n")
    assert page.startswith(f"{title}\n\n[Download this notebook](notebook.ipynb).\n\n{rest}")


@pytest.mark.slow
def test_the_search_finds_the_best_of_three_trials(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    for page in ("index.md", "how_to/search.md"):
        for block in blocks_of((ROOT / "docs" / page).read_text("utf-8")):
            if block.file:
                (tmp_path / block.file).write_text(block.text)
    assert "'batch_size': " in _run(tmp_path, "search.py")
    assert len(list((tmp_path / "search/lightning_logs").glob("trial_*/metrics.csv"))) == 3
