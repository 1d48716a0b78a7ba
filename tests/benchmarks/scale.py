"""Writes docs/scale.md, its pictures and docs/images/scale.json: what tables cost on up to 4,096
ranks, from dry plans.

    python -m tests.benchmarks.scale [--redraw] [--quick] [--out FOLDER]

Planning all of it takes about ten minutes of one core. --redraw takes the numbers of the last run
instead.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the processes

from tests.benchmarks import scale_text as text  # noqa: E402
from tests.benchmarks.scale_checkpoints import read_checkpoints  # noqa: E402
from tests.benchmarks.scale_pictures import draw  # noqa: E402
from tests.benchmarks.scale_points import load, reckon, save  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> int:
    """Plan, draw and write; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--redraw", action="store_true", help="no planning: the numbers of scale.json"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small plans: to see that it works; needs --out"
    )
    parser.add_argument(
        "--out", type=Path, default=DOCS, help="the folder that gets scale.md and images/"
    )
    options = parser.parse_args()
    if options.quick and options.out == DOCS:
        parser.error("--quick would put small plans into docs: give --out a folder of its own.")
    began = time.monotonic()

    def tell(message: str) -> None:
        print(f"{time.monotonic() - began:.0f} s: {message}", file=sys.stderr, flush=True)

    write(options.out, options.redraw, options.quick, tell)
    return 0


def write(out: Path, redraw: bool, quick: bool, tell: object = lambda _: None) -> None:
    """Write scale.md into a folder, and its pictures and numbers into images/ there."""
    images = out / "images"
    images.mkdir(parents=True, exist_ok=True)
    points = load(images / "scale.json") if redraw else reckon(quick, tell)  # type: ignore[arg-type]
    if not redraw:
        save(points, images / "scale.json")
    checkpoints = read_checkpoints((DOCS / "performance.md").read_text(encoding="utf-8"))
    draw(points, checkpoints, images)
    (out / "scale.md").write_text(text.page(points, checkpoints), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
