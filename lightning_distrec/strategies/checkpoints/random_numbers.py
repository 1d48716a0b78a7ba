"""The states of a process's random generators: torch's, numpy's and Python's."""

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch


def generator_states() -> dict[str, Any]:
    """Return the states, as plain types and tensors."""
    _, keys, *position = numpy.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        # A tensor, since torch.load(weights_only=True) refuses arrays; int64, since torch's uint32
        # is limited.
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
    content = (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        states[1].tobytes(),
        states[2:],
    )
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()
