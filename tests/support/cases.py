"""Fits that must give the numbers of one process: rows of data, run by one function, compared by
another.

A file of tests is a list of cases. What is compared with is the same module under a plain Trainer
of one process, so that each hook of the module and each option of the Trainer is its own reference.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from tests.support.click_model import ClickModel, join_batches, make_batch, seeded
from tests.support.embedding_models import whole_state
from tests.support.plain_loop import OPTIMIZERS
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS, make_trainer

REFUSAL_SECONDS = 90
"""How long ranks may take that are to be refused: one that is not waits for the others."""


def click_batch(step: int, rank: int) -> dict[str, Tensor]:
    """Return one rank's batch of one step, for a click model."""
    return make_batch(1000 * step + rank)


def concatenate(batches: list[Any]) -> Any:
    """Return one batch of several that are tensors, or lists or dicts of tensors."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, dict):
        return {name: torch.cat([batch[name] for batch in batches]) for name in first}
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fit. Functions are importable by name, or a `partial` of what is."""

    module: Callable[[], pl.LightningModule]
    """Makes the module; torch's seed is the same for ranks and for one process."""
    plain: Callable[[], pl.LightningModule] | None = None
    """Makes the module of one process, where it is another one."""
    batch: Callable[[int, int], Any] = click_batch
    """Makes the batch of (step, rank)."""
    join: Callable[[list[Any]], Any] | None = None
    """Makes one batch of those of all ranks. None: one process takes the mean of their losses."""
    steps: int = 6
    """Batches of an epoch; 0 for a module that makes its loaders itself."""
    val_steps: int = 0
    """Batches of each validation, those after the last step."""
    num_ranks: int = 2
    fits: int = 1
    """How often the module is fitted, each time by a new Trainer."""
    strategy: Any = field(default_factory=dict)
    """Options of TorchRecShardedStrategy, a function that makes them of a rank, or another
    strategy."""
    trainer: dict[str, Any] | Callable[[], dict[str, Any]] = field(default_factory=dict)
    """Options of both Trainers, or a function that makes what cannot be sent to ranks."""
    limit: float = 1e-6
    """The largest difference of a weight."""
    loss_limit: float | None = 1e-5
    """The same of the mean of the ranks' losses. None: they are not compared."""
    rests: tuple[str, ...] = ()
    """Parts of the names of weights that do not move; all others do."""
    updates: str | dict[str, str] = ""
    """The kind of update of all tables, or table -> kind; "": any."""
    between: Callable[[Any], None] | None = None
    """What is done to the module before each fit after the first."""
    validates_first: bool = False
    """Whether the module is validated, by a Trainer of its own, before it is fitted."""
    predicts: bool = False
    """Whether predictions for the batches are compared too."""
    look: Callable[[pl.Trainer], Any] | None = None
    """Asks the Trainer after the fit, on each rank."""
    same: Callable[[Any], Any] | None = None
    """Returns what the module has kept, numbers or tensors, which is to be the same."""
    told: tuple[str, ...] = ()
    """What rank 0 warns of, logs, prints, or gives as the reason of an update."""


FIELDS = frozenset(Case.__dataclass_fields__)


@dataclass
class Outcome:
    """What became of a case on one rank, or in one process."""

    start: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """What was logged at the end."""
    predictions: list[Tensor] = field(default_factory=list)
    updates: dict[str, str] = field(default_factory=dict)
    """Table -> the kind of its update."""
    seen: Any = None
    """What `look` returned."""
    same: Any = None
    """What `same` returned."""
    started: int = 0
    """Steps that were begun."""
    warnings: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Warnings, logs, reasons of updates, and what was printed, in one line."""


class Several(torch.optim.Optimizer):
    """Several optimizers that one process steps as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.optimizers = optimizers

    def step(self, closure: Any = None) -> Any:
        """Step each."""
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


