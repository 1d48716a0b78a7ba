"""Draws how `lightning-distrec advise` decides: `python -m tests.benchmarks.decision_tree` writes
the picture."""

from pathlib import Path

PICTURE = Path(__file__).parents[2] / "docs/images/decision_tree.svg"
TREE = (
    (
        "Tables: over half of the weights' memory,|one of 100,000 rows?",
        "torchrec_sharded",
        "dense: fsdp if needed",
    ),
    ("Fits a rank, replicated?", "ddp_tuned", ""),
    ("Fits but for activations?", "ddp_tuned", "activation_checkpointing"),
    ("Fits a rank, all weights sharded?", "fsdp_tuned", ""),
    ("A chain of blocks whose fullest stage fits?", "pipeline_parallel", ""),
    ("Fits sharded, but for activations?", "fsdp_tuned", "activation_checkpointing"),
)
"""Question, the strategy where the answer is yes, and its option; the next question where it is
no."""
ELSE = "more ranks"


def drawn() -> str:
    """Return the picture."""
    step, height = 84, 84 * len(TREE) + 70
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="640" height="{height}" fill="#fff"/>',
    ]
    for number, (question, strategy, option) in enumerate(TREE):
        top = 20 + number * step
        lines += [
            _box(20, top, 300, "#eee", question.split("|")),
            _box(400, top, 220, "#a9cbe8", [strategy, *([option] if option else [])]),
            _line(f"M320 {top + 22}H398"),
            _line(f"M170 {top + 44}V{top + step - 2}"),
            f'<text x="359" y="{top + 17}" text-anchor="middle" fill="#333">yes</text>',
            f'<text x="180" y="{top + 68}" fill="#333">no</text>',
        ]
    lines += [_box(20, 20 + step * len(TREE), 300, "#f6c28b", [ELSE]), "</svg>"]
    return "\n".join(lines) + "\n"


def _box(remaining: int, top: int, width: int, color: str, words: list[str]) -> str:
    first = top + 27 - 8 * (len(words) - 1)
    texts = (
        f'<text x="{remaining + width // 2}" y="{first + 17 * i}" '
        f'text-anchor="middle">{line}</text>'
        for i, line in enumerate(words)
    )
    box = (
        f'<rect x="{remaining}" y="{top}" width="{width}" height="44" rx="5" fill="{color}" '
        'stroke="#444"/>'
    )
    return "\n".join([box, *texts])


def _line(path: str) -> str:
    return f'<path d="{path}" stroke="#444" fill="none"/>'


if __name__ == "__main__":
    PICTURE.write_text(drawn())
