"""What makes a page hard to read: long sentences, code wider than the column, lists that Markdown
does not see.

    python -m tests.docs.readable

`make docs` runs it. Links are the site generator's to check.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("recipes/**/*.md")),
]
MAX_COLUMNS = 94
"""Columns of code that the site shows without scrolling: docs/stylesheets/site.css."""
MAX_WORDS = 30
"""Words of a sentence. Code in backticks counts as one."""

FENCE = re.compile(r"^ *(```|~~~)")
ITEM = re.compile(r"^(?P<indent> *)([-*+]|\d+[.)]) ")
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"]?\s+(?=[\"'(A-Z0-9]|torch)")


def problems_of(page: str) -> Iterator[str]:
    """Yield what is hard to read in a page of Markdown, each with its line."""
    paragraph: list[str] = []
    start, fenced, before = 1, False, ""
    for number, line in enumerate([*page.splitlines(), ""], 1):
        if FENCE.match(line):
            if (len(line) - len(line.lstrip())) % 4:
                yield f"{number}: code inside of a list is indented by 4 columns"
            fenced = not fenced
        elif fenced:
            if len(line) > MAX_COLUMNS:
                yield f"{number}: {len(line)} columns of code"
            continue
        item = ITEM.match(line)
        if item and len(item["indent"]) % 4:
            yield f"{number}: an item of a list is indented by 0 or 4 columns"
        if (
            item
            and before
            and not (paragraph and ITEM.match(paragraph[0]))
            and not before.startswith("#")
        ):
            yield f"{number}: a list needs an empty line before it; or a line begins like one"
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip("|")):
                yield from _long_sentences(cell, number)
        if item or not line.strip() or line.startswith(("#", "|", "<!--")) or FENCE.match(line):
            yield from _long_sentences(" ".join(paragraph), start)
            paragraph, start = [], number
        if line.strip() and not line.startswith(("#", "|", "<!--")) and not FENCE.match(line):
            paragraph.append(line.strip())
        before = line.strip()


def _long_sentences(text: str, number: int) -> Iterator[str]:
    text = re.sub(r"`[^`]*`", "CODE", ITEM.sub("", text, count=1))
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text).replace("*", "")
    for sentence in SENTENCE_END.split(text):
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if len(words) > MAX_WORDS:
            yield f"{number}: {len(words)} words: {' '.join(words[:8])} ..."


def main() -> int:
    """Print all problems; returns the exit status."""
    problems = [
        f"{page.relative_to(ROOT)}:{problem}"
        for page in PAGES
        for problem in problems_of(page.read_text("utf-8"))
    ]
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
