"""A process dies at any line while checkpoints are written: what stands under a name is whole, of
one step, and recent."""

import itertools
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_distrec import atomic_files as on_disk
from lightning_distrec.checkpoint import atomic_folder
from lightning_distrec.checkpoint.atomic_folder import MARKER, NEW, UNFINISHED, clean_up, remove
from lightning_distrec.checkpoint.lazy_tensors import as_lazy
from lightning_distrec.checkpoint.save import RankContent, take_folder_snapshot
from lightning_distrec.chunks import Chunk, ChunkedTensor
from tests.support.checkpoint_folders import SingleRank
from tests.support.parameters import slow_except
from tests.support.plain_checkpoints import load
from tests.support.ranks import run_on_warm_ranks

ON_DISK = (atomic_folder.__file__, on_disk.__file__)
"""The files that decide in what order things reach the disk."""


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what is written hundreds of times need not wait for a
    disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def _hidden(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*"))


def _read(value: Any) -> Tensor:
    """Return the full tensor, NaN where nothing in the file covers it."""
    lazy = as_lazy(value)
    read = torch.full(lazy.shape, float("nan"))
    lazy.read_into([Chunk((0,) * len(lazy.shape), read)])
    return read


def _write(path: Path, step: int) -> None:
    tensors = {name: torch.full((6, 4), float(step)) for name in ("a", "b")}
    state = {
        name: ChunkedTensor((6, 4), torch.float32, [Chunk((0, 0), tensor)])
        for name, tensor in tensors.items()
    }
    checkpoint = {"state_dict": state, "global_step": step}
    content = RankContent(path=path, checkpoint=checkpoint, rank_state={"step": step})
    take_folder_snapshot(content, SingleRank()).write(SingleRank())


def _written(path: Path) -> int:
    """Return the step of what `_write` wrote; fails where it is not all there."""
    loaded = load(path, 0, 1)
    steps = {loaded.checkpoint["global_step"], loaded.rank_state["step"]}
    steps |= {
        float(x)
        for value in loaded.checkpoint["state_dict"].values()
        for x in _read(value).unique()
    }
    assert len(steps) == 1, steps
    return int(steps.pop())


def _dies_at(line: int, action: Callable[[], None]) -> int:
    """Do this in a child that ends at once at its n-th line of ON_DISK; return 9, or 0 once it was
    through."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        countdown = itertools.count(line, -1)

        def look(frame: Any, event: str, argument: Any) -> Any:
            if event == "line" and next(countdown) <= 0:
                os._exit(9)
            return look

        sys.settrace(lambda frame, *_: look if frame.f_code.co_filename in ON_DISK else None)
        action()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _renames(exchange: bool) -> AbstractContextManager[Any]:
    """Let a new checkpoint take its name by exchanging it with the old one's, or by two renames."""
    without = patch.object(atomic_folder.ctypes, "CDLL", lambda *_, **__: object())
    return nullcontext() if exchange else without


def _die_everywhere(scratch: str, has_old: bool, exchange: bool) -> Counter[str]:
    with _renames(exchange):
        return _die_at_each_line(scratch, has_old, exchange)


def _die_at_each_line(scratch: str, has_old: bool, exchange: bool) -> Counter[str]:
    """Write step 2 over step 1, or first, dying at one line after the other. Returns how often what
    was found."""
    template, counts = Path(scratch) / "template", Counter[str]()
    template.mkdir()
    if has_old:
        _write(template / "last.ckpt", 1)
    for line in itertools.count(1):
        folder = Path(shutil.copytree(template, Path(scratch) / str(line)))
        path = folder / "last.ckpt"
        code = _dies_at(line, lambda path=path: _write(path, 2))
        assert code in (0, 9), code
        at_once = _written(path) if path.exists() else 0
        counts["hidden"] += bool(_hidden(folder))
        for new in folder.glob(f"{NEW}*"):
            os.utime(new, (0, 0))  # long ago
        clean_up(folder)
        assert not _hidden(folder), line
        final = _written(path) if path.exists() else 0
        assert final in ((1, 2) if has_old else (0, 2)), (line, at_once, final)
        assert final >= at_once, (line, at_once, final)
        assert at_once or not has_old or not exchange, f"nothing under the name after line {line}"
        counts[{0: "none", 1: "old", 2: "new"}[at_once]] += 1
        shutil.rmtree(folder)
        if code == 0:
            assert final == 2
            return counts
    raise AssertionError


@pytest.mark.parametrize(
    ("has_old", "exchange"),
    slow_except([(True, True)], [(True, True), (True, False), (False, True)]),
    ids=["over another", "over another, by two renames", "the first"],
)
def test_a_writer_that_dies_at_any_line_leaves_the_old_or_the_new_one(
    scratch: Path, has_old: bool, exchange: bool
) -> None:
    actual = run_on_warm_ranks(_die_everywhere, 1, str(scratch), has_old, exchange)[0]
    assert actual["new"] > 1, "it never died after the renames"
    assert actual["hidden"] > 20
    if not has_old:
        assert actual["none"] > 20
    else:
        assert actual["old"] > 20
        # between two renames there is a moment without the name
        assert (actual["none"] > 0) == (not exchange)


def _remove_everywhere(scratch: str) -> int:
    template = Path(scratch) / "template"
    _write(template / "best.ckpt", 1)
    for line in itertools.count(1):
        folder = Path(scratch) / str(line)
        shutil.copytree(template, folder)
        path = folder / "best.ckpt"
        code = _dies_at(line, lambda path=path: remove(path))
        if path.exists():
            assert _written(path) == 1
        was_there = path.exists()
        clean_up(folder)
        assert not _hidden(folder)
        assert path.exists() == was_there, f"what was being removed came back, line {line}"
        if code == 0:
            assert not was_there
            return line
    raise AssertionError


def test_a_removal_that_dies_at_any_line_leaves_the_checkpoint_whole_or_gone(scratch: Path) -> None:
    assert run_on_warm_ranks(_remove_everywhere, 1, str(scratch))[0] > 3


def _cleaned_everywhere(scratch: str) -> dict[int, str]:
    """Write step 2 over step 1, another job cleaning up at one line after the other. Returns what
    went wrong, by line.

    The job is this process: a lock that it has taken once is not its own when it opens the file
    again.
    """
    template, wrong = Path(scratch) / "template", {}
    template.mkdir()
    _write(template / "last.ckpt", 1)
    for line in itertools.count(1):
        folder = Path(shutil.copytree(template, Path(scratch) / str(line)))
        countdown = itertools.count(line, -1)

        def look(
            frame: Any,
            event: str,
            argument: Any,
            folder: Path = folder,
            countdown: Iterator[int] = countdown,
        ) -> Any:
            if event == "line" and next(countdown) == 1:
                clean_up(folder)
            return look

        sys.settrace(
            lambda frame, *_, look=look: look if frame.f_code.co_filename in ON_DISK else None
        )
        try:
            _write(folder / "last.ckpt", 2)
            assert _written(folder / "last.ckpt") == 2
        except Exception as error:
            wrong[line] = repr(error)
        finally:
            sys.settrace(None)
        clean_up(folder)
        assert _written(folder / "last.ckpt") in (1, 2)
        assert not _hidden(folder)
        shutil.rmtree(folder)
        if next(countdown) > 0:
            assert line > 50
            return wrong
    raise AssertionError


def test_another_job_that_cleans_up_the_same_folder_takes_nothing_away(scratch: Path) -> None:
    assert run_on_warm_ranks(_cleaned_everywhere, 1, str(scratch))[0] == {}


def test_all_files_are_on_disk_before_the_marker_and_the_marker_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename, exchange = os.fsync, os.rename, atomic_folder._exchange

    def noted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            place = (
                os.readlink(f"/proc/self/fd/{arguments[0]}")
                if kind == "fsync"
                else str(arguments[0])
            )
            events.append(f"{kind} {Path(place).name}")
            return function(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", noted("fsync", fsync))
    monkeypatch.setattr(os, "rename", noted("rename", rename))
    monkeypatch.setattr(atomic_folder, "_exchange", noted("exchange", exchange))
    for step in (1, 2):
        events.clear()
        _write(tmp_path / "last.ckpt", step)
        named = next(
            i
            for i, event in enumerate(events)
            if event.split()[0] != "fsync" and UNFINISHED in event
        )
        hidden, old = events[named].split()[1], events[:named]
        assert old.index(f"fsync {MARKER}") < old.index(f"fsync {hidden}")
        files = {file.name for file in (tmp_path / "last.ckpt").iterdir()} - {MARKER}
        on_disk = {
            event.removeprefix("fsync ").removesuffix(".tmp")
            for event in old[: old.index(f"fsync {MARKER}")]
        }
        assert files <= on_disk
        assert events[named + 1] == f"fsync {tmp_path.name}"
