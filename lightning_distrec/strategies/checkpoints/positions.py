"""Where a run continues, in the middle of an epoch too: loaders' positions, random generators,
Lightning's counters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_distrec._compat.lightning_checkpoints import (
    num_batches_stepped,
    update_plateaus_of_this_epoch,
)
from lightning_distrec._compat.lightning_data import (
    current_loader_states,
    reload_epochs,
    set_reload_epochs,
    watch_dataloader_hooks,
)
from lightning_distrec._compat.patches import Patches
from lightning_distrec.checkpoint.load import Loaded
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.prefetch.even_batches import EvenLoader
from lightning_distrec.prefetch.loaders import (
    LateLoader,
    describe_loader,
    end_epoch,
    has_position,
    is_stateful,
    loses_order,
)
from lightning_distrec.prefetch.position import (
    PositionedLoader,
    adapt_progress,
    merge_states,
    resumable,
)
from lightning_distrec.strategies.checkpoints.loader_epochs import LoaderEpochs
from lightning_distrec.strategies.checkpoints.random_numbers import (
    check_generator_states,
    fingerprint,
    generator_states,
    set_generator_states,
)


class HookDraws:
    """What hooks of the user draw before training: in a resumed run they draw as they did in the
    first one.

    `train_dataloader` and `val_dataloader` begin with the generators that they began with when they
    made the loaders that the checkpoint is of. What is drawn before the checkpoint is loaded begins
    from the seed in both runs.
    """

    def __init__(self, environment: str = "", setup: str = "") -> None:
        """environment, setup: fingerprints when the ranks had met, and after the last `setup`
        hook."""
        self._environment = environment
        self._has_drawn = environment != setup
        self._calls: dict[str, Any] = {}
        self._starts: dict[str, Any] = {}
        """States before the last call of each hook, and after the one before training, and after
        the first batch."""
        self._saved: dict[str, Any] | None = None
        self._reload_epochs: Any = None
        self._has_begun = False

    def state(self, trainer: Trainer) -> dict[str, Any]:
        """Return what a checkpoint holds of this rank's."""
        calls = dict(self._calls)
        starts = dict(self._starts)
        return {
            "environment": self._environment,
            "calls": calls,
            "starts": starts,
            "reloads": reload_epochs(trainer),
        }

    def restore(self, state: Mapping[str, Any], is_same_number: bool) -> None:
        """Let hooks that are still to be called draw as before. is_same_number: of ranks; if not,
        they use the seed."""
        self._reload_epochs = state["reloads"]
        if is_same_number:
            self._saved = dict(state["calls"])
            self._starts = dict(state["starts"])
            for states in (*self._saved.values(), *self._starts.values()):
                check_generator_states(states)
        if self._has_drawn and state["environment"] != self._environment:
            rank_zero_warn(
                "prepare_data or setup drew random numbers, and the generators began with another "
                "seed than in the run that is resumed: a random_split, for one, has other parts "
                "now, and positions in the epoch point into them. Call "
                "lightning.seed_everything(N) before the Trainer is made, with the same N in both "
                "runs."
            )

    def watch(self, trainer: Trainer) -> Patches:
        """Watch the trainer's hooks until the returned patches are undone."""
        return watch_dataloader_hooks(trainer, lambda hook: self._around(trainer, hook))

    @contextmanager
    def _around(self, trainer: Trainer, hook: str) -> Iterator[None]:
        states_before = generator_states()
        earlier = fingerprint()
        is_resumed = self._saved is not None
        saved = (self._saved or {}).pop(hook, None)
        if saved is not None and self._has_begun and self._is_due(trainer):
            saved = None  # the run that never stopped makes new loaders here, too
        if saved is not None:
            set_generator_states(saved)
        self._calls[hook] = saved or states_before
        yield
        if not (self._has_begun or trainer.sanity_checking or is_resumed):
            self._starts[hook] = generator_states()
        if saved is not None:
            # The sanity check undoes what is drawn in it, and loaders may have been made again, or
            # for the first time, in a later epoch: hooks that come next draw as if this one had
            # been called where the first run called it.
            if self._has_begun:
                set_generator_states(states_before)
                set_reload_epochs(trainer, [None, self._reload_epochs[1]])
            else:
                set_generator_states(self._starts.get(hook, states_before))
        elif is_resumed and not self._has_begun and fingerprint() != earlier:
            rank_zero_warn(
                f"{hook} draws random numbers, and the run that is resumed had not called it yet: "
                "it would have drawn others. Draw in setup, or from a torch.Generator of its own "
                "with a seed."
            )

    def note_first_batch(self) -> None:
        """Note the states after a batch is drawn ahead of on_train_start; a resumed run sets them
        as if it were."""
        if self._has_begun:
            return
        if self._saved is None:
            self._starts[FIRST_BATCH] = generator_states()
        elif FIRST_BATCH in self._starts:
            set_generator_states(self._starts[FIRST_BATCH])

    def _is_due(self, trainer: Trainer) -> bool:
        interval: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        last = self._reload_epochs[1]
        return bool(interval) and trainer.current_epoch - last >= interval

    def begin(self, trainer: Trainer) -> None:
        """Begin training: what is drawn from now on is the run's."""
        self._has_begun = True
        if self._reload_epochs is not None:
            set_reload_epochs(trainer, self._reload_epochs)


