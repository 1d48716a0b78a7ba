"""Metrics of predictions and labels are those of torchmetrics, torchrec.metrics and plain
formulas."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics.functional.classification import binary_auroc

from lightning_distrec.errors import ConfigError
from lightning_distrec.metrics import (
    GAUC,
    Calibration,
    DecayedAUC,
    NormalizedEntropy,
    TaskMetrics,
    WindowedAUC,
)
from lightning_distrec.metrics.click_metrics import running_sums


def examples(
    number: int = 400, users: int = 30, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return probabilities (many are equal), labels, users and weights."""
    draw = torch.Generator().manual_seed(seed)
    preds = torch.randint(1, 40, (number,), generator=draw) / 41
    labels = (torch.rand(number, generator=draw) < preds).float()
    named = torch.randint(users, (number,), generator=draw)
    return preds, labels, named, torch.rand(number, generator=draw)


def updated(metric: Any, *values: Tensor, size: int = 37) -> Any:
    """Return the metric, after updates with batches."""
    for batch in zip(*(value.split(size) for value in values), strict=True):
        metric.update(*batch)
    return metric


def plain_gauc(preds: Tensor, labels: Tensor, users: Tensor, weighting: str = "examples") -> float:
    """Return the mean of torchmetrics' AUROC over users."""
    masks = [users == user for user in users.unique()]
    masks = [mask for mask in masks if len(labels[mask].unique()) == 2]
    aucs = [float(binary_auroc(preds[mask], labels[mask].long())) for mask in masks]
    return float(
        np.average(aucs, weights=[int(m.sum()) if weighting == "examples" else 1 for m in masks])
    )


def test_normalized_entropy_and_calibration_are_those_of_torchrec() -> None:
    from torchrec.metrics.calibration import compute_calibration, get_calibration_states
    from torchrec.metrics.ne import compute_ne, get_ne_states

    preds, labels, _, weights = examples()
    preds[0], preds[1] = 0.0, 1.0
    arguments = [item.double()[None] for item in (labels, preds, weights)]
    states = get_ne_states(*arguments, 1e-12)
    truth = compute_ne(
        *(
            states[k]
            for k in ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")
        ),
        1e-12,
    )
    assert float(updated(NormalizedEntropy(), preds, labels, weights).compute()) == pytest.approx(
        float(truth), rel=1e-6
    )
    truth = compute_calibration(*get_calibration_states(*arguments).values())
    assert float(updated(Calibration(), preds, labels, weights).compute()) == pytest.approx(
        float(truth), rel=1e-6
    )
    # A saturated log-odd is no saturated probability, so these two are left out.
    ordinary = [item[2:] for item in (preds, labels, weights)]
    logits = [torch.logit(ordinary[0].double()), *ordinary[1:]]
    for kind in (NormalizedEntropy, Calibration):
        expected = float(updated(kind(), *ordinary).compute())
        assert float(updated(kind(from_logits=True), *logits).compute()) == pytest.approx(
            expected, rel=1e-6
        )


@pytest.mark.parametrize("weighting", ["examples", "users"])
def test_gauc_is_the_mean_of_each_users_auroc(weighting: str) -> None:
    preds, labels, users, _ = examples()
    truth = plain_gauc(preds, labels, users, weighting)
    exact = updated(GAUC(weighting=weighting), preds, labels, users - 7)
    assert float(exact.compute()) == pytest.approx(truth, abs=1e-6)
    assert float(exact.error_bound()) == 0
    fine = updated(GAUC(bins=2000, num_users=30, weighting=weighting), preds, labels, users)
    # Every one of the 39 scores has a bin of its own: what shares a bin is equal, and counts half.
    assert float(fine.compute()) == pytest.approx(truth, abs=1e-6)
    coarse = updated(GAUC(bins=40, num_users=30, weighting=weighting), preds, labels, users)
    assert 1e-4 < abs(float(coarse.compute()) - truth) <= float(coarse.error_bound()) < 0.2


def test_a_windowed_auc_is_that_of_the_latest_examples() -> None:
    preds, labels, _, _ = examples()
    for window in (90, 20, 1000):
        metric = updated(WindowedAUC(window), preds, labels)
        truth = float(binary_auroc(preds[-window:], labels[-window:].long()))
        assert float(metric.compute()) == pytest.approx(truth, abs=1e-6), window
    from torchrec.metrics.auc import compute_auc

    preds = preds + torch.arange(400) * 1e-6
    truth = float(compute_auc(1, [preds[None, -90:]], [labels[None, -90:]], [torch.ones(1, 90)]))
    assert float(updated(WindowedAUC(90), preds, labels).compute()) == pytest.approx(
        truth, abs=1e-6
    )


