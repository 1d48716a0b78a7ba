"""Pages have short sentences, code that fits into the column, and lists that Markdown sees."""

import pytest

from tests.docs.readable import PAGES, ROOT, problems_of


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_readable(page):
    assert list(problems_of(page.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{'word ' * 31}\nend.", "1: 32 words: word"),
        (f"| a | {'word ' * 31} |", "1: 31 words"),
        (f"```text\n{'x' * 95}\n```", "2: 95 columns"),
        ("1. one\n\n   ```text\n   x\n   ```\n2. two", "3: code inside of a list"),
        ("Some text:\n- a list", "2: a list needs an empty line"),
        ("so there are\n8. They go on", "2: a list needs an empty line"),
        ("- one\n\n  - two", "3: an item of a list is indented"),
    ],
)
def test_the_check_finds_what_is_hard_to_read(text, problem):
    assert next(problems_of(text)).startswith(problem)


def test_the_check_passes_short_sentences_in_lists_and_tables():
    sentence = f"Some {'word ' * 28}end."
    assert (
        list(
            problems_of(
                f"# A\n- {sentence} {sentence}\n- {sentence}\n\n| {sentence} | {sentence} |\n"
            )
        )
        == []
    )
