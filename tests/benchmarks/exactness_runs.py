"""Averages of weights and numbers of ranks: runs of the tests, with numbers in the place of
asserts."""

import io
from contextlib import redirect_stdout
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import SWALR, AveragedModel

from tests.multiprocess.sharding import test_batch_sizes
from tests.multiprocess.strategies import test_averages
from tests.support.click_model import ClickModel, SequenceModel, largest_difference, seeded
from tests.support.ranks import run_on_ranks

JOBS: dict[str, tuple[type, Any, float]] = {
    "bags, SGD": (ClickModel, test_batch_sizes.SGD, 1e-6),
    "sequences, Adagrad": (SequenceModel, test_batch_sizes.ADAGRAD, 1e-5),
    "bags, Adam": (ClickModel, test_batch_sizes.ADAM, 1e-5),
}
NUMBERS_OF_RANKS = (1, 2, 3, 4)


def _averages() -> dict[str, dict[str, Tensor]]:
    with redirect_stdout(io.StringIO()):
        return {
            "EMAWeightAveraging(0.9), SGD": test_averages._moving(test_averages.SGD, "", 1)[0],
            "EMAWeightAveraging(0.9), Adam": test_averages._moving(test_averages.ADAM, "", 1)[0],
            "StochasticWeightAveraging, SGD": test_averages._stochastic(test_averages.SGD),
        }


def _stochastic_unsharded() -> dict[str, Tensor]:
    """Average by a plain loop, from the second epoch on, while the rate goes to 0.5."""
    model = seeded(test_averages.Averaged, *test_averages.SGD)
    stepper = model.configure_optimizers()
    averaged, scheduler = AveragedModel(model), None
    for epoch in range(test_averages.EPOCHS):
        if epoch == 1:  # swa_epoch_start counts from 1
            stepper.param_groups[0]["initial_lr"] = 0.5
            scheduler = SWALR(stepper, swa_lr=0.5, anneal_epochs=2, anneal_strategy="linear")
        if scheduler is not None:
            averaged.update_parameters(model)
        for step in range(test_averages.STEPS):
            test_averages.train_step(model, stepper, step)
        if scheduler is not None:
            scheduler.step()
    return {key: value.detach() for key, value in averaged.module.state_dict().items()}


def differences_of_averages() -> dict[str, tuple[float, float]]:
    """Return kind of average -> its largest difference on two ranks, and what is allowed."""
    actual = run_on_ranks(_averages, 2, timeout_seconds=200)[0]
    expected = [
        test_averages.Reference(test_averages.SGD, test_averages.EPOCHS).state,
        test_averages.Reference(test_averages.ADAM, test_averages.EPOCHS).state,
        _stochastic_unsharded(),
    ]
    start = seeded(test_averages.Averaged, *test_averages.SGD).state_dict()
    assert all(min(largest_difference(state, start).values()) > 1e-4 for state in expected)
    return {
        name: (
            max(largest_difference(state, kind_values).values()),
            1e-5 if "Adam" in name else 1e-6,
        )
        for (name, state), kind_values in zip(actual.items(), expected, strict=True)
    }


def _jobs() -> list[tuple[dict[str, Tensor], list[float]]]:
    with redirect_stdout(io.StringIO()):
        return [
            test_batch_sizes._train(kind, optimizer, False, {})
            for kind, optimizer, _ in JOBS.values()
        ]


def differences_by_ranks() -> dict[str, tuple[dict[int, tuple[float, float]], float]]:
    """Return job -> number of ranks -> largest difference of its losses and weights; and what is
    allowed."""
    expected = [
        test_batch_sizes._unsharded(kind, optimizer) for kind, optimizer, _ in JOBS.values()
    ]
    actual: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in JOBS}
    for num_ranks in NUMBERS_OF_RANKS:
        rank_results = run_on_ranks(_jobs, num_ranks, timeout_seconds=200)
        for job, name in enumerate(JOBS):
            per_step = zip(*(result[job][1] for result in rank_results), strict=True)
            losses = [sum(losses) / num_ranks for losses in per_step]
            losses_values = max(
                abs(local - loss) for local, loss in zip(losses, expected[job].losses, strict=True)
            )
            weights = largest_difference(rank_results[0][job][0], expected[job].state_dict())
            actual[name][num_ranks] = losses_values, max(weights.values())
    return {name: (actual[name], limit) for name, (_, _, limit) in JOBS.items()}
