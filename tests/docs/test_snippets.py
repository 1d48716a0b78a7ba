"""The code of the documentation runs as it stands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.parameters import slow_except

ROOT = Path(__file__).resolve().parents[2]
START = ROOT / "docs" / "index.md"
USUAL = [START, ROOT / "docs" / "how_to" / "train_sharded.md", ROOT / "README.md"]
PAGES = [*USUAL, *sorted(set(ROOT.glob("docs/**/*.md")) - set(USUAL))]


def run_pages(pages: list[Path], folder: Path) -> dict[str, list[str]]:
    """Return page -> what failed in it; all of them in one process."""
    results = folder / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.snippets", str(results), *map(str, pages)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def failures_of_usual_pages(tmp_path_factory):
    return run_pages(USUAL, tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def failures_of_other_pages(tmp_path_factory):
    # The usual ones too: they make files that others go on with.
    return run_pages(PAGES, tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize(
    "page", slow_except(USUAL, PAGES), ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_blocks_of_a_page_run(page, request):
    failures = request.getfixturevalue(f"failures_of_{'usual' if page in USUAL else 'other'}_pages")
    assert not failures[str(page)], "\n\n".join(failures[str(page)])


def test_the_check_finds_what_does_not_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n```python\nassert x == 2\n```\n"
        "```yaml\nclass_path: lightning_distrec.TableOptions\ninit_args: {num_rows: 3}\n```\n"
        "```console\n$ lightning-distrec slurm --config a.yaml --nodes 2 --no-such-option 3\n```\n"
        "```console\n$ lightning-distrec checkpoint inspect --help\nusage: lightning-distrec\nno "
        "such line\n```\n"
        "```console\n$ make nothing\n```\n"
        "<!-- not run: because -->\n```python\nraise ValueError\n```\n"
        "```python\nimport torch\ntorch.empty(2**33)\n```\n"
    )
    actual = run_pages([page], tmp_path)[str(page)]
    assert len(actual) == 6
    for message, expected in zip(
        actual,
        (
            "AssertionError",
            "'num_rows'",
            "no-such-option",
            "no such line",
            "cannot be run here",
            "allocate memory",
        ),
        strict=True,
    ):
        assert expected in message
