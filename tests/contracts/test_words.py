"""The package and its docs use TorchRec's, Lightning's and PyTorch's words; ours from before do not
come back."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_distrec"

NAMES = {
    "anew": "again",
    "agreement": "control message",
    "agreements": "control messages",
    "arriving": "lazy",
    "autotune": "nothing: it went without a gain",
    "cut": "sharding type, sharded",
    "cuts": "sharding types, shards",
    "demand": "constraints",
    "demands": "constraints",
    "flight": "in flight, as in InFlightBatch",
    "foresee": "prefetch",
    "foreseeable": "prefetchable",
    "foreseen": "prefetched",
    "hear": "receive",
    "heard": "received",
    "incoming": "input dist",
    "least": "min",
    "most": "max",
    "news": "batch status",
    "outgoing": "output dist",
    "owned": "held",
    "owner": "param group, holder",
    "owners": "holders",
    "parted": "chunked",
    "piece": "shard, chunk",
    "pieces": "shards, chunks",
    "reckon": "estimate",
    "reckoned": "estimated",
    "reckoning": "estimate",
    "room": "memory budget",
    "said": "message, notes",
    "shortage": "infeasible plan",
    "stand": "proxy, not stand-in",
    "tell": "log, warn, send",
    "tells": "logs, warns, sends",
    "thaw": "unfreeze",
    "thawed": "unfrozen",
    "thawing": "unfreezing",
    "together": "name what it does",
    "told": "gathered, reported",
    "weigh": "measure",
    "weighed": "measured",
    "whole": "replicated, full, unsharded",
}
"""Part of an identifier or of a file's name -> what it is called instead."""

ALLOWED = ("in_flight", "InFlight")
"""Parts of identifiers that contain one of these words and are the field's: batches in flight."""

PHRASES = {
    r"\banew\b": "again",
    r"\b(?:ids|rows|gradients) (?:that )?(?:travel|travels|travelled)\b": "ids are sent; input "
    "dist, output dist",
    r"\bcuts?\b": "sharding type; shard",
    r"\bcutting\b": "sharding",
    r"\bdistrec_auto\b": "lightning-distrec advise",
    r"\bfewest nodes\b": "minimum nodes",
    r"\bfore(?:see|seen|seeable|saw)\b": "prefetch",
    r"\bhear[sd]?\b": "receive",
    r"\bin vain\b": "would wait forever",
    r"\bkeep_whole\b": "replicated",
    r"\bkept whole\b|\bstays? whole\b|\bare whole\b|\bis whole\b": "replicated",
    r"\bsparse pipeline\b": "prefetching",
    r"\blook[- ]ahead\b": "prefetching",
    r"\bwhat nobody\b|\bnobody knows\b": "unknown",
    r"\bowners?\b": "param group, holder",
    r"\bpieces?\b": "shard, chunk",
    r"\breckon\w*": "estimate",
    r"\brecompute_activations\b": "activation_checkpointing",
    r"\bsaid\b": "reported, warned about, configured",
    r"\bso many\b": "a number",
    r"\bso long\b": "a time in seconds",
    r"\bstand-?ins?\b|\bstand(?:s|ing)? in for\b": "proxy",
    r"\btells?\b|\btelling\b": "report, warn, send, show",
    r"\btold\b": "gathered, reported, configured",
    r"\bthaw\w*": "unfreeze",
    r"\bwhole tables?\b|\btables? whole\b": "replicated (data-parallel) table",
}
"""Pattern in docstrings, comments, messages and docs, in any case -> what is written instead."""
SPREAD = {
    pattern: re.compile(re.sub(r"(?<=\w) ", r"\\s+", pattern), re.IGNORECASE) for pattern in PHRASES
}

FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """of mine own ours theirs here there now then before after found kept known more rest others each one what why
        where so again by to took given wanted left alone alike same chosen taken asked said told nothing everything
        everybody at on both whose which who how these those such""",
    )
)
FUNCTION_PREFIXES = ("of_", "by_", "why_", "what_")
"""Words that name nothing: a variable says what it holds, as `local_shapes`, `per_rank_messages`,
`candidate_plans`."""
MAX_SHARE = {"lightning_distrec": 0.003, "recipes": 0.003, "tests": 0.01}
"""Folder -> the share of function words among the names that it binds, at most."""

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""File and key of a table -> why the word stays there."""

Hit = tuple[str, int, str]
"""File, line, and the key of a table."""


def parts_of(name: str) -> list[str]:
    """Return the words that an identifier is made of: split at underscores, hyphens and humps."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def in_name(name: str) -> Iterator[str]:
    """Yield the keys of NAMES that an identifier or a file's name contains."""
    for right in ALLOWED:
        name = name.replace(right, "")
    yield from dict.fromkeys(part for part in parts_of(name) if part in NAMES)


