"""Runs of a watched model at several depths of prefetching, and their comparison with depth 1."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from tests.support.prefetched_model import Diarist, Watched, Written
from tests.support.trainers import make_trainer


@dataclass
class Seen:
    """What one rank saw of one run."""

    diary: list[Any] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    logged: list[Any] = field(default_factory=list)
    raised: str = ""
    returned: Any = None
    ahead: dict[str, int] = field(default_factory=dict)
    """Kind of step -> lookups whose ids had travelled before the step; not the same at every
    depth."""

    def of(self, event: str) -> list[Any]:
        """Return the lines of the diary about this."""
        return [line[1:] for line in self.diary if line[0] == event]

    @property
    def trained(self) -> list[Any]:
        """The names of the batches that were trained on."""
        return [names for names, *_ in self.of("training")]


def trainer_at(depth: int, strategy: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    """Return a trainer that keeps a diary."""
    callbacks = [Diarist(), *options.pop("callbacks", [])]
    strategy_options = {"convert_embeddings": "all", "prefetch": {"depth": depth}} | (
        strategy or {}
    )
    return make_trainer(
        strategy_options,
        **{"logger": Written(), "log_every_n_steps": 1} | options,
        callbacks=callbacks,
    )


def seen_by(
    depth: int,
    act: Callable[[pl.Trainer, Any], Any],
    model: Callable[[], Any] = Watched,
    strategy: dict[str, Any] | None = None,
    catch: tuple[type[BaseException], ...] = (),
    **options: Any,
) -> Seen:
    """Return what this rank sees while `act(trainer, model)` runs. catch: exceptions that become
    part of it."""
    module, trainer = model(), trainer_at(depth, strategy, **options)
    seen = Seen()
    try:
        seen.returned = act(trainer, module)
    except catch as error:
        seen.raised = f"{type(error).__name__}: {error}"
    seen.diary, seen.state, seen.ahead = module.diary, module.final_state, module.ahead
    seen.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    seen.logged = trainer.logger.lines if isinstance(trainer.logger, Written) else []
    return seen


def differences(actual: Seen, expected: Seen) -> str:
    """Return where two runs differ in anything but what travelled ahead, "" where they do not."""
    problems = []
    for line, (entry, other) in enumerate(zip(actual.diary, expected.diary, strict=False)):
        if not same(entry, other):
            problems.append(f"line {line} of the diary is {entry}, not {other}")
            break
    if len(actual.diary) != len(expected.diary):
        problems.append(f"the diary has {len(actual.diary)} lines, not {len(expected.diary)}")
    for name in ("state", "metrics", "logged", "raised", "returned"):
        if not same(getattr(actual, name), getattr(expected, name)):
            problems.append(
                f"{name}: {getattr(actual, name)!r} is not {getattr(expected, name)!r}"[:2000]
            )
    return "\n".join(problems)


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal to the last bit, tensors within them too; a NaN equals a NaN."""
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        return value.shape == other.shape and torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other) or (value != value and other != other)
