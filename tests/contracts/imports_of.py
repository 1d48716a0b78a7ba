"""What a Python file imports, read from its syntax tree: nothing is executed."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One imported name: `from a.b import c` is Import("a.b", "c", line), `import a.b` is
    Import("a.b", None, line)."""

    module: str
    name: str | None
    line: int


def imports_of(file: Path, root: Path) -> Iterator[Import]:
    """Yield every import of `file`, those in functions and under TYPE_CHECKING too; relative ones
    are made absolute.

    root: the folder that holds the top-level package.
    """
    package = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_text("utf-8"), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
