"""Shows the help of commands in pages of the site, as a hook of MkDocs: each has one source.

`<!-- help: checkpoint inspect -->` becomes what `lightning-distrec checkpoint inspect --help`
prints.
"""

import contextlib
import io
import os
import re
from typing import Any
from unittest import mock

from lightning_distrec.cli.command_line import COMMANDS
from tests.docs.readable import MAX_COLUMNS

MARK = re.compile(r"^<!-- help: ([\w ]+) -->$", re.MULTILINE)


def help_of(command: str) -> str:
    """Return the help of a command, or of a part of it, as wide as code in the site."""
    name, *rest = command.split()
    output = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=str(MAX_COLUMNS)),
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
    ):
        COMMANDS[name].parser(name).parse_args([*rest, "--help"])
    return output.getvalue()


def with_help(page: str) -> str:
    """Return a page's Markdown with the help in place of each mark."""
    return MARK.sub(lambda mark: f"```text\n{help_of(mark[1])}```", page)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the help, before Markdown is read."""
    return with_help(markdown)
