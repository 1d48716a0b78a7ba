"""Private names of lightning: the launchers that fork ranks, and that start their processes."""

import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher,
    _WorkerOutput,
)
from lightning.pytorch.trainer.call import _call_and_handle_interrupt, _call_callbacks_state_dict
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

INTERRUPTED_SECONDS = 2.0
END_SECONDS = 30.0
FAILURE = "failure.pickle"
RESULTS = "results.pt"

check_cuda_before_fork = _check_bad_cuda_fork
"""Raises RuntimeError: CUDA has begun in this process, and a forked one could not use it."""


@contextmanager
def ranks_started_by(start: Callable[..., Any]) -> Iterator[None]:
    """Let Lightning's launcher start other ranks by `start(command, env=..., cwd=...)`, which
    returns what `subprocess.Popen` does."""
    earlier = subprocess_script.subprocess
    subprocess_script.subprocess = SimpleNamespace(Popen=start)  # type: ignore[assignment]
    try:
        yield
    finally:
        subprocess_script.subprocess = earlier


class ForkLauncher(_MultiProcessingLauncher):
    """Forks all ranks from this process, which waits for them and takes over what rank 0 has
    trained.

    Upstream's (`ddp_notebook`) takes over `state_dict()`, which is one shard here, and the path of
    one checkpoint; what it raises is the text of the rank that ends first; it calls `on_exception`
    in this process only, where nothing is trained; results of more than a pipe's 64 KiB hang it.
    Ours go through files of a folder that is removed at the end.
    Source: lightning/pytorch/strategies/launchers/multiprocessing.py,
    torch/multiprocessing/spawn.py.

    start_rank: called on each rank first. full_state: collective; returns the module's full state
    on rank 0.
    end_rank: called on each rank last.
    """

    is_rank = False
    """Whether this process is a rank, and not the one that has forked it."""
    missing_names: tuple[str, ...] = ()
    """Names of trained tensors that the module of this process has not."""

    def __init__(
        self,
        strategy: Any,
        start_rank: Callable[[], None],
        full_state: Callable[[], dict[str, Any]],
        end_rank: Callable[[], None],
    ) -> None:
        super().__init__(strategy, start_method="fork")
        self._start_rank = start_rank
        self._full_state = full_state
        self._end_rank = end_rank
        self._folder = Path()
        self._results = None
        self._put_back: Callable[[], object] = bool

    @property
    def has_trained(self) -> bool:
        """Whether ranks of this launcher have ended a fit."""
        return self._already_fit

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **options: Any
    ) -> Any:
        """Run `function` on each rank; return what it returns on rank 0.

        Raises what the rank that failed first has raised; torch's ProcessException where that is
        not known.
        """
        if self.is_rank:
            return function(*args, **options)
        with tempfile.TemporaryDirectory() as folder:
            self._folder = Path(folder)
            try:
                super().launch(function, *args, trainer=trainer, **options)
            except BaseException as failure:
                file = self._folder / FAILURE
                # Their on_exception was called on the ranks; a callback that saves would save here
                # what is not trained.
                self._put_back = partial(setattr, trainer, "callbacks", trainer.callbacks)
                trainer.callbacks = []
                if isinstance(failure, KeyboardInterrupt):
                    self._end_ranks()
                elif file.exists():
                    raise pickle.loads(file.read_bytes()) from failure
                raise
        results = self._results
        self._results = None
        return results

    def after_failure(self) -> None:
        """Put the trainer's callbacks back, once their `on_exception` would have been called."""
        self._put_back()
        self._put_back = bool

    def _end_ranks(self) -> None:
        """Wait until the ranks have ended; the terminal, or Jupyter, has interrupted them too."""
        earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for send, seconds in (
                (0, INTERRUPTED_SECONDS),
                (signal.SIGINT, END_SECONDS),
                (signal.SIGKILL, END_SECONDS),
            ):
                self.kill(send)
                until = time.monotonic() + seconds
                for process in self.procs:
                    process.join(max(0.0, until - time.monotonic()))
        finally:
            signal.signal(signal.SIGINT, earlier)

    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Any,
        function: Any,
        args: Any,
        kwargs: Any,
        return_queue: Any,
        *_: Any,
    ) -> None:
        # A fork has the launcher of its parent: without this it would signal its siblings, and fork
        # ranks again.
        self.is_rank = True
        self.procs = []

        def run(*args: Any, **options: Any) -> Any:
            self._start_rank()
            return _call_and_handle_interrupt(trainer, function, *args, **options)

        try:
            super()._wrapping_function(process_idx, trainer, run, args, kwargs, return_queue)
        except Exception as failure:
            # another rank was first, or it cannot be pickled: then torch's text is raised
            with suppress(Exception):
                pickled = pickle.dumps(failure)
                pickle.loads(pickled)
                with (self._folder / FAILURE).open("xb") as file:
                    file.write(pickled)
            raise
        finally:
            self._end_rank()

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        is_fit = trainer.state.fn == TrainerFn.FITTING
        state = self._full_state() if is_fit else None
        if not trainer.is_global_zero:
            return None
        progress = trainer.fit_loop.state_dict() if is_fit else None
        content = (
            state,
            _call_callbacks_state_dict(trainer),
            progress,
            results,
            self.get_extra_results(trainer),
        )
        torch.save(content, self._folder / RESULTS)
        return _WorkerOutput(None, None, trainer.state, None, {})

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        # Not only weights: it is this process's own rank that has written them, where no other user
        # can write.
        content = torch.load(self._folder / RESULTS, "cpu", weights_only=False, mmap=True)
        state, callbacks, progress, self._results, extra = content
        if state is not None:
            module = trainer.lightning_module
            is_on_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
            # Not strict: ranks may have added layers in `configure_model`, which is not called
            # here.
            self.missing_names = tuple(
                module.load_state_dict(state, strict=False, assign=is_on_meta).unexpected_keys
            )
            trainer.fit_loop.load_state_dict(progress)
        for callback in trainer.checkpoint_callbacks:
            # else it would restore a part of its state
            if getattr(callback, "dirpath", "") is None:
                callback.dirpath = callbacks.get(callback.state_key, {}).get("dirpath")
        for callback in trainer.callbacks:
            state = callbacks.get(callback.state_key)
            if state:
                _load_callback(callback, state)
        trainer.state = worker_output.trainer_state
        self.update_main_process_results(trainer, extra)

    def kill(self, signum: Any) -> None:
        """Send a signal to the ranks that are alive."""
        if not self.is_rank:
            super().kill(signum)


def _load_callback(callback: Any, state: dict[str, Any]) -> None:
    """Load what a callback has on rank 0, or warn: what was trained must not be lost for it."""
    try:
        callback.load_state_dict(state)
    except Exception as failure:
        rank_zero_warn(
            f"{type(callback).__name__} has not in this process what it has on the ranks: its "
            f"load_state_dict raised {type(failure).__name__}: {failure}. The weights are those "
            "that were trained."
        )