def plain_decayed_auc(preds: Tensor, labels: Tensor, weights: Tensor) -> float:
    """Return the weighted share of pairs in order, one by one."""
    positive = labels > 0.5
    pairs = weights[positive][:, None] * weights[~positive]
    above = preds[positive][:, None] - preds[~positive]
    return float((pairs * ((above > 0) + 0.5 * (above == 0))).sum() / pairs.sum())


def test_a_decayed_auc_weights_examples_by_their_age() -> None:
    preds, labels, _, _ = examples()
    ages = torch.arange(399, -1, -1) // 40
    truth = plain_decayed_auc(preds, labels, 0.5 ** (ages.double() / 2.5))
    metric = updated(DecayedAUC(half_life=2.5), preds, labels, size=40)
    assert float(metric.compute()) == pytest.approx(truth, abs=1e-6)
    assert abs(truth - float(binary_auroc(preds, labels.long()))) > 1e-3
    logits = updated(DecayedAUC(2.5, from_logits=True), torch.logit(preds), labels, size=40)
    assert float(logits.compute()) == pytest.approx(truth, abs=1e-6)
    coarse = updated(DecayedAUC(half_life=2.5, bins=40), preds, labels, size=40)
    assert abs(float(coarse.compute()) - truth) <= float(coarse.error_bound()) < 0.2


@pytest.mark.parametrize("make", [GAUC, lambda: WindowedAUC(90), DecayedAUC])
def test_a_prediction_that_is_no_number_is_not_passed_over(make: Any) -> None:
    preds, labels, users, _ = examples()
    preds[350] = math.nan
    assert math.isnan(updated(make(), preds, labels, *([users] if make is GAUC else [])).compute())


def test_each_task_has_metrics_of_its_own() -> None:
    preds, labels, users, _ = examples()
    bought = torch.where(labels > 0, (torch.arange(400) % 3 == 0).float(), -1)
    kinds = {
        "ne": NormalizedEntropy(),
        "gauc": GAUC(),
        "slow": DecayedAUC(9.0),
        "fast": DecayedAUC(0.5),
    }
    metrics = TaskMetrics(["click", "purchase"], kinds, prefix="val/", ignore_index=-1)
    for batch in zip(
        preds.split(50), labels.split(50), bought.split(50), users.split(50), strict=True
    ):
        its_labels = {"click": batch[1], "purchase": batch[2]}
        metrics.update(torch.stack([batch[0], batch[0]], 1), its_labels, users=batch[3])
    actual = metrics.compute()
    clicked = bought >= 0
    truth = {
        "val/click/ne": updated(NormalizedEntropy(), preds, labels, size=50),
        "val/click/gauc": updated(GAUC(), preds, labels, users),
        "val/click/slow": updated(DecayedAUC(9.0), preds, labels, size=50),
        "val/click/fast": updated(DecayedAUC(0.5), preds, labels, size=50),
        "val/purchase/ne": updated(NormalizedEntropy(), preds[clicked], bought[clicked]),
        "val/purchase/gauc": updated(GAUC(), preds[clicked], bought[clicked], users[clicked]),
    }
    assert {name: float(actual[name]) for name in truth} == pytest.approx({
        k: float(m.compute()) for k, m in truth.items()
    })
    assert set(metrics.by_name()) == set(actual)
    metrics.reset()
    assert float(metrics.tasks["click"]["ne"].weights) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, n: GAUC(bins=10), "set both"),
        (lambda p, n: GAUC(weighting="clicks"), "Use one of 'examples', 'users'"),
        (lambda p, n: WindowedAUC(0), "window=0"),
        (lambda p, n: DecayedAUC(0), "half_life=0"),
        (lambda p, n: Calibration().update(p, n[1:]), "need the same shape"),
        (lambda p, n: Calibration().update(n, n), "floating point"),
        (
            lambda p, n: TaskMetrics(["a"], {"ne": NormalizedEntropy()}).update({"b": p}, {"b": p}),
            r"tasks are \['a'\]",
        ),
        (
            lambda p, n: TaskMetrics(["a"], {"ne": NormalizedEntropy()}).update(p, p),
            r"must be \(examples, 1\)",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(torch.rand(4), torch.arange(4))


class FloatSums(TorchDispatchMode):
    """Notes where running sums of floats are made: on CUDA they raise under deterministic
    algorithms."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "cumsum" in func.__name__ and args[0].is_floating_point():
            self.devices.add(args[0].device.type)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("deterministic", [False, True])
def test_running_sums_of_floats_leave_the_gpu_where_it_must_be_deterministic(
    deterministic: bool,
) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        with FakeTensorMode(), FloatSums() as sums:
            result = running_sums(torch.ones(2, 8, device="cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert sums.devices == {"cpu" if deterministic else "cuda"}
    assert (result.device.type, tuple(result.shape)) == ("cuda", (2, 8))
