"""Where a run continues, in the middle of an epoch too: loaders' positions, random generators, Lightning's counters."""

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_distrec._compat.lightning_checkpoints import update_plateaus_of_this_epoch
from lightning_distrec.checkpoint.load import Loaded
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.prefetch.position import PositionedLoader, adapt_progress, merge_states, resumable


def generator_states() -> dict[str, Any]:
    """Return the states, as plain types and tensors."""
    _, keys, *position = numpy.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        # A tensor, since torch.load(weights_only=True) refuses arrays; int64, since torch's uint32 is limited.
        "numpy": (torch.from_numpy(numpy.asarray(keys, dtype="int64")), *position),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Set the generators to states that `generator_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    keys, *position = states["numpy"]
    numpy.random.set_state(("MT19937", keys.numpy().astype("uint32"), *position))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def update_in_resumed_epoch(trainer: Trainer) -> None:
    """Let schedulers be updated at the end of a resumed epoch too, if a validation in it has given their metrics."""
    if trainer.state.fn != TrainerFn.FITTING or not trainer.fit_loop.restarting:
        return
    monitors = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if monitors and all(monitor in trainer.callback_metrics for monitor in monitors):
        update_plateaus_of_this_epoch(trainer)


COUNTERS = ("ready", "started", "processed", "completed")
POSITIONS = "distrec_positions"
"""Key of the loaders' positions in the fit loop's state. Stock Lightning, which could not use them, ignores it."""


class RankState(Protocol):
    """Something of which each rank has its own state."""

    def state(self) -> dict[str, Any]:
        """Return this rank's."""

    def restore(self, rank_state: Mapping[str, Any] | None, rank_0_state: Mapping[str, Any] | None) -> None:
        """Set it; None: of another number of ranks, or not in the checkpoint."""


class Positions:
    """The positions of one fit: what checkpoints get of them, and what they are set to on resuming."""

    def __init__(self, ranks: Consensus) -> None:
        self._ranks = ranks
        self.data_ranks = ranks.rank, ranks.num_ranks
        """This rank's number among those that share out the samples, and how many these are."""
        self._loaders: list[Any] = []
        self._rank_states: dict[str, RankState] = {}
        self._generators: Mapping[str, Any] | None = None
        """The state of the random generators in the checkpoint that the run resumes from."""
        self._begins_at_an_end = False
        """Whether that checkpoint was saved after the last batch of an epoch and before its end."""

    def keep(self, loader: Any) -> Any:
        """Return the training loader, with a position that checkpoints hold if it can have one."""
        positioned = resumable(loader, *self.data_ranks, rank_zero_warn)
        self._loaders.append(positioned)
        return positioned

    def keep_rank_state(self, name: str, holder: "RankState") -> None:
        """Save what each rank has of its own under this name."""
        self._rank_states[name] = holder

    def extract_rank_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Collective. Return what this rank alone saves; positions for any number of ranks stay in the checkpoint."""
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        # Taken out: the state that is written is rank 0's, and each rank's loaders are elsewhere.
        loader_states: list[Any] = state.pop("combined_loader", [])
        # Every rank gathers, though only rank 0 writes them.
        if shared := merge_states(self._ranks.all_gather(loader_states)):
            state[POSITIONS] = shared
        states = {name: holder.state() for name, holder in self._rank_states.items()}
        return {"loaders": loader_states, "generators": generator_states(), **states}

    def add_loader_states(self, checkpoint: dict[str, Any], rank_state: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint for stock Lightning, which takes rank 0's loaders' states where there is no position."""
        fit_loop = checkpoint["loops"]["fit_loop"]
        state = fit_loop["state_dict"]
        if not rank_state["loaders"] or POSITIONS in state:
            return checkpoint
        state = {**state, "combined_loader": rank_state["loaders"]}
        return {**checkpoint, "loops": {**checkpoint["loops"], "fit_loop": {**fit_loop, "state_dict": state}}}

    def restore(self, loaded: Loaded) -> None:
        """Set loaders, random generators and counters to where the checkpoint was saved."""
        fit_loop = loaded.checkpoint["loops"]["fit_loop"]
        # Lightning loads "combined_loader"; what this rank alone has saved, below, goes before the shared positions.
        if shared := fit_loop["state_dict"].pop(POSITIONS, []):
            fit_loop["state_dict"]["combined_loader"] = shared
        if loaded.rank_state is not None:
            fit_loop["state_dict"]["combined_loader"] = loaded.rank_state["loaders"]
            set_generator_states(loaded.rank_state["generators"])
            self._generators = loaded.rank_state["generators"]
        elif loaded.rank_0_state is not None and loaded.marker is not None:
            rank_zero_info(
                f"The checkpoint was written by {loaded.marker.get('num_ranks')} ranks, and there are "
                f"{self._ranks.num_ranks}: random generators are not restored, and start from the seed."
            )
            if loaded.rank_0_state["loaders"] and not fit_loop["state_dict"].get("combined_loader"):
                rank_zero_warn(
                    "the dataloaders' states in the checkpoint are of another number of ranks: its epoch starts again."
                )
        for name, holder in self._rank_states.items():
            holder.restore((loaded.rank_state or {}).get(name), (loaded.rank_0_state or {}).get(name))
        # After the loaders' states have their place in fit_loop, for it compares counts with them.
        adapt_progress(fit_loop, self.data_ranks[1])
        epochs = fit_loop["epoch_progress"]["current"]
        is_last = fit_loop["epoch_loop.batch_progress"]["is_last_batch"]
        self._begins_at_an_end = bool(is_last and epochs["completed"] < epochs["ready"])

    def on_train_start(self, trainer: Trainer) -> None:
        """Restore the random generators again, and set Lightning's count of batches to the loaders' positions."""
        self._count_batches(trainer)
        # Starting the loaders has drawn random numbers since; these belong to the run only if an epoch starts. Loaders
        # with positions draw none before their first batch.
        are_positioned = all(isinstance(loader, PositionedLoader) for loader in self._loaders)
        if self._generators is not None and (are_positioned or trainer.fit_loop.restarted_mid_epoch):
            set_generator_states(self._generators)
        self._generators = None
        if self._begins_at_an_end:
            self._begins_at_an_end = False
            for config in trainer.lr_scheduler_configs:
                if config.reduce_on_plateau and config.interval == "epoch":
                    rank_zero_warn(
                        f"ReduceLROnPlateau(monitor={config.monitor!r}) misses one epoch: the checkpoint was saved at "
                        "the end of one, before Lightning updated the scheduler. Resume from one of the middle of an "
                        "epoch (ModelCheckpoint(every_n_train_steps=N)) to update it in each."
                    )

    def _count_batches(self, trainer: Trainer) -> None:
        """Let Lightning count the batches before the loaders' positions: with another batch size its own differs."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        loaders = [loader for loader in self._loaders if isinstance(loader, PositionedLoader)]
        if not loaders or progress.is_last_batch or not trainer.fit_loop.restarting:
            return
        behind = int(max(loaders, key=len).state["batches"]) - progress.current.ready
        for counter in COUNTERS:
            setattr(progress.current, counter, getattr(progress.current, counter) + behind)
