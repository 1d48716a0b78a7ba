"""The command `publish inspect`, without torchrec."""

import sys
from typing import Any

from jsonargparse import Namespace
from rich import box
from rich.table import Table

from lightning_distrec.cli.command_line import EXIT_ERROR, EXIT_OK, console
from lightning_distrec.errors import require
from lightning_distrec.serving.follow import PublicationError, Publications, files_of
from lightning_distrec.units import format_bytes


def run_publish(options: Namespace) -> int:
    """Run the command and return its exit code."""
    require("pyarrow", "publish inspect")
    publications = Publications(options.inspect.folder)
    problems = []
    can_follow = False
    text = Table(
        "publication", "step", "time", "changed", "deleted", "all rows", "bytes", box=box.SIMPLE
    )
    last_id: str | None = None
    for sequence in publications.sequences():
        try:
            manifest = publications.manifest(sequence)
            files = files_of(manifest, "snapshot") + files_of(manifest, "changed")[1:]
            for file in files if options.inspect.verify else ():
                publications.verify(file)
        except PublicationError as error:
            problems.append(str(error))
            can_follow = False
            continue
        if manifest["is_snapshot"]:
            can_follow = True
        elif last_id is not None and manifest["base"] != last_id:
            problems.append(f"publication {sequence} does not go on from the one before")
            can_follow = False
        last_id = manifest["id"]
        num_bytes = sum(file["num_bytes"] for file in files)
        text.add_row(
            str(sequence),
            str(manifest["step"]),
            manifest["time"],
            *_rows(manifest),
            format_bytes(num_bytes),
        )
    console().print(text)
    for problem in problems:
        print(f"lightning-distrec: {problem}.", file=sys.stderr)
    if not can_follow:
        print(f"lightning-distrec: no server can follow {publications.folder}.", file=sys.stderr)
    return EXIT_OK if can_follow else EXIT_ERROR


def _rows(manifest: dict[str, Any]) -> list[str]:
    """Return how many rows a publication has: changed ones, deleted ids, and all; "-" for none."""
    counts = []
    for form in ("changed", "deleted", "snapshot"):
        files = [file for table in manifest["tables"].values() for file in table[form]]
        count = sum(file["num_rows"] for file in files)
        counts.append(f"{count:,}" if files else "-")
    return counts
