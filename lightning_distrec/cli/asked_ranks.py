"""How many ranks a command of Lightning's will start, found by a look at its command line and
files. Nothing here loads torch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_distrec.registration import STRATEGIES, short_name

OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE")
"""Where one of them is set, ranks may be started by others."""


def asked_ranks(arguments: Sequence[str]) -> tuple[int, str]:
    """Return the number of ranks on this machine, and the strategy's class, as far as they are
    seen; 1 where they are not, or where others may start ranks.

    What depends on it is time: the command parses its options itself.
    """
    asked: dict[str, Any] = {}
    for name, value in _options(arguments):
        if name in ("-c", "--config"):
            asked |= _trainer_of(value)
        elif name.startswith("--trainer."):
            asked[name.removeprefix("--trainer.")] = value
    strategy = asked.get("strategy")
    if isinstance(strategy, Mapping):
        strategy = strategy.get("class_path")
    name = short_name(str(strategy))
    is_ours = name in STRATEGIES and not any(name in os.environ for name in OF_LAUNCHERS)
    with suppress(TypeError, ValueError):
        if is_ours and int(asked.get("num_nodes", 1)) == 1:
            return int(asked.get("devices", 1)), STRATEGIES[name][0]
    return 1, ""


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for argument, following in pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        if name.startswith("-"):
            yield name, value if equals else following


def _trainer_of(file: str) -> dict[str, Any]:
    import yaml

    with suppress(OSError, ValueError, AttributeError, yaml.YAMLError):
        trainer = yaml.safe_load(Path(file).read_text()).get("trainer")
        if isinstance(trainer, dict):
            return trainer
    return {}