def case_of(kind: type, /, *args: Any, **values: Any) -> Case:
    """Return a case of a module of this kind. values: fields of Case, and options of the module."""
    of_case = {name: values.pop(name) for name in list(values) if name in FIELDS}
    if issubclass(kind, ClickModel):
        of_case = {"join": join_batches} | of_case
    return Case(module=partial(kind, *args, **values), **of_case)


def click_case(kind: type, optimizer: Any = "SGD", /, **values: Any) -> Case:
    """Return a case of a click model. optimizer: a name in OPTIMIZERS, or a class and options."""
    chosen = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    limit = 1e-6 if chosen[0] is torch.optim.SGD else 1e-5
    return case_of(kind, *chosen, **{"limit": limit} | values)


def for_each(kind: type, optimizers: Iterable[str], /, **values: Any) -> dict[str, Case]:
    """Return a case of a click model for each of these optimizers, under their names."""
    return {name: click_case(kind, name, **values) for name in optimizers}


def check(case: Case) -> list[Outcome]:
    """Run a case and compare it with one process. Returns what each rank has."""
    outcomes = run_case(case)
    assert_same(case, outcomes, run_in_one_process(case))
    for words in case.told:
        assert any(words in line for line in outcomes[0].lines), (words, outcomes[0].lines)
    updates = outcomes[0].updates
    if isinstance(case.updates, dict):
        assert updates == case.updates, updates
    elif case.updates:
        assert set(updates.values()) == {case.updates}, updates
    return outcomes


def check_refused(case: Case, message: str, *, started: int | None = None) -> list[str]:
    """Run a case that each rank ends with an error that has this message in it; returns the errors.

    started: in which step, 0 for before the first one.
    """
    errors = run_on_warm_ranks(_refusal, case.num_ranks, case, timeout_seconds=REFUSAL_SECONDS)
    for error, num_started in errors:
        assert message in error, error
        assert started in (None, num_started), f"in step {num_started}: {error}"
    return [error for error, _ in errors]


def run_case(case: Case) -> list[Outcome]:
    """Return what became of a case on each of its ranks. Raises RankFailed."""
    return run_on_warm_ranks(_fit, case.num_ranks, case)


def run_in_one_process(case: Case) -> Outcome:
    """Return what a plain Trainer makes of a case, with the batches of all ranks in each step."""
    model = seeded(case.plain or case.module)
    ranks, steps = range(case.num_ranks), range(case.steps + case.val_steps)
    batches = [[case.batch(step, rank) for rank in ranks] for step in steps]
    predicted = list(chain.from_iterable(batches[: case.steps]))
    if case.join is None:
        _train_on_mean(model)
        batches = batches[: case.steps] + list(chain.from_iterable(batches[case.steps :]))
    else:
        batches = [case.join(of_ranks) for of_ranks in batches]
    make = partial(pl.Trainer, strategy="auto", devices=1, **DEFAULTS)
    return _run(case, model, batches, predicted, make, Outcome())


def assert_same(case: Case, outcomes: list[Outcome], expected: Outcome) -> None:
    """Compare weights, losses and predictions of all ranks with those of one process."""
    actual = outcomes[0].state
    assert sorted(actual) == sorted(expected.state), (sorted(actual), sorted(expected.state))
    for name, value in expected.state.items():
        assert actual[name].shape == value.shape, name
        torch.testing.assert_close(
            actual[name], value, atol=case.limit, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}"
        )
        if name in expected.start and value.is_floating_point() and value.numel():
            moved = float((value - expected.start[name]).abs().max()) > case.limit
            assert moved != any(part in name for part in case.rests), f"{name} moved: {moved}"
    if case.loss_limit is not None:
        means = torch.tensor([outcome.losses for outcome in outcomes]).mean(0)
        reference = torch.tensor(expected.losses)
        torch.testing.assert_close(
            means, reference, atol=case.loss_limit, rtol=1e-5, equal_nan=True
        )
    if case.same is not None:
        for outcome in outcomes:
            torch.testing.assert_close(outcome.same, expected.same, atol=1e-5, rtol=1e-4)
    for name in [name for name in expected.metrics if name.startswith("val")]:
        metrics = [outcome.metrics[name] for outcome in outcomes]
        assert metrics == pytest.approx([expected.metrics[name]] * len(metrics), abs=1e-5), name
    if case.predicts:
        for rank, outcome in enumerate(outcomes):
            of_rank = expected.predictions[rank :: case.num_ranks]
            torch.testing.assert_close(outcome.predictions, of_rank, atol=1e-5, rtol=1e-4)


