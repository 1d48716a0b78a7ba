"""The documentation says what the code says, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from lightning_distrec.versions import markdown_table

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("recipes/**/*.md"))]

CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)")


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a Markdown page that lead to no file; text that is code holds no links."""
    targets = LINK.findall(CODE.sub("", page.read_text("utf-8")))
    relative = [target for target in targets if not re.match(r"[a-z]+:|#", target)]
    return [target for target in relative if not (page.parent / target.partition("#")[0]).exists()]


def test_the_table_in_installing_is_the_one_the_code_obeys():
    assert markdown_table() in (ROOT / "docs" / "installing.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page):
    assert broken_links(page) == []


def test_the_link_checker_catches_a_link_to_nowhere(tmp_path):
    (tmp_path / "there.md").write_text("")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#part) [c](https://example.org) [d](#here) ![e](gone.png)\n"
        '`[g](gone.md)`\n\n```\n[h](gone.md)\n```\n[i](gone/too.md "title")\n'
    )
    assert broken_links(page) == ["gone.png", "gone/too.md"]
