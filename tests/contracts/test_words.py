"""The package and its docs use TorchRec's, Lightning's and PyTorch's words; ours from before do not come back."""

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
    "owned": "ZeRO's own",
    "owner": "param group, holder",
    "owners": "ZeRO partition",
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
    r"\b(?:ids|rows|gradients) (?:that )?(?:travel|travels|travelled)\b": "ids are sent; input dist, output dist",
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
    r"\bowners?\b": "param group, ZeRO partition, holder",
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

EXCEPTIONS = {
    ("lightning_distrec/checkpoint/tools/torch_file.py", "tell"): "a method of Python's files",
    ("lightning_distrec/checkpoint/tools/describe.py", r"\bcuts?\b"): "a key in markers on disk",
}
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
    """Yield line from 0 on, and key of PHRASES, for each that a text contains; a line's end counts as a blank."""
    for pattern in PHRASES:
        spread = re.sub(r"(?<=\w) ", r"\\s+", pattern)
        for result in re.finditer(spread, text, re.IGNORECASE):
            yield text.count("\n", 0, result.start()), pattern


def in_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and key for identifiers, and for docstrings, comments and other strings, of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.NAME:
            yield from ((line, key) for key in in_name(token.string))
        elif token.type in (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)):
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


def test_no_old_word_comes_back() -> None:
    instead = NAMES | PHRASES
    actual = [hit for hit in old_words(ROOT) if (hit[0], hit[2]) not in EXCEPTIONS]
    assert not actual, "\n" + "\n".join(f"{file}:{line}: '{key}': write {instead[key]}" for file, line, key in actual)


@pytest.mark.parametrize(
    ("path", "text", "hits"),
    [
        ("lightning_distrec/a.py", "def reckon(x):\n    pass\n", [(1, "reckon")]),
        ("lightning_distrec/a.py", "class ForeseenTable:\n    pass\n", [(1, "foreseen")]),
        ("lightning_distrec/a.py", "x = 1  # as many as are told\n", [(1, r"\btold\b")]),
        ("lightning_distrec/a.py", '"""Sums.\n\nIt keeps so\nmany."""\n', [(3, r"\bso many\b")]),
        ("lightning_distrec/a.py", 'raise E(f"{x} is reckoned")\n', [(1, r"\breckon\w*")]),
        ("lightning_distrec/thawing.py", "", [(1, "thawing")]),
        ("docs/tables.md", "# Tables\n\nA whole table.\n", [(3, r"\bwhole tables?\b|\btables? whole\b")]),
        ("lightning_distrec/a.py", "num_in_flight = min(shortcut, at_leastwise)  # at least one\n", []),
        ("docs/tables.md", "The whole of it is sharded; a retold execution, foretold.\n", []),
    ],
)
def test_the_checker_finds(tmp_path: Path, path: str, text: str, hits: list[tuple[int, str]]) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert [(line, key) for _, line, key in old_words(tmp_path)] == hits
