"""Runs the blocks of the documentation's pages, all pages in one process, and writes down what
failed.

    python -m tests.docs.snippets RESULTS.json PAGE ...

Pages share a working folder. The files of all pages are written first, and the pages run in their
order.

| block | what is done |
| --- | --- |
| any block after `<!-- not run: reason -->` | nothing |
| any block after `<!-- file: NAME -->` | saved under that name |
| python | run; the blocks of a page share their names |
| yaml | read, and every class_path in it is made from its init_args |
| console | commands after "$ " are run; lines below them must be in the output, numbers apart |

Of commands, `python` starts a process, and `lightning-distrec` is called; `fit` is not carried out,
but its configuration is read as if it were. The process may take MEMORY_BYTES: tables larger than a
machine must not be built.
"""

import contextlib
import importlib
import io
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.environments import environment

BLOCK = re.compile(
    r"(?:^<!-- (?P<kind>not run|file): (?P<note>[^\n]*?) -->\n)?^```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
TRAINING = ("fit", "validate", "test", "predict")
SECONDS = 300
MEMORY_BYTES = 6 * 2**30


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    line: int
    not_run: str = ""
    """Why it is not run."""
    file: str = ""
    """The file that it is saved as."""


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page's Markdown."""
    for match in BLOCK.finditer(page):
        line = page.count("\n", 0, match.start("language")) + 1
        note = {"not run": "not_run", "file": "file"}.get(match["kind"] or "")
        yield Block(
            match["language"], match["text"], line, **({note: match["note"]} if note else {})
        )


def main(results: Path, pages: list[Path]) -> None:
    """Run the pages in the working folder; `results` becomes page -> what failed in it."""
    sys.path.insert(0, os.getcwd())
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for block in (
        block for page in pages for block in blocks_of(page.read_text("utf-8")) if block.file
    ):
        Path(block.file).write_text(block.text)
    failures = {str(page): list(_failures_of(page)) for page in pages}
    results.write_text(json.dumps(failures, indent=1))


def _failures_of(page: Path) -> Iterator[str]:
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks_of(page.read_text("utf-8")):
        try:
            _run(block, f"{page.name}:{block.line}", names)
        except BaseException:  # SystemExit of a command too
            yield f"{page.name}, block of line {block.line}:\n{traceback.format_exc(limit=-4)}"


def _run(block: Block, place: str, names: dict[str, Any]) -> None:
    if block.not_run:
        return
    if block.language == "python" and not block.file:
        exec(compile(block.text, place, "exec"), names)
    elif block.language == "yaml":
        _make_classes(yaml.safe_load(block.text))
    elif block.language == "console":
        for command, shown in commands_of(block.text):
            _compare(command, shown, _output_of(command))


def _make_classes(node: Any) -> None:
    """Make every class that a YAML names; wrong arguments raise. A strategy makes what its own
    arguments name."""
    if isinstance(node, dict) and "class_path" in node:
        module, _, name = node["class_path"].rpartition(".")
        getattr(importlib.import_module(module), name)(**node.get("init_args", {}))
        return
    for inner in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        _make_classes(inner)


def commands_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a console block with the lines that it is shown to print."""
    for first in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, *shown = first.splitlines()
        yield command.partition("  #")[0].strip(), shown


def _output_of(command: str) -> str:
    program, *args = shlex.split(command)
    if program == "python":
        # Without what trainers of blocks before have left, by which a script would take itself for
        # one of their ranks.
        done = subprocess.run(
            [sys.executable, *args],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment(),
        )
        output, code = done.stdout + done.stderr, done.returncode
    elif program == "lightning-distrec":
        output, code = _called(args)
    else:
        raise AssertionError(
            f"'{program}' cannot be run here; say '<!-- not run: reason -->' before the block"
        )
    assert code in (0, None), f"'{command}' ended with {code}:\n{output}"
    return output


def _called(args: list[str]) -> tuple[str, Any]:
    from lightning_distrec.cli.main import main as lightning_distrec

    if args[0] in TRAINING and "--help" not in args:
        args = [*args, "--print_config"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code: Any = lightning_distrec(args)
        except SystemExit as end:
            code = end.code
    return output.getvalue(), code


def _compare(command: str, shown: list[str], output: str) -> None:
    """Raise AssertionError where a shown line is not in the output; numbers and lines are not
    compared."""
    remote = {_words(line) for line in output.splitlines()}
    all_of_it = " ".join(_words(line) for line in output.splitlines())
    for line in shown:
        words = _words(line)
        if words.strip(" .") and words not in remote and words not in all_of_it:
            raise AssertionError(f"'{command}' prints no line like\n  {line}\nbut\n{output}")


def _words(line: str) -> str:
    """Return a line's words: without numbers, units of bytes and lines of tables."""
    line = re.sub(r"[\d.,%]+\s*(?:[KMGT]i?B|kB|bytes|ms|s)?\b|[^\w\s:=>'\"/-]|[─-╿]", " ", line)
    return " ".join(line.split())


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(page) for page in sys.argv[2:]])
