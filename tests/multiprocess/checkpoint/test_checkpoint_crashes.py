"""A rank dies at any moment while checkpoints are written: what stands under a name is whole, of
one step, and recent.

`DISTREC_CRASHES`: how many kills each kind of saving gets; by default three at least, and as many
as 15 s hold. What is drawn is drawn from the seed of a test and from `DISTREC_SEED`.
"""

import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec import atomic_files as on_disk
from lightning_distrec._compat.torch import without_torch_function
from lightning_distrec.checkpoint import atomic_folder
from lightning_distrec.checkpoint.atomic_folder import (
    MARKER,
    NEW,
    UNFINISHED,
    clean_up,
    is_checkpoint,
    remove,
)
from lightning_distrec.checkpoint.lazy_tensors import as_lazy
from lightning_distrec.checkpoint.save import RankContent, take_folder_snapshot
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.strategies.run.process_runs import PROCESS
from tests.support.checkpoint_folders import SingleRank
from tests.support.limits import LIMIT_SECONDS, at_most
from tests.support.parameters import slow_except
from tests.support.plain_checkpoints import load
from tests.support.ports import free_port
from tests.support.ranks import PRELOAD, _run, rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

SECONDS_OF_KILLS = 15.0
KILLS = int(os.environ.get("DISTREC_CRASHES", "0"))
SEED = os.environ.get("DISTREC_SEED", "0")
SURVIVOR_SECONDS = 120.0
ON_DISK = (atomic_folder.__file__, on_disk.__file__)
"""The files that decide in what order things reach the disk."""
ROWS, DIM = 8192, 64
"""2 MiB a table, as much again for its optimizer's state."""


