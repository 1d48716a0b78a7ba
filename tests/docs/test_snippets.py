"""The code of the documentation runs as it stands."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.console import finished
from tests.support.parameters import slow_except

ROOT = Path(__file__).resolve().parents[2]
USUAL = [ROOT / "docs" / "how_to" / "train_sharded.md", ROOT / "README.md"]
"""The start page is followed in test_start.py."""
FIRST = [ROOT / "docs" / "index.md", *USUAL]
PAGES = [*FIRST, *sorted(set(ROOT.glob("docs/**/*.md")) - set(FIRST))]
BAD_PAGE = """
```python
x = 1
```
```python
assert x == 2
```
```yaml
class_path: lightning_distrec.TableOptions
init_args: {num_rows: 3}
```
```console
$ lightning-distrec slurm --config a.yaml --nodes 2 --no-such-option 3
```
```console
$ lightning-distrec checkpoint inspect --help
usage: lightning-distrec
no such line
```
```console
$ make nothing
```
<!-- not run: because -->
```python
raise ValueError
```
```python
import torch
torch.empty(2**33)
```
"""
COMPLAINTS = (
    """AssertionError;'num_rows';no-such-option;no such line;cannot be run;allocate memory"""
)


def run_pages(pages: list[Path], folder: Path) -> dict[str, list[str]]:
    """Return page -> what failed in it; all of them in one process."""
    results = folder / "results.json"
    done = finished(
        [sys.executable, "-m", "tests.docs.snippets", str(results), *map(str, pages)],
        folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def failures_of_usual_pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "bad.md").write_text(BAD_PAGE)
    return run_pages([*USUAL, folder / "bad.md"], folder)


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


def test_the_check_finds_what_does_not_run(failures_of_usual_pages):
    (messages,) = (
        messages for page, messages in failures_of_usual_pages.items() if page.endswith("bad.md")
    )
    for message, complaint in zip(messages, COMPLAINTS.split(";"), strict=True):
        assert complaint in message
