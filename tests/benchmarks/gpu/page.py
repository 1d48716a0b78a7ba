"""The section about GPUs in docs/performance.md, from what was found there."""

from pathlib import Path
from typing import Any

from tests.benchmarks.report import table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "performance.md"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"


def section(results: dict[str, Any]) -> str:
    """Return the section's text. results: as the command writes them as JSON."""
    parts = results["parts"]
    lines = [
        f"`make bench-gpu` wrote this on {results['device']}. Versions: {results['versions']}."
    ]
    for name, part in parts.items():
        lines.append(
            f"**{name}** ({part['seconds']:.0f} s){': ' + part['failed'] if part['failed'] else ''}"
        )
        if part["differences"]:
            rows = [
                (name, f"{actual:.1e}", f"{limit:.0e}")
                for name, (actual, limit) in part["differences"].items()
            ]
            lines.append(table(["compared", "largest difference", "limit"], rows))
        if part["numbers"]:
            rows = [(name, _number(value)) for name, value in part["numbers"].items()]
            lines.append(table(["", "found"], rows))
        lines += part["notes"]
    return "\n\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def write_section(text: str, page: Path = PAGE) -> None:
    """Put the text between the markers of the page."""
    initial, _, tail = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, final = tail.partition(END)
    page.write_text(f"{initial}{BEGIN}\n\n{text}\n\n{END}{final}", encoding="utf-8")
