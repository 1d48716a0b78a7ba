"""Saving and loading when something goes wrong: all ranks say so, with the reason, and what was
complete stays."""

import contextlib
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_distrec.checkpoint import atomic_folder, save
from lightning_distrec.checkpoint.atomic_folder import MARKER, UNFINISHED, is_checkpoint
from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.checkpoint.plain_state import map_nested
from tests.support.checkpoint_folders import edit_marker
from tests.support.click_model import ClickModel, rank_loader, seeded
from tests.support.parameters import slow_except
from tests.support.plain_checkpoints import load, plain_checkpoint
from tests.support.ranks import (
    rank_and_num_ranks,
    run_each_on_ranks,
    run_on_ranks,
    run_on_warm_ranks,
)
from tests.support.resuming import differences
from tests.support.trainers import make_trainer

TENSORS_BYTES, REST_BYTES = 4096, 15000
"""Sizes that a file may not exceed: the tensors' files have 14.8 kB, the ranks' own 15.7 kB."""
MANY = 60
"""More steps than a rank makes until it knows of a save that has failed."""


class Model(ClickModel):
    """A click model that calls what it is told to at a step, keeps what it finds at every step, and
    logs a score."""

    def __init__(
        self, at: dict[int, Callable[[], Any]] | None = None, watch: Path | None = None
    ) -> None:
        super().__init__(torch.optim.Adagrad, {"lr": 0.1})
        self.at, self.watch = at or {}, watch
        self.seconds = 0.0
        """Of each step."""
        self.steps = 0
        self.watched: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.watch is not None:
            self.watched.append(_names(self.watch))
        self.steps = batch_idx + 1
        time.sleep(self.seconds)
        loss = super().training_step(batch, batch_idx)
        self.log("score", float(batch_idx))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (act := self.at.get(batch_idx + 1)) is not None:
            act()

    def on_train_end(self) -> None:
        """Nobody reads the state."""


class WithoutTables(Model):
    """Has dense layers only: its ranks have no lookups by which they hear of each other."""

    def configure_model(self) -> None:
        self.ebc = None

    def forward(self, batch: Any) -> Any:
        return self.mlp(batch["label"].unsqueeze(1).expand(-1, 56)).squeeze(-1)


def _trainer(is_async: bool = False, *callbacks: Any, **options: Any) -> pl.Trainer:
    checkpoint = {"distributed": True, "async_save": is_async}
    tables = options.pop("tables", {"ebc.narrow": {"embedding_update": "dense"}})
    keeps = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return make_trainer(
        {"checkpoint": checkpoint, "tables": tables},
        callbacks=list(callbacks),
        enable_checkpointing=keeps,
        **options,
    )


def _keep(folder: Path, every: int, **options: Any) -> ModelCheckpoint:
    settings = {"filename": "{step}", "monitor": "score", "mode": "max", "save_top_k": 2}
    return ModelCheckpoint(folder, every_n_train_steps=every, **settings | options)


def _fit(trainer: pl.Trainer, model: Model, steps: int, **options: Any) -> str:
    """Return the exception that ended the fit, or ""."""
    try:
        trainer.fit(model, rank_loader(steps, rank_and_num_ranks()[0]), **options)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _names(folder: Path) -> list[str]:
    """Return what is in a folder; all hidden ones have one name."""
    return sorted(
        # A folder has the second name for a moment, until it is locked.
        UNFINISHED if path.name.startswith((UNFINISHED, ".distrec-new-")) else path.name
        for path in folder.iterdir()
    )


def _names_in_the_end(folder: Path) -> list[str]:
    """Collective. The same, once rank 0 has removed what it is removing."""
    torch.distributed.barrier()
    return _names(folder)


def _step(path: Path) -> int:
    """Return the step that a checkpoint is of, once all of it was read."""
    return plain_checkpoint(path)["global_step"] if path.exists() else 0


def _folder(scratch: str, name: str) -> Path:
    folder = Path(scratch) / name
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def _slow(seconds: float) -> Iterator[list[tuple[float, float]]]:
    """Make writes take longer; yields when those began and ended that were done."""
    write, times = save.write_tensors, []

    def slowly(*args: Any, **options: Any) -> Any:
        began = time.monotonic()
        time.sleep(seconds)
        try:
            return write(*args, **options)
        finally:
            times.append((began, time.monotonic()))

    save.write_tensors = slowly
    try:
        yield times
    finally:
        save.write_tensors = write