def update_in_resumed_epoch(trainer: Trainer) -> None:
    """Let schedulers be updated at the end of a resumed epoch too, if a validation in it has given
    their metrics."""
    if trainer.state.fn != TrainerFn.FITTING or not trainer.fit_loop.restarting:
        return
    monitors = []
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            monitors.append(config.monitor)
    if monitors and all(monitor in trainer.callback_metrics for monitor in monitors):
        update_plateaus_of_this_epoch(trainer)


FIRST_BATCH = "first batch"
COUNTERS = ("ready", "started", "processed", "completed")
POSITIONS = "distrec_positions"
"""Key of the loaders' positions in the fit loop's state. Stock Lightning, which could not use them,
ignores it."""
NUM_STEPPED = "distrec_num_batches_stepped"
"""Key, there too, of the step that loggers get for the next batch."""


class RankState(Protocol):
    """Something of which each rank has its own state."""

    def state(self) -> dict[str, Any]:
        """Return this rank's."""

    def restore(
        self, rank_state: Mapping[str, Any] | None, rank_0_state: Mapping[str, Any] | None
    ) -> None:
        """Set it; None: of another number of ranks, or not in the checkpoint."""


class Positions:
    """The positions of one fit: what checkpoints get of them, and what they are set to on
    resuming."""

    def __init__(self, ranks: Consensus, draws: HookDraws | None = None) -> None:
        self._ranks = ranks
        self.draws = draws or HookDraws()
        self.data_ranks = ranks.rank, ranks.num_ranks
        """This rank's number among those that share out the samples, and how many these are."""
        self._loaders: list[Any] = []
        self._rank_states: dict[str, RankState] = {}
        self._generators: Mapping[str, Any] | None = None
        """The state of the random generators in the checkpoint that the run resumes from."""
        self.num_stepped: int | None = None
        """The step that loggers get for the first batch of a run that resumes, until its training
        begins."""
        self._is_resumed = False
        """Whether the run resumes, and its training has not begun."""
        self._begins_at_an_end = False
        """Whether that checkpoint was saved after the last batch of an epoch and before its end."""
        self._begins_in_an_epoch = False
        """Whether it was saved in the middle of one."""
        self._loader_states: list[Any] = []
        """In it, of those loaders that have states."""
        self._epoch_draws: list[Any] = []
        """In it, of each of them, `LoaderEpochs.draws`."""
        self._last: dict[str, Any] | None = None
        """What this rank saves once the fit is over; None before."""

    def keep(self, loader: Any) -> Any:
        """Return the training loader, with a position that checkpoints hold if it can have one."""
        positioned = resumable(loader, *self.data_ranks, rank_zero_warn)
        # Other loaders draw seeds when they begin, which belong to the run: with the first batch,
        # once they are set.
        if not isinstance(positioned, (PositionedLoader, EvenLoader)):
            positioned = LateLoader(loader)
        if is_stateful(positioned) and not isinstance(positioned, PositionedLoader):
            vars(positioned)["epochs"] = self._epochs_of(vars(positioned)["_loader"])
        self._loaders.append(positioned)
        return positioned

    def _epochs_of(self, loader: Any) -> LoaderEpochs:
        """Return the epochs of the next stateful loader, before its state is loaded."""
        epochs = LoaderEpochs(loader)
        number = len(self._stateful())
        if self._is_resumed and number < len(self._loader_states):
            draws = None
            if self._begins_in_an_epoch:
                draws = self._epoch_draws[number] if self._epoch_draws else generator_states()
            epochs.resume(self._loader_states[number], draws)
        return epochs

    def _stateful(self) -> list[Any]:
        return [loader for loader in self._loaders if is_stateful(loader)]

    def keep_rank_state(self, name: str, holder: "RankState") -> None:
        """Save what each rank has of its own under this name."""
        self._rank_states[name] = holder

    def extract_rank_state(self, checkpoint: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
        """Collective. Return what this rank alone saves; positions for any number of ranks stay in
        the checkpoint."""
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        # Taken out: the state that is written is rank 0's, and each rank's loaders are elsewhere.
        loader_states: list[Any] = state.pop("combined_loader", [])
        state[NUM_STEPPED] = self.num_stepped
        if self.num_stepped is None:
            state[NUM_STEPPED] = num_batches_stepped(trainer)
        # After the fit batches in flight are gone, and the user's code may have drawn random
        # numbers.
        last = self._last or self._now(trainer, loader_states)
        loader_states = last["loaders"]
        # Every rank gathers, though only rank 0 writes them.
        shared = merge_states(self._ranks.all_gather(loader_states))
        if shared:
            state[POSITIONS] = shared
        return last

    def _now(self, trainer: Trainer, loader_states: list[Any]) -> dict[str, Any]:
        draws = []
        # Loaders that were made again come last.
        for loader in self._stateful()[-len(loader_states) :]:
            epochs = vars(loader).get("epochs")
            draws.append(epochs and epochs.draws)
        rank_state = {
            "loaders": loader_states,
            "generators": self._generators or generator_states(),
            "hooks": self.draws.state(trainer),
            "epoch_draws": draws,
        }
        for name, holder in self._rank_states.items():
            rank_state[name] = holder.state()
        return rank_state

    def end(self, trainer: Trainer) -> None:
        """End the fit: checkpoints that are saved later hold what is the position now."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._last = self._now(trainer, current_loader_states(trainer))

    def add_loader_states(
        self, checkpoint: dict[str, Any], rank_state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a checkpoint for stock Lightning, which takes rank 0's loaders' states where there
        is no position."""
        fit_loop = checkpoint["loops"]["fit_loop"]
        state = fit_loop["state_dict"]
        if not rank_state["loaders"] or POSITIONS in state:
            return checkpoint
        state = {**state, "combined_loader": rank_state["loaders"]}
        loops = {**checkpoint["loops"], "fit_loop": {**fit_loop, "state_dict": state}}
        return {**checkpoint, "loops": loops}

    def restore(self, loaded: Loaded, num_accumulated: int = 1) -> None:
        """Let the run continue where the checkpoint was saved. num_accumulated: batches to an
        optimizer step."""
        fit_loop = loaded.checkpoint["loops"]["fit_loop"]
        self._is_resumed = True
        self.num_stepped = fit_loop["state_dict"].pop(NUM_STEPPED, None)
        # Lightning loads "combined_loader"; what this rank alone has saved, below, goes before the
        # shared positions.
        shared = fit_loop["state_dict"].pop(POSITIONS, [])
        if shared:
            fit_loop["state_dict"]["combined_loader"] = shared
        if loaded.rank_state is not None:
            fit_loop["state_dict"]["combined_loader"] = loaded.rank_state["loaders"]
            self._generators = loaded.rank_state["generators"]
            check_generator_states(loaded.rank_state["generators"])
        elif loaded.rank_0_state is not None and loaded.marker is not None:
            rank_zero_info(
                f"The checkpoint was written by {loaded.marker.get('num_ranks')} ranks, and there "
                f"are {self._ranks.num_ranks}: random generators are not restored, and start from "
                "the seed."
            )
        rank_0_state = loaded.rank_0_state or {}
        rank_state = loaded.rank_state or {}
        hooks = (rank_state or rank_0_state).get("hooks")
        if hooks:
            self.draws.restore(hooks, is_same_number=loaded.rank_state is not None)
        for name, holder in self._rank_states.items():
            holder.restore(rank_state.get(name), rank_0_state.get(name))
        # After the loaders' states have their place in fit_loop, for it compares counts with them.
        adapt_progress(fit_loop, self.data_ranks[1], num_accumulated)
        epochs = fit_loop["epoch_progress"]["current"]
        batches = fit_loop["epoch_loop.batch_progress"]
        is_last = bool(batches["is_last_batch"])
        is_unfinished = epochs["completed"] < epochs["ready"]
        self._begins_at_an_end = is_last and is_unfinished
        self._begins_in_an_epoch = not is_last and is_unfinished and batches["current"]["ready"] > 0
        self._loader_states = list(fit_loop["state_dict"].get("combined_loader", []))
        self._epoch_draws = rank_state.get("epoch_draws", [])

    def begins_late(self) -> bool:
        """Return whether nothing is drawn before `on_train_start`: only loaders of a position are
        where they go on."""
        if not self._is_resumed:
            return False
        return not (self._begins_in_an_epoch and any(map(is_stateful, self._loaders)))

    def on_train_start(self, trainer: Trainer) -> None:
        """Set the random generators, after all hooks, and Lightning's count of batches to the
        loaders' positions."""
        self._count_batches(trainer)
        for loader, state in zip(self._stateful(), self._loader_states, strict=False):
            self._continue_order(loader, state)
        self._loader_states = []
        if self._generators is not None:
            set_generator_states(self._generators)
        self._generators = None
        self._is_resumed = False
        self.num_stepped = None
        self.draws.begin(trainer)
        if self._begins_at_an_end:
            self._begins_at_an_end = False
            for config in trainer.lr_scheduler_configs:
                if config.reduce_on_plateau and config.interval == "epoch":
                    rank_zero_warn(
                        f"ReduceLROnPlateau(monitor={config.monitor!r}) misses one epoch: the "
                        "checkpoint was saved at the end of one, before Lightning updated the "
                        "scheduler. Resume from one of the middle of an epoch "
                        "(ModelCheckpoint(every_n_train_steps=N)) to update it in each."
                    )

    def _continue_order(self, loader: Any, state: Any) -> None:
        """Let a loader continue with what only its state in the checkpoint has, or warn that it is
        not there."""
        if isinstance(loader, PositionedLoader):
            loader.continue_generators(state)
            return
        if not self._begins_in_an_epoch:  # Lightning loads no states between epochs
            end_epoch(loader, state)
        if loses_order(loader):
            rank_zero_warn(
                f"{describe_loader(loader)} continues in another order than in the run that is "
                "resumed: Lightning has wrapped its sampler in a DistributedSamplerWrapper, which "
                "has no state. Give the loader torchdata's StatefulDistributedSampler, or a "
                "dataset without a state of its own."
            )

    def _count_batches(self, trainer: Trainer) -> None:
        """Let Lightning count the batches before the loaders' positions: with another batch size
        its own differs."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if not trainer.fit_loop.restarting:
            return
        restarted = self._warn_of_restarts() if self._begins_in_an_epoch else []
        positioned = [loader for loader in self._loaders if has_position(loader)]
        behind = 0
        if progress.is_last_batch:
            # Without a length Lightning does not see that the next epoch begins, and counts on.
            is_endless = trainer.num_training_batches == float("inf")
            behind = -progress.current.ready if is_endless else 0
        elif positioned:
            behind = int(max(positioned, key=len).state["batches"]) - progress.current.ready
        elif restarted:
            behind = -progress.current.ready
        for counter in COUNTERS:
            setattr(progress.current, counter, getattr(progress.current, counter) + behind)

    def _warn_of_restarts(self) -> list[Any]:
        """Warn of the loaders that cannot continue in the middle of the epoch, and return them."""
        restarted = []
        for loader in self._loaders:
            if not (self._loader_states and is_stateful(loader)):
                restarted.append(loader)
        names = ", ".join(dict.fromkeys(map(describe_loader, restarted)))
        if restarted:
            rank_zero_warn(
                f"resuming in the middle of an epoch: the checkpoint holds no position of {names}, "
                "which this rank can continue from. So this epoch starts again, with samples that "
                "were trained. Resume from the end of an epoch, on as many ranks, or use a "
                "map-style dataset, or a loader with state_dict and load_state_dict (torchdata's "
                "StatefulDataLoader)."
            )
        return restarted