def in_text(text: str) -> Iterator[tuple[int, str]]:
    """Yield line from 0 on, and key of PHRASES, for each that a text contains; a line's end counts
    as a blank."""
    for pattern, spread in SPREAD.items():
        for result in spread.finditer(text):
            yield text.count("\n", 0, result.start()), pattern


def in_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and key for identifiers, and for docstrings, comments and other strings, of a
    Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.NAME:
            yield from ((line, key) for key in in_name(token.string))
        elif token.type in (
            tokenize.STRING,
            tokenize.COMMENT,
            getattr(tokenize, "FSTRING_MIDDLE", -1),
        ):
            yield from ((line + offset, key) for offset, key in in_text(token.string))


def old_words(root: Path) -> Iterator[Hit]:
    """Yield all hits in the package, and in the pages for users."""
    for file in sorted((root / PACKAGE).rglob("*.py")):
        path = file.relative_to(root).as_posix()
        yield from ((path, 1, key) for key in in_name(path))
        yield from ((path, line, key) for line, key in in_python(file.read_text("utf-8")))
    for file in sorted([root / "README.md", *(root / "docs").rglob("*.md")]):
        path = file.relative_to(root).as_posix()
        if not file.exists():
            continue
        yield from ((path, 1, key) for key in in_name(path))
        yield from ((path, line + 1, key) for line, key in in_text(file.read_text("utf-8")))


def names_bound(source: str) -> Iterator[tuple[str, int]]:
    """Yield the variables, fields and arguments that a Python file binds, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def is_function_word(name: str) -> bool:
    """Whether a name holds no noun."""
    plain = name.strip("_")
    return plain in FUNCTION_WORDS or plain.startswith(FUNCTION_PREFIXES)


def function_words(root: Path, folder: str) -> tuple[list[str], int]:
    """Return "file:line: name" of the function words that a folder's files bind, and how many names
    they bind."""
    hits, num_names = [], 0
    for file in sorted((root / folder).rglob("*.py")):
        for name, line in names_bound(file.read_text("utf-8")):
            num_names += 1
            if is_function_word(name):
                hits.append(f"{file.relative_to(root).as_posix()}:{line}: '{name}'")
    return hits, num_names


@pytest.mark.parametrize("folder", MAX_SHARE)
def test_variables_are_nouns(folder: str) -> None:
    hits, num_names = function_words(ROOT, folder)
    assert len(hits) <= MAX_SHARE[folder] * num_names, "\n" + "\n".join(hits)
    assert not [hit for hit in hits if "'of_" in hit and folder == "lightning_distrec"], hits


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("for of in plans: pass", ["of"]),
        ("def f(self, found, *, of_ranks=()): theirs = found", ["found", "of_ranks", "theirs"]),
        ("class Options:\n    by_table: dict\n    offset: int", ["by_table"]),
        ("local_shapes = [shape for shape in shapes]; founder = official = 1", []),
    ],
)
def test_function_words_are_found(source: str, names: list[str]) -> None:
    assert sorted(name for name, _ in names_bound(source) if is_function_word(name)) == names


def test_no_old_word_comes_back() -> None:
    instead = NAMES | PHRASES
    actual = [hit for hit in old_words(ROOT) if (hit[0], hit[2]) not in EXCEPTIONS]
    assert not actual, "\n" + "\n".join(
        f"{file}:{line}: '{key}': write {instead[key]}" for file, line, key in actual
    )


@pytest.mark.parametrize(
    ("path", "text", "hits"),
    [
        ("lightning_distrec/a.py", "def reckon(x):\n    pass\n", [(1, "reckon")]),
        ("lightning_distrec/a.py", "class ForeseenTable:\n    pass\n", [(1, "foreseen")]),
        ("lightning_distrec/a.py", "x = 1  # as many as are told\n", [(1, r"\btold\b")]),
        ("lightning_distrec/a.py", '"""Sums.\n\nIt keeps so\nmany."""\n', [(3, r"\bso many\b")]),
        ("lightning_distrec/a.py", 'raise E(f"{x} is reckoned")\n', [(1, r"\breckon\w*")]),
        ("lightning_distrec/thawing.py", "", [(1, "thawing")]),
        (
            "docs/tables.md",
            "# Tables\n\nA whole table.\n",
            [(3, r"\bwhole tables?\b|\btables? whole\b")],
        ),
        (
            "lightning_distrec/a.py",
            "num_in_flight = min(shortcut, at_leastwise)  # at least one\n",
            [],
        ),
        ("docs/tables.md", "The whole of it is sharded; a retold execution, foretold.\n", []),
    ],
)
def test_the_checker_finds(
    tmp_path: Path, path: str, text: str, hits: list[tuple[int, str]]
) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert [(line, key) for _, line, key in old_words(tmp_path)] == hits
