"""The text: the manual's pages that Python brings with it for `help()`, as numbers from 0 to 96."""

from importlib import import_module

import torch
from torch import Tensor

from lightning_distrec.errors import DataError

CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""What has a number of its own, its position here: line breaks and printable ASCII."""
OTHER = len(CHARACTERS)
"""The number of all other characters."""
NUM_CHARACTERS = OTHER + 1
"""Fixed, whatever the text holds, so that a checkpoint does not depend on the Python that it was
trained with."""

EVERY_NTH_PAGE_VALIDATES = 8


def read_pages() -> dict[str, str]:
    """Return name -> text of the manual's pages, in order of their names.

    Raises DataError: this Python came without them.
    """
    try:
        pages = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError(
            f"pydoc_data: this Python came without the text of help() ({error}). Install the rest "
            "of its standard "
            "library, or use a Python from python.org."
        ) from error
    return dict(sorted(pages.items()))


def split_pages(pages: dict[str, str]) -> tuple[str, str]:
    """Return the text to train with and the text to validate with: of every eight pages the last.

    Pages repeat one another. A paragraph counts where it comes first, so none is on both sides.
    """
    parts: dict[bool, list[str]] = {False: [], True: []}
    seen: set[str] = set()
    for number, page in enumerate(pages.values(), start=1):
        for paragraph in page.split("\n\n"):
            words = " ".join(paragraph.split())
            if words not in seen:
                seen.add(words)
                parts[number % EVERY_NTH_PAGE_VALIDATES == 0].append(paragraph)
    return "\n\n".join(parts[False]), "\n\n".join(parts[True])


def encode(text: str) -> Tensor:
    """Return the numbers of the characters, (len(text),) int64."""
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    return torch.tensor([numbers.get(character, OTHER) for character in text])
