"""Checkpoints of all forms, damaged at random: what loads without an error is what was saved."""

import math
import random
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_distrec.checkpoint.contents import open_checkpoint
from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.checkpoint.load import Origin
from lightning_distrec.checkpoint.plain_state import map_nested
from lightning_distrec.checkpoint.save import RankContent, take_folder_snapshot
from lightning_distrec.checkpoint.single_file import take_file_snapshot
from lightning_distrec.checkpoint.tensor_files import SUFFIX, read_header
from lightning_distrec.errors import CheckpointError
from lightning_distrec.strategies.checkpoints.checkpoint_io import read_checked
from tests.support.checkpoint_folders import SingleRank, by_rows

TABLE = torch.arange(12_000.0).view(240, 50)
LAYERS = {f"layer.{number}": torch.full((64, 70), float(number)) for number in range(3)}


def _content(path: Path, *ends: int) -> RankContent:
    table = by_rows(TABLE, *ends)
    return RankContent(
        path=path,
        checkpoint={
            "epoch": 2,
            "global_step": 30,
            "pytorch-lightning_version": "2.6.0",
            "loops": {},
            "state_dict": {"table": table, **LAYERS, "small": torch.arange(30.0)},
        },
        rank_state={"generators": torch.arange(5000, dtype=torch.uint8)},
        facts={"job": "run-a-fit1@0123"},
        extra_files={"plan.json": b"{}"},
    )


def _single_file(folder: Path) -> Path:
    take_file_snapshot(_content(folder / "it.ckpt", 80), SingleRank()).write(SingleRank())
    return folder / "it.ckpt"


def _folder(folder: Path) -> Path:
    content = _content(folder / "it.ckpt", 80, 160)
    take_folder_snapshot(content, SingleRank()).write(SingleRank())
    return folder / "it.ckpt"


FORMS: dict[str, Callable[[Path], Path]] = {
    "single file": _single_file,
    "folder": _folder,
}


def _flip_bits(content: bytearray, numbers: random.Random) -> None:
    for _ in range(numbers.choice([1, 1, 2, 8])):
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)


def _flip_64_bytes(content: bytearray, numbers: random.Random) -> None:
    begin = numbers.randrange(len(content))
    content[begin : begin + 64] = bytes(255 - byte for byte in content[begin : begin + 64])


def _zero_block(content: bytearray, numbers: random.Random) -> None:
    begin, size = numbers.randrange(len(content)), numbers.choice([16, 512, 4096])
    content[begin : begin + size] = bytes(len(content[begin : begin + size]))


def _truncate(content: bytearray, numbers: random.Random) -> None:
    del content[numbers.randrange(len(content)) :]


def _swap_blocks(content: bytearray, numbers: random.Random) -> None:
    size = numbers.choice([64, 512, 4096])
    if len(content) > 2 * size:
        a, b = sorted(numbers.sample(range(0, len(content) - size, size), 2))
        content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]


BYTES = (_flip_bits, _flip_64_bytes, _zero_block, _truncate, _swap_blocks)


def _swap_records(path: Path, numbers: random.Random) -> None:
    """Exchange records of one size: of an archive, without their checksums, or full archives with
    them, or files."""
    places: list[tuple[Path, int, int]] = []
    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                begin = path.read_bytes().index(archive.read(entry))
                places.append((path, begin, entry.file_size))
    else:
        for file in path.iterdir():
            places.append((file, 0, file.stat().st_size))
            if file.suffix == SUFFIX:
                for chunk in read_header(file).values():
                    size = chunk.dtype.itemsize * math.prod(chunk.box[1])
                    places.append((file, chunk.begin, size))
    pairs = [(a, b) for a in places for b in places if a < b and a[2] == b[2]]
    if not pairs:
        _damage_bytes(_flip_64_bytes, path, numbers)
        return
    (file, begin, size), (other, place, _) = numbers.choice(pairs)
    contents = {file: bytearray(file.read_bytes()) for file in (file, other)}
    moved, back = contents[file][begin : begin + size], contents[other][place : place + size]
    contents[file][begin : begin + size], contents[other][place : place + size] = back, moved
    for changed, content in contents.items():
        changed.write_bytes(content)


def _damage_bytes(
    damage: Callable[[bytearray, random.Random], None], path: Path, numbers: random.Random
) -> None:
    files = [path] if path.is_file() else sorted(path.iterdir())
    # Large files more often, but small ones too: markers, metadata.
    file = numbers.choices(files, [file.stat().st_size ** 0.5 for file in files])[0]
    content = bytearray(file.read_bytes())
    damage(content, numbers)
    file.write_bytes(content)


def _read(path: Path, is_checked: bool = False) -> Any:
    loaded = read_checked(lambda: open_checkpoint(path), path, SingleRank(), False, is_checked)  # type: ignore[arg-type]

    content = [loaded.checkpoint, loaded.rank_state, loaded.rank_0_state]
    return map_nested(content, lambda leaf, _: materialized(leaf))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _origin(path: Path) -> tuple[str, int]:
    """Return what a restart chooses by."""
    origin: Origin = open_checkpoint(path).origin()
    return origin.job, origin.step


def _outcome(path: Path, expected: Any, origin: tuple[str, int]) -> str:
    try:
        # As a restart does: it takes no checkpoint of another job, and says nothing of those.
        same = _origin(path) == origin
        return "as it was" if _equal(_read(path), expected) and same else "OTHER NUMBERS"
    except CheckpointError as error:
        return "error" if path.name in str(error) else f"an error without a name: {error}"


def fuzz(form: str, folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """Damage copies of a checkpoint, and return how many loads ended how."""
    source = folder / "source"
    source.mkdir()
    name = FORMS[form](source).name
    expected, origin = _read(source / name), _origin(source / name)
    numbers, outcomes = random.Random(seed), Counter[str]()
    for number in range(count):
        copy = Path(shutil.copytree(source, folder / str(number)))
        kind = number % (len(BYTES) + 1)
        if kind < len(BYTES):
            _damage_bytes(BYTES[kind], copy / name, numbers)
        else:
            _swap_records(copy / name, numbers)
        outcomes[_outcome(copy / name, expected, origin)] += 1
        shutil.rmtree(copy)
    return outcomes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore")
def test_no_damaged_checkpoint_loads_other_numbers(tmp_path: Path, form: str) -> None:
    count = 42
    outcomes = fuzz(form, tmp_path, count)
    assert outcomes.keys() <= {"error", "as it was"}, outcomes
    assert outcomes["error"] > 0.8 * count, outcomes


def test_checkpoints_that_are_not_damaged_load(tmp_path: Path) -> None:
    for form, write in FORMS.items():
        (tmp_path / form).mkdir()
        actual = _read(write(tmp_path / form))[0]["state_dict"]
        assert all(torch.equal(actual[name], value) for name, value in LAYERS.items())
        assert torch.equal(actual["table"], TABLE)
