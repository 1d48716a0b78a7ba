"""The documentation says what the code says, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from lightning_distrec.versions import markdown_table

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("**/*.md")),
    *sorted(ROOT.glob("recipes/**/*.md")),
]

CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs name them alike."""
    headings = HEADING.findall(FENCE.sub("", page.read_text("utf-8")))
    return {
        re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings
    }


def broken_links(page: Path) -> list[str]:
    """Return the links of a Markdown page that lead to no file or heading; text that is code holds
    no links."""
    targets = LINK.findall(CODE.sub("", page.read_text("utf-8")))
    return [
        target
        for target in targets
        if not re.match(r"[a-z]+:", target) and not _leads_somewhere(page, target)
    ]


def _leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    return file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors_of(file))


def test_the_table_in_installing_is_the_one_the_code_obeys():
    assert markdown_table() in (DOCS / "installing.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page):
    assert broken_links(page) == []


def test_the_link_checker_catches_a_link_to_nowhere(tmp_path):
    (tmp_path / "there.md").write_text("# One part\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](there.md) [b](there.md#one-part) [c](https://example.org) [d](#here) "
        "![e](gone.png)\n"
        '`[g](gone.md)`\n\n```\n[h](gone.md)\n```\n[i](gone/too.md "title") '
        "[j](there.md#no-heading) [k](#gone)\n"
    )
    assert broken_links(page) == ["gone.png", "gone/too.md", "there.md#no-heading", "#gone"]


def test_links_of_the_site_stay_inside_of_it():
    for page in DOCS.glob("**/*.md"):
        for target in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
            if not re.match(r"[a-z]+:|#", target):
                assert (page.parent / target.partition("#")[0]).resolve().is_relative_to(DOCS), (
                    f"{page}: {target}"
                )