class _Watch(pl.Callback, logging.Handler):
    """Keeps losses, how tables are updated, and what is logged."""

    def __init__(self, outcome: Outcome) -> None:
        logging.Handler.__init__(self)
        self.outcome = outcome

    def emit(self, record: logging.LogRecord) -> None:
        self.outcome.lines.append(record.getMessage())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tables = getattr(trainer.strategy, "run_tables", None)
        if tables is None:
            return
        for name, update in tables.updates.items():
            self.outcome.updates[name.split(".")[-1]] = update.kind
            self.outcome.lines.append(f"{update.kind}: {update.reason}")

    def on_train_batch_start(self, *_: Any) -> None:
        self.outcome.started += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        if outputs:
            self.outcome.losses.append(float(outputs["loss"]))


def _fit(case: Case, outcome: Outcome | None = None) -> Outcome:
    """Collective. Run a case on this rank."""
    rank, num_ranks = rank_and_num_ranks()
    batches = [case.batch(step, rank) for step in range(case.steps + case.val_steps)]
    model = seeded(case.module)
    strategy = case.strategy(rank) if callable(case.strategy) else case.strategy
    trainer = partial(make_trainer, strategy)
    if not isinstance(strategy, dict):
        trainer = partial(pl.Trainer, strategy=strategy, devices=num_ranks, **DEFAULTS)
    outcome = _run(case, model, batches, batches[: case.steps], trainer, outcome or Outcome())
    if case.look is not None:
        outcome.seen = case.look(model.trainer)
    return outcome


def _refusal(case: Case) -> tuple[str, int]:
    outcome = Outcome()
    try:
        _fit(case, outcome)
    except Exception as error:
        return f"{type(error).__name__}: {error}", outcome.started
    return "nothing was raised", outcome.started


def _run(
    case: Case,
    model: Any,
    batches: list[Any],
    predicted: list[Any],
    make: Callable[..., Any],
    outcome: Outcome,
) -> Outcome:
    watch = _Watch(outcome)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(watch)
    weights = {name: w for name, w in model.named_parameters() if not is_lazy(w)}
    outcome.start = {name: weight.detach().clone() for name, weight in weights.items()}
    training, validation = _loader(batches[: case.steps]), _loader(batches[case.steps :])
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()) as out:
            warnings.simplefilter("always")
            if case.validates_first:
                make().validate(model, training, verbose=False)
            for fit in range(case.fits):
                if fit and case.between is not None:
                    case.between(model)
                options = case.trainer() if callable(case.trainer) else copy.deepcopy(case.trainer)
                options["callbacks"] = [*options.get("callbacks", []), watch]
                trainer = make(**options)
                trainer.fit(
                    model,
                    training if case.steps else None,
                    validation if case.val_steps else None,
                )
        outcome.warnings = [str(warning.message) for warning in caught]
        outcome.lines += outcome.warnings
        outcome.lines.append(" ".join(out.getvalue().split()))
        outcome.metrics = {name: float(v) for name, v in trainer.callback_metrics.items()}
        outcome.state = whole_state(model)
        outcome.same = None if case.same is None else case.same(model)
        if case.predicts:
            outcome.predictions = trainer.predict(model, _loader(predicted))
    finally:
        logger.removeHandler(watch)
    return outcome


def _loader(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def _train_on_mean(model: Any) -> None:
    """Let a step of the model take the batches of all ranks, and return the mean of their losses."""
    step_of_rank = model.training_step

    def training_step(batches: list[Any], batch_idx: int) -> Tensor:
        return torch.stack([step_of_rank(batch, batch_idx) for batch in batches]).mean()

    model.training_step = training_step
