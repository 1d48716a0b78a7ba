"""A rank's random generators: their states in checkpoints, and what hooks draw before a resumed run trains."""

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_distrec._compat.lightning_data import reload_epochs, set_reload_epochs, watch_dataloader_hooks
from lightning_distrec._compat.patches import Patches


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


def check_generator_states(states: Mapping[str, Any]) -> None:
    """Raise what `set_generator_states` would raise."""
    states_before = generator_states()
    set_generator_states(states)
    set_generator_states(states_before)


def fingerprint() -> str:
    """Return a short text that differs where states of the host's generators do."""
    states: Any = numpy.random.get_state(legacy=True)
    content = torch.get_rng_state().numpy().tobytes(), random.getstate(), states[1].tobytes(), states[2:]
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


class HookDraws:
    """What hooks of the user draw before training: in a resumed run they draw as they did in the first one.

    `train_dataloader` and `val_dataloader` begin with the generators that they began with when they made the loaders
    that the checkpoint is of. What is drawn before the checkpoint is loaded begins from the seed in both runs.
    """

    def __init__(self, environment: str = "", setup: str = "") -> None:
        """environment, setup: fingerprints when the ranks had met, and after the last `setup` hook."""
        self._environment, self._has_drawn = environment, environment != setup
        self._calls: dict[str, Any] = {}
        self._starts: dict[str, Any] = {}
        """States before the last call of each hook, and after the one before training."""
        self._saved: dict[str, Any] | None = None
        self._reload_epochs: Any = None
        self._has_begun = False

    def state(self, trainer: Trainer) -> dict[str, Any]:
        """Return what a checkpoint holds of this rank's."""
        calls, starts = dict(self._calls), dict(self._starts)
        return {"environment": self._environment, "calls": calls, "starts": starts, "reloads": reload_epochs(trainer)}

    def restore(self, state: Mapping[str, Any], is_same_number: bool) -> None:
        """Let hooks that are still to be called draw as before. is_same_number: of ranks; if not, they use the seed."""
        self._reload_epochs = state["reloads"]
        if is_same_number:
            self._saved, self._starts = dict(state["calls"]), dict(state["starts"])
            for states in (*self._saved.values(), *self._starts.values()):
                check_generator_states(states)
        if self._has_drawn and state["environment"] != self._environment:
            rank_zero_warn(
                "prepare_data or setup drew random numbers, and the generators began with another seed than in the run "
                "that is resumed: a random_split, for one, has other parts now, and positions in the epoch point into "
                "them. Call lightning.seed_everything(N) before the Trainer is made, with the same N in both runs."
            )

    def watch(self, trainer: Trainer) -> Patches:
        """Watch the trainer's hooks until the returned patches are undone."""
        return watch_dataloader_hooks(trainer, lambda hook: self._around(trainer, hook))

    @contextmanager
    def _around(self, trainer: Trainer, hook: str) -> Iterator[None]:
        states_before, earlier, is_resumed = generator_states(), fingerprint(), self._saved is not None
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
            # The sanity check undoes what is drawn in it, and loaders may have been made again, or for the first time,
            # in a later epoch: hooks that come next draw as if this one had been called where the first run called it.
            set_generator_states(states_before if self._has_begun else self._starts.get(hook, states_before))
            if self._has_begun:
                set_reload_epochs(trainer, [None, self._reload_epochs[1]])
        elif is_resumed and not self._has_begun and fingerprint() != earlier:
            rank_zero_warn(
                f"{hook} draws random numbers, and the run that is resumed had not called it yet: it would have drawn "
                "others. Draw in setup, or from a torch.Generator of its own with a seed."
            )

    def _is_due(self, trainer: Trainer) -> bool:
        interval: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        last = self._reload_epochs[1]
        return bool(interval) and trainer.current_epoch - last >= interval

    def begin(self, trainer: Trainer) -> None:
        """Begin training: what is drawn from now on is the run's."""
        self._has_begun = True
        if self._reload_epochs is not None:
            set_reload_epochs(trainer, self._reload_epochs)
