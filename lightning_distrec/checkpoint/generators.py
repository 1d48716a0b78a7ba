"""The random generators of this process: torch's, the current GPU's, Python's and numpy's."""

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