class Endless(Dataset):
    """As good as endless, and the same batch again and again."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": torch.arange(8) * 1000, "lengths": torch.ones(8, dtype=torch.long)}


class Numbers(pl.LightningModule):
    """All that it learns is the number of the step. One table is updated by FBGEMM, the other by
    the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[feature]
            )
            for name, feature in (("fused", "a"), ("kept", "b"))
        ]
        self.ebc = EmbeddingBagCollection(tables=configs)
        self.top = torch.nn.Linear(2 * DIM, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        bags = self.ebc(
            KeyedJaggedTensor(keys=["a", "b"], values=batch["ids"], lengths=batch["lengths"])
        )
        loss = self.top(bags.values()).square().mean()
        self.log("score", float(self.global_step))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Counts(pl.Callback):
    """Fills all that a checkpoint holds with the number of the step, before it is saved."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        wrong = {
            name
            for name, tensor in _held(trainer)
            if not bool((tensor == trainer.global_step).all())
        }
        assert not wrong or trainer.global_step == 0, (
            f"resumed at step {trainer.global_step} with other {wrong}"
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        torch.manual_seed(trainer.global_step)
        with torch.no_grad():
            for _, tensor in _held(trainer):
                tensor.fill_(trainer.global_step)


def _held(trainer: pl.Trainer) -> Iterator[tuple[str, Tensor]]:
    shards = trainer.strategy.run_tables.shards
    for name, table_options in shards.shards.items():
        with without_torch_function():
            held = [shard.weight.data for shard in table_options]
        yield from ((name, data) for data in held)
    yield from (
        ("fused state", tensor) for tensors in shards.fused_state().values() for tensor in tensors
    )
    yield from ((name, p.data) for name, p in trainer.lightning_module.top.named_parameters())
    for state in trainer.optimizers[0].state.values():
        yield from (("state", value) for value in state.values() if value.dim())


def _train(folder: str, is_async: bool, one_file: bool) -> None:
    """Train and save after every step, on from the last checkpoint, until killed; write down what
    was reported."""
    leftovers = _outdated(Path(folder))
    keep = ModelCheckpoint(
        folder,
        filename="{step}",
        monitor="score",
        mode="max",
        save_top_k=2,
        every_n_train_steps=1,
        save_last=True,
    )
    checkpoint = {"async_save": is_async, "distributed": not one_file}
    options = {"checkpoint": checkpoint, "tables": {"ebc.kept": {"embedding_update": "dense"}}}
    trainer = make_trainer(options, callbacks=[Counts(), keep], enable_checkpointing=True)
    save, begun = trainer.strategy.save_checkpoint, []

    def saved(checkpoint: dict[str, Any], path: str, storage_options: Any = None) -> None:
        save(checkpoint, path, storage_options)
        begun.append((checkpoint["global_step"], Path(path).name))
        # an asynchronous one has been waited for by the next
        reported = begun[:-1] if is_async else begun
        if reported:
            remaining = [path.name for path in leftovers if path.exists()]
            assert not remaining, f"left over after a save: {remaining}"
            _note(folder, "{} {}".format(*reported[-1]))

    trainer.strategy.save_checkpoint = saved
    last = Path(folder) / "last.ckpt"
    try:
        trainer.fit(
            Numbers(),
            DataLoader(Endless(), batch_size=None),
            ckpt_path=last if last.exists() else None,
        )
    except BaseException as error:
        _note(folder, "".join(traceback.format_exception(error)), "error")
        sys.last_value = error  # as at the end of a script
        PROCESS.leave()
        raise


def _note(folder: str, line: str, kind: str = "reported") -> None:
    with open(f"{folder}.{kind}.{rank_and_num_ranks()[0]}", "a") as file:
        file.write(f"{line}\n")


def _hidden(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*"))


def _outdated(folder: Path) -> list[Path]:
    """Return what the next save is to remove: not what a writer had no lock on yet, which is given
    some minutes."""
    return [path for path in _hidden(folder) if not path.name.startswith(NEW)]


def _step_of(path: Path) -> int:
    """Return the step that a checkpoint is of; fails where anything in it is of another one, or
    missing."""
    steps = set()
    for rank in range(2):
        loaded = load(path, rank, 2)
        checkpoint = loaded.checkpoint
        steps.add(checkpoint["global_step"])
        steps.add(
            checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
        )
        states = checkpoint["optimizer_states"][0]["state"]
        assert len(states) == 4, states.keys()
        tensors = dict(checkpoint["state_dict"])
        tensors |= {
            f"{name} {key}": value for name, state in states.items() for key, value in state.items()
        }
        assert len(tensors) == 12, tensors.keys()
        for value in tensors.values():
            steps |= set(_read(value).unique().tolist())
        with torch.random.fork_rng():
            torch.manual_seed(checkpoint["global_step"])
            assert torch.equal(loaded.rank_state["generators"]["torch"], torch.get_rng_state())
    assert len(steps) == 1, f"{path} is of steps {steps}"
    return int(steps.pop())


def _read(value: Any) -> Tensor:
    """Return the full tensor, NaN where nothing in the file covers it."""
    lazy = as_lazy(value)
    read = torch.full(lazy.shape, float("nan"))
    lazy.read_into([Chunk((0,) * len(lazy.shape), read)])
    return read


class Kills:
    """Starts two ranks, kills, and looks at what is left; again and again in one folder."""

    def __init__(self, folder: Path, is_async: bool) -> None:
        self.folder, self.is_async = folder, is_async
        self.step = 0
        """Of the last checkpoint so far."""
        self.told: list[str] = []
        """Of each kill: who, when, how long the survivor took, and what it said."""
        folder.mkdir()

    def kill(self, victims: tuple[int, ...], saves: int, part: float) -> None:
        """Start the ranks; kill some of them after so many saves, and a part of another; look at
        what is left."""
        for note in self.folder.parent.glob(f"{self.folder.name}.*"):
            note.unlink()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        (scratch := self.folder.parent / "scratch").mkdir(exist_ok=True)
        # Files and folders take turns, and replace each other under one name.
        port, arguments = free_port(), (str(self.folder), self.is_async, len(self.told) % 2 == 0)
        ranks = [
            context.Process(target=_run, args=(_train, arguments, rank, 2, port, str(scratch)))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        try:
            begun = time.monotonic()
            for count in (1, saves):
                self._wait(
                    lambda n=count: self._saves() >= n or not all(p.is_alive() for p in ranks),
                    LIMIT_SECONDS,
                )
                begun, seconds = (
                    time.monotonic(),
                    part * (time.monotonic() - begun) / max(1, saves - 1),
                )
            time.sleep(seconds)
            assert not self._notes("error"), "\n".join(self._notes("error").values())
            for rank in victims:
                os.kill(ranks[rank].pid, signal.SIGKILL)
            killed = time.monotonic()
            self._wait(lambda: not any(p.is_alive() for p in ranks), SURVIVOR_SECONDS)
            took = time.monotonic() - killed
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        self._look(victims, [process.exitcode for process in ranks])
        messages = [text.strip().splitlines()[-1] for text in self._notes("error").values()]
        when = f"{saves} saves and {seconds:.3f} s"
        self.told.append(
            f"killed {victims} after {when}; ended in {took:.2f} s; step {self.step}; {messages}"
        )

    def _look(self, victims: tuple[int, ...], codes: list[Any]) -> None:
        for rank in {0, 1} - set(victims):
            error = self._notes("error").get(rank, "")
            assert codes[rank] == 1, (codes, error)
            assert "Error" in error
            assert "AssertionError" not in error, error
        step, name = self._reported()
        assert (self.folder / name).exists() or not name.startswith("step"), (
            f"{name} was reported and is gone"
        )
        actual = {
            path.name: _step_of(path)
            for path in self.folder.iterdir()
            if not path.name.startswith(".")
        }
        for seen, step_values in actual.items():
            assert seen == "last.ckpt" or re.fullmatch(
                rf"step={step_values}(-v\d+)?\.ckpt", seen
            ), actual
        assert actual["last.ckpt"] >= max(self.step, step if name == "last.ckpt" else step - 1), (
            actual,
            step,
            name,
        )
        self.step = actual["last.ckpt"]

    def _notes(self, kind: str) -> dict[int, str]:
        files = self.folder.parent.glob(f"{self.folder.name}.{kind}.*")
        return {int(file.suffix[1:]): text for file in files if (text := file.read_text())}

    def _saves(self) -> int:
        counts = [text.count("\n") for text in self._notes("reported").values()]
        return min(counts) if len(counts) == 2 else 0

    def _reported(self) -> tuple[int, str]:
        lines = [
            line.split()
            for text in self._notes("reported").values()
            for line in text.splitlines()
            if line
        ]
        return max((int(step), name) for step, name in (line for line in lines if len(line) == 2))

    @staticmethod
    def _wait(is_over: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_over():
            assert time.monotonic() < deadline, f"not over after {seconds} s"
            time.sleep(0.005)


@pytest.mark.timeout(at_most(10 * KILLS))
@pytest.mark.parametrize(
    ("is_async", "seed"),
    slow_except([(True, 0)], [(is_async, seed) for is_async in (False, True) for seed in range(5)]),
)
def test_after_a_kill_at_any_moment_every_checkpoint_is_whole_and_the_last_is_recent(
    tmp_path: Path, is_async: bool, seed: int
) -> None:
    kills, began, done = Kills(tmp_path / "run", is_async), time.monotonic(), 0
    draw = random.Random(f"{is_async} {seed} {SEED}")
    try:
        while done < KILLS or (
            not KILLS and (done < 3 or time.monotonic() - began < SECONDS_OF_KILLS)
        ):
            kills.kill(
                draw.choice([(0,), (1,), (0,), (1,), (0, 1)]), draw.randint(2, 5), draw.random()
            )
            done += 1
    finally:
        print(f"{done} kills in {time.monotonic() - began:.0f} s\n" + "\n".join(kills.told))
    assert kills.step > done / 2, "hardly anything was saved between the kills"


# -------------------------------------------------------------------------------------------------
# a script of a user


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_async", "victim"), [(False, 0), (True, 1)], ids=["sync, first rank", "async, second"]
)
def test_a_script_whose_other_rank_was_killed_ends_by_itself(
    tmp_path: Path, is_async: bool, victim: int
) -> None:
    (folder := tmp_path / "run").mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.multiprocess.checkpoint.test_checkpoint_crashes",
        str(folder),
        str(int(is_async)),
        str(victim),
    ]
    common = {
        "WORLD_SIZE": "2",
        "TEST_NUM_RANKS": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    common |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    messages = [open(tmp_path / f"{rank}.said", "w+") for rank in range(2)]  # noqa: SIM115  the processes write into them
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=messages[rank],
            stderr=messages[rank],
        )
        for rank in range(2)
    ]
    try:
        Kills._wait(
            lambda: (folder / "last.ckpt").exists() or any(p.poll() is not None for p in ranks),
            LIMIT_SECONDS,
        )
        time.sleep(random.uniform(0.0, 0.3))
        ranks[victim].kill()
        killed = time.monotonic()
        assert ranks[1 - victim].wait(SURVIVOR_SECONDS) == 1
        print(f"ended in {time.monotonic() - killed:.2f} s")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    messages[1 - victim].seek(0)
    text = messages[1 - victim].read()
    print(text[-2000:])
    assert "Error" in text
    assert "terminate called" not in text
    assert _step_of(folder / "last.ckpt") >= 1


# --------------------------------------------------------------------------------- a process dies
# at every line of ours


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


def _without_exchange() -> None:
    atomic_folder.ctypes.CDLL = lambda *_, **__: object()


def _die_everywhere(scratch: str, has_old: bool, exchange: bool) -> dict[str, int]:
    """Write step 2 over step 1, or first, dying at one line after the other. Returns how often what
    was found."""
    if not exchange:
        _without_exchange()
    template, actual = (
        Path(scratch) / "template",
        {"lines": 0, "old": 0, "new": 0, "none": 0, "hidden": 0},
    )
    template.mkdir()
    if has_old:
        _write(template / "last.ckpt", 1)
    for line in itertools.count(1):
        folder = Path(scratch) / str(line)
        shutil.copytree(template, folder)
        path = folder / "last.ckpt"
        code = _dies_at(line, lambda path=path: _write(path, 2))
        assert code in (0, 9), code
        at_once = _written(path) if path.exists() else 0
        actual["hidden"] += bool(_hidden(folder))
        for new in folder.glob(f"{NEW}*"):
            os.utime(new, (0, 0))  # long ago
        clean_up(folder)
        assert not _hidden(folder), line
        final = _written(path) if path.exists() else 0
        assert final in ((1, 2) if has_old else (0, 2)), (line, at_once, final)
        assert final >= at_once, (line, at_once, final)
        assert at_once or not has_old or not exchange, f"nothing under the name after line {line}"
        actual[{0: "none", 1: "old", 2: "new"}[at_once]] += 1
        shutil.rmtree(folder)
        if code == 0:
            assert final == 2
            actual["lines"] = line
            return actual
    raise AssertionError


@pytest.mark.parametrize(
    ("has_old", "exchange"),
    slow_except([(True, True)], [(True, True), (True, False), (False, True)]),
    ids=["over another", "over another, by two renames", "the first"],
)
def test_a_writer_that_dies_at_any_line_leaves_the_old_or_the_new_one(
    scratch: Path, has_old: bool, exchange: bool
) -> None:
    actual = run_on_ranks(_die_everywhere, 1, str(scratch), has_old, exchange)[0]
    print(actual)
    assert actual["lines"] > 50, "the checker saw too few lines to mean anything"
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
    assert run_on_ranks(_remove_everywhere, 1, str(scratch))[0] > 3


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
    assert run_on_ranks(_cleaned_everywhere, 1, str(scratch))[0] == {}


def _die_between_the_renames(folder: str) -> None:
    _without_exchange()
    path = Path(folder) / "last.ckpt"
    _write(path, 1)
    if not (pid := os.fork()):
        rename, renamed = os.rename, []

        def dying(*names: Any) -> None:
            rename(*names)
            renamed.append(names)
            if str(names[0]) == str(path):
                os._exit(9)

        os.rename = dying
        _write(path, 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not path.exists()
    assert [is_checkpoint(hidden) for hidden in _hidden(path.parent)] == [True, True]


def test_a_checkpoint_that_lost_its_name_between_two_renames_gets_it_back(tmp_path: Path) -> None:
    run_on_ranks(_die_between_the_renames, 1, str(tmp_path))
    clean_up(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert _written(tmp_path / "last.ckpt") in (1, 2)


# ------------------------------------------------------------------------------------------- and
# when the power goes


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


if __name__ == "__main__":
    _train(sys.argv[1], sys.argv[2] == "1", sys.argv[3] == "1")