@contextlib.contextmanager
def _held(may_write: Callable[[], bool]) -> Iterator[None]:
    """Make writes wait until they may."""
    write = save.write_tensors

    def later(*args: Any, **options: Any) -> Any:
        while not may_write():
            time.sleep(0.01)
        return write(*args, **options)

    save.write_tensors = later
    try:
        yield
    finally:
        save.write_tensors = write


# ---- the disk fails


@contextlib.contextmanager
def _disk_heals() -> Iterator[None]:
    """Undo, in the end, what a fault did."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    functions = atomic_folder.write_file, atomic_folder._exchange
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        atomic_folder.write_file, atomic_folder._exchange = functions


def _limit(failing_rank: int, size: int) -> None:
    """Let files of one rank be no larger than that: EFBIG, as a full disk gives ENOSPC."""
    if rank_and_num_ranks()[0] == failing_rank:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def _no_marker() -> None:
    write_file = atomic_folder.write_file

    def write(file: Path, content: bytes) -> None:
        if file.name == MARKER:
            raise OSError(5, "Input/output error", str(file))
        write_file(file, content)

    atomic_folder.write_file = write


def _no_exchange() -> None:
    def exchange(new: Path, old: Path) -> None:
        raise OSError(5, "Input/output error", str(old))

    atomic_folder._exchange = exchange


FAULTS: dict[str, tuple[Callable[[], None], str, int, type[Model]]] = {
    "rank 0: tensors": (lambda: _limit(0, TENSORS_BYTES), "File too large", MANY, Model),
    "rank 1: the rest": (lambda: _limit(1, REST_BYTES), "File too large", MANY, Model),
    "rank 1: no tables": (lambda: _limit(1, REST_BYTES), "File too large", MANY, WithoutTables),
    "rank 1: at the end": (lambda: _limit(1, TENSORS_BYTES), "File too large", 4, Model),
    "the marker": (_no_marker, "Input/output error", 4, Model),
    "the exchange": (_no_exchange, "Input/output error", 4, Model),
}
"""What fails, the reason, the number of steps, and the module."""


def _saves_twice(scratch: str, is_async: bool, case: str) -> dict[str, Any]:
    """Save at step 2, then to the same name at step 4, when the disk fails."""
    fail, _, steps, kind = FAULTS[case]
    path = _folder(scratch, case) / "it.ckpt"
    trainer = _trainer(is_async, **{} if kind is Model else {"tables": {}})

    def again() -> None:
        if is_async:
            trainer.strategy.session.checkpoints._saver.finish()  # of step 2
        fail()
        trainer.save_checkpoint(path)

    model = seeded(kind, {2: lambda: trainer.save_checkpoint(path), 4: again})
    model.seconds = 0.02 if is_async else 0.0
    with _disk_heals():
        raised = _fit(trainer, model, steps)
    names = _names_in_the_end(path.parent)
    return {"raised": raised, "steps": model.steps, "old": _step(path), "names": names}


@pytest.mark.parametrize("is_async", slow_except([True], [False, True]), ids=["sync", "async"])
def test_a_disk_that_fails_on_one_rank_raises_on_all_and_the_old_checkpoint_stays(
    tmp_path: Path, is_async: bool
) -> None:
    calls = {case: (_saves_twice, str(tmp_path), is_async, case) for case in FAULTS}
    ranks = run_each_on_ranks(calls, 2)
    for case, (_, reason, steps, _) in FAULTS.items():
        outcomes = [rank_results[case] for rank_results in ranks]
        for actual in outcomes:
            assert actual["raised"].startswith("CheckpointError: "), (case, actual)
            assert reason in actual["raised"], (case, actual)
            assert "it.ckpt" in actual["raised"], (case, actual)
            assert (actual["old"], actual["names"]) == (2, ["it.ckpt"]), (case, actual)
        failing_rank, _, _ = case.partition(": ")
        if failing_rank.startswith("rank"):
            other = outcomes[1 - int(failing_rank[-1])]
            assert f"{failing_rank}: " in other["raised"], (case, other)
        first, second = (actual["steps"] for actual in outcomes)
        assert first == second, case
        assert 4 < first < MANY if is_async and steps == MANY else first == 4, (case, first)


# ---- what is kept meanwhile


def _top_1(scratch: str, fails: bool) -> dict[str, Any]:
    folder = _folder(scratch, str(fails))
    trainer = _trainer(True, _keep(folder, 4, filename="best-{step}", save_top_k=1))
    model = seeded(Model, watch=folder)

    def before_second() -> None:
        trainer.strategy.session.checkpoints._saver.finish()
        if fails:
            _limit(1, TENSORS_BYTES)

    def until_second_is_begun() -> None:
        while UNFINISHED not in _names(folder):
            time.sleep(0.01)

    model.at, model.seconds = {7: before_second}, 0.05
    if fails:
        writing = _slow(0.4)
    else:
        model.at[10] = until_second_is_begun
        # The second is written once the last step has looked.
        writing = _held(lambda: model.steps < 8 or model.steps == 11)
    with _disk_heals(), writing:
        raised = _fit(trainer, model, 11)
    return {"raised": raised, "watched": model.watched, "names": _names_in_the_end(folder)}


def test_the_old_best_is_removed_only_once_the_new_one_is_complete(tmp_path: Path) -> None:
    calls = {str(fails): (_top_1, str(tmp_path), fails) for fails in (False, True)}
    for rank_results in run_each_on_ranks(calls, 2):
        good, bad = rank_results["False"], rank_results["True"]
        assert (good["raised"], good["names"]) == ("", ["best-step=8.ckpt"]), good
        assert bad["raised"].startswith("CheckpointError: "), bad
        assert bad["names"] == ["best-step=4.ckpt"], bad
        # the write ends after the last step; its thread may begin after the next step
        assert len(good["watched"]) == 11
        assert all("best-step=4.ckpt" in names for names in good["watched"][8:])
        assert good["watched"][-1] == [UNFINISHED, "best-step=4.ckpt"]


def _every_step(folder: str) -> dict[str, Any]:
    model = seeded(Model, watch=Path(folder))
    with _slow(0.1) as writes:
        raised = _fit(_trainer(True, _keep(Path(folder), 1, save_last=True)), model, 5)
    names = _names_in_the_end(Path(folder))
    return {"raised": raised, "watched": model.watched, "names": names, "writes": writes}


def test_at_most_one_checkpoint_is_being_written(tmp_path: Path) -> None:
    steps = {"last.ckpt": 5, "step=4.ckpt": 4, "step=5.ckpt": 5}
    for actual in run_on_warm_ranks(_every_step, 2, str(tmp_path)):
        assert not actual["raised"]
        assert actual["names"] == list(steps)
        assert len(actual["writes"]) == 10
        for (_, ended), (began, _) in zip(actual["writes"], actual["writes"][1:], strict=False):
            assert began >= ended
        assert max(names.count(UNFINISHED) for names in actual["watched"]) == 1
    assert {name: _step(tmp_path / name) for name in steps} == steps


def _snapshot(scratch: str, is_async: bool) -> list[bool]:
    """Save in the third of 12 steps, and after them; return whether each is there by then."""
    during, after = (Path(scratch) / f"{is_async}{when}.ckpt" for when in ("", " after"))
    trainer = _trainer(is_async)
    with _slow(0.5 * is_async):
        assert not _fit(trainer, seeded(Model, {3: lambda: trainer.save_checkpoint(during)}), 12)
        are_there = [is_checkpoint(during)]
        trainer.save_checkpoint(after)
    return [*are_there, is_checkpoint(after)]


def _content(path: Path, rank: int) -> Any:
    """Return all that a rank of two reads of a checkpoint."""
    loaded = load(path, rank, 2)
    content = [loaded.checkpoint, loaded.rank_state]
    return map_nested(content, lambda leaf, _: materialized(leaf))


def test_an_asynchronous_checkpoint_is_of_the_step_of_its_save_and_the_end_of_fit_waits_for_it(
    tmp_path: Path,
) -> None:
    calls = {str(is_async): (_snapshot, str(tmp_path), is_async) for is_async in (False, True)}
    for rank_results in run_each_on_ranks(calls, 2):
        assert rank_results["True"] == [True, True]
    for rank in range(2):
        sync, asynchronous = (_content(tmp_path / f"{kind}.ckpt", rank) for kind in calls)
        assert sync[0]["global_step"] == 3
        assert differences(asynchronous, sync, "checkpoint", 0.0) == []


# ---- something else fails meanwhile


def _user_fails(scratch: str) -> dict[str, Any]:
    """Rank 1 fails, and leaves as in a script."""
    from lightning_distrec.strategies.run.process_runs import PROCESS

    path, trainer = Path(scratch) / "it.ckpt", _trainer(True)

    def fail() -> None:
        if trainer.global_rank == 1:
            raise ValueError("the user's code failed")

    began = time.monotonic()
    with _slow(0.7):
        model = seeded(Model, {3: lambda: trainer.save_checkpoint(path), 5: fail})
        raised = _fit(trainer, model, 400)
    outcome = {"raised": raised, "complete": is_checkpoint(path)}
    outcome["seconds"] = time.monotonic() - began
    if trainer.global_rank == 1:
        PROCESS.leave()
    return outcome


def test_an_exception_while_a_checkpoint_is_written_is_what_is_seen_and_it_is_written(
    tmp_path: Path,
) -> None:
    first, failed = run_on_ranks(_user_fails, 2, str(tmp_path))
    assert failed["raised"] == "ValueError: the user's code failed"
    assert failed["complete"]
    assert "Error" in first["raised"]
    assert max(first["seconds"], failed["seconds"]) < 60
    assert _step(tmp_path / "it.ckpt") == 3


# ---- damage


def _save(path: str) -> None:
    trainer = _trainer()
    assert not _fit(trainer, seeded(Model, {2: lambda: trainer.save_checkpoint(path)}), 3)


def _resume_each(paths: dict[str, str]) -> dict[str, tuple[str, int]]:
    actual = {}
    for name, path in paths.items():
        model = seeded(Model)
        raised = _fit(_trainer(), model, 2, ckpt_path=path)
        actual[name] = (raised, model.steps)
    return actual


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _spoil(file: Path) -> None:
    file.write_bytes(b"\0" * file.stat().st_size)


def _later_format(folder: Path) -> None:
    edit_marker(folder, lambda marker: marker.update(format=3))


def _save_as(file: Path, content: Any) -> None:
    torch.save(content, file)
    size = file.stat().st_size
    edit_marker(file.parent, lambda marker: marker["files"].update({file.name: size}))


def _forget(folder: Path, name: str) -> None:
    (folder / name).unlink()
    edit_marker(folder, lambda marker: marker["files"].pop(name))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no marker": (lambda p: (p / MARKER).unlink(), f"is not a complete checkpoint: {MARKER}"),
    "later format": (
        _later_format,
        "has format 3, and this version of lightning_distrec reads format 2",
    ),
    "tensors cut off": (lambda p: _truncate(p / "rank_1.safetensors"), "rank_1.safetensors has "),
    "state is zeros": (lambda p: _spoil(p / "state.pt"), "state.pt does not match its checksum"),
    "a rank's file gone, and not listed": (lambda p: _forget(p, "rank_1.pt"), "rank_1.pt"),
    "a rank's file is a list": (lambda p: _save_as(p / "rank_1.pt", [1]), "rank_1.pt"),
    "a rank's file lacks something": (
        lambda p: _save_as(p / "rank_1.pt", {"loaders": [], "generators": {}}),
        "rank_1",
    ),
}


def test_a_damaged_checkpoint_is_reported_on_every_rank_before_training_starts(
    tmp_path: Path,
) -> None:
    complete = tmp_path / "complete"
    run_on_warm_ranks(_save, 2, str(complete))
    paths = {"complete": str(complete)}
    for name, (damage, _) in DAMAGES.items():
        paths[name] = str(shutil.copytree(complete, tmp_path / name))
        damage(Path(paths[name]))
    for actual in run_on_warm_ranks(_resume_each, 2, paths):
        assert actual.pop("complete")[1] > 0
        for name, (message, steps) in actual.items():
            assert message.startswith("CheckpointError: "), (name, message)
            assert DAMAGES[name][1] in message, (name, message)
            assert name in message, (name, message)  # the folder's
            assert "weights_only" not in message, f"advises to run code: {message}"
            assert message.isprintable(), f"more than a line: {message!r}"
            assert not re.search(r"rank 1: .*on rank 0", message), message
            assert steps == 0, name


# ---- links to the last


# ---- refusals


def _refused(scratch: str) -> dict[str, tuple[str, int]]:
    linked = ModelCheckpoint(f"{scratch}/links", save_last="link")
    cases: dict[str, tuple[pl.Trainer, str, dict[str, Any]]] = {
        "plugin": (_trainer(plugins=[AsyncCheckpointIO()]), "", {}),
        "link": (_trainer(True, linked), "", {}),
        "s3": (_trainer(), "s3://bucket/it.ckpt", {}),
        "s3 async": (_trainer(True), "s3://bucket/it.ckpt", {}),
        "options": (_trainer(), f"{scratch}/it.ckpt", {"storage_options": lambda spec: None}),
    }
    actual = {}
    for name, (trainer, path, options) in cases.items():

        def save_it(trainer: Any = trainer, path: str = path, options: Any = options) -> None:
            trainer.save_checkpoint(path, **options)

        model = seeded(Model, {1: save_it} if path else {})
        actual[name] = (_fit(trainer, model, 2), model.steps)
    return actual


REFUSALS = {
    "plugin": (0, "plugins=AsyncCheckpointIO.*'distributed': False.*'async_save': True"),
    "link": (0, "(?=.*save_last='link')(?=.*async_save)"),
    "s3": (1, "s3://bucket/it.ckpt: .*checkpoint={'distributed': False}"),
    "s3 async": (1, "s3://bucket/it.ckpt: .*checkpoint={'distributed': False}"),
    "options": (1, "storage_options belong to a CheckpointIO"),
}
"""In which step, and why."""


def test_what_belongs_to_other_storage_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for actual in run_on_warm_ranks(_refused, 2, str(tmp_path)):
        for name, (step, expected) in REFUSALS.items():
            message, steps = actual[name]
            assert re.match(f"ConfigError: {expected}", message), (name, message)
            assert steps == step, name
    assert list(tmp_path.iterdir()) == []


class Level(int, Enum):
    """A number, and yet no plain type."""

    HIGH = 3


NOT_PLAIN: dict[str, tuple[Any, str]] = {
    "int enum": (Level.HIGH, f"['held'], a {__name__}.Level,"),
    "key": ({Level.HIGH: 1}, "['held'], a "),
    "deep": (
        {"a": [1, ({"b": datetime(2026, 1, 1)},)]},
        "['held']['a'][1][0]['b'], a datetime.datetime,",
    ),
}
"""What a callback holds, and how it is named."""


class Remembers(pl.Callback):
    """Has a state; those of other ranks than `ranks` have None."""

    def __init__(self, held: Any, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.held, self.ranks = held, ranks

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held if rank_and_num_ranks()[0] in self.ranks else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


def _holds(folder: str, held: Any, keeps: bool, ranks: tuple[int, ...] = (0, 1)) -> tuple[str, int]:
    """Save what a callback holds at step 2, by ModelCheckpoint where it keeps checkpoints."""
    callbacks: list[Any] = [Remembers(held, ranks)]
    callbacks += [ModelCheckpoint(folder, filename="it", every_n_train_steps=2)] if keeps else []
    trainer = _trainer(False, *callbacks)
    save_it = {} if keeps else {2: lambda: trainer.save_checkpoint(f"{folder}/it.ckpt")}
    model = seeded(Model, save_it)
    return _fit(trainer, model, 3), model.steps


def test_what_is_no_plain_type_is_refused_with_its_path_and_type(tmp_path: Path) -> None:
    calls: dict[str, Any] = {}
    for name, (held, _) in NOT_PLAIN.items():
        keeps = name != "key"
        calls[name] = (_holds, str(tmp_path / name), held, keeps)
    calls["rank 1 alone"] = (_holds, str(tmp_path / "one"), Level.HIGH, False, (1,))
    for rank_results in run_each_on_ranks(calls, 2):
        # as in Lightning, what rank 0 has is saved
        assert rank_results.pop("rank 1 alone") == ("", 3)
        for name, (message, steps) in rank_results.items():
            assert message.startswith("CheckpointError: "), (name, message)
            assert NOT_PLAIN[name][1] in message, message
            assert "is no plain type" in message
            # Before training where checkpoints are going to be saved, else at the first save.
            is_at_save = "checkpoint['callbacks']['Remembers']" in message
            assert is_at_save or "the state_dict of Remembers" in message, message
            assert (steps, is_at_save) == ((2, True) if name == "key" else (0, False)), name
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["it.ckpt"]


"""What comes back as something else."""


# ---- ranks that differ


class Differs(Model):
    """Has a large buffer of another length on rank 1, and one that only rank 1 has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        rank = rank_and_num_ranks()[0]
        self.register_buffer("seen", torch.full((10_000 + rank,), float(rank)))
        if rank:
            self.register_buffer("own", torch.full((10_000,), 5.0))


def _differs(path: str) -> str:
    trainer = _trainer(True)
    return _fit(trainer, seeded(Differs, {2: lambda: trainer.save_checkpoint(path)}), 3)


def test_a_rank_whose_module_differs_neither_hangs_nor_spoils_the_checkpoint(
    tmp_path: Path,
) -> None:
    assert run_on_warm_ranks(_differs, 2, str(tmp_path / "it.ckpt")) == ["", ""]
    seen = plain_checkpoint(tmp_path / "it.ckpt")["state_dict"]["seen"]
    assert torch.equal(seen, torch.zeros(10_000))
