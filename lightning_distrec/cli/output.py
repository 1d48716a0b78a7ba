"""How commands print and end: exit codes, the console, and SIGTERM."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

EXIT_OK, EXIT_NEGATIVE, EXIT_ERROR = 0, 1, 2
"""Exit codes as those of `diff`: 0 is a positive answer (fits, equal, ready), 1 a negative one, 2 no answer."""
PLAIN_WIDTH = 160
"""Width of tables where stdout is not a terminal."""


def console() -> Console:
    """Return a console that prints brackets in names as they are, and tables in full width into pipes."""
    made = Console(markup=False, emoji=False, highlight=False)
    if not made.is_terminal:
        made = Console(markup=False, emoji=False, highlight=False, width=PLAIN_WIDTH)
    return made


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that temporary files are removed and child processes are terminated."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
