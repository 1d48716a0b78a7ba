"""FBGEMM's optimizers and its cache on a CUDA device in host memory have the numbers of its CPU
wheel, and torch's."""

from typing import Any

import pytest
import torch

from tests.support.host_cuda.kernels import train_kernel, train_plainly
from tests.support.host_cuda.runs import device_ranks

pytestmark = pytest.mark.slow

PLACES = ("DEVICE", "MANAGED", "MANAGED_CACHING")
OF_CPU_WHEEL = [
    (optimizer, *form)
    for optimizer in ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")
    for form in (("SUM", False), ("SUM", True), ("MEAN", False), ("NONE", False))
]
OF_TORCH = {
    "EXACT_SGD": torch.optim.SGD,
    "EXACT_ADAGRAD": torch.optim.Adagrad,
    "ADAM": torch.optim.SparseAdam,
}
Rows = dict[tuple[Any, ...], list[torch.Tensor]]


@pytest.fixture(scope="module")
def trained() -> Rows:
    cases = [(kind, place, *form) for kind, *form in OF_CPU_WHEEL for place in PLACES]
    cases += [(kind, place) for kind in ("ADAM", "LAMB") for place in PLACES]
    trained = {}
    with device_ranks(1) as device:
        for case in cases:
            (seen,) = device.call(train_kernel, *case)
            assert not seen.error, seen.error
            assert seen.hazards == []
            trained[case] = seen.result
    return trained


@pytest.mark.parametrize("case", OF_CPU_WHEEL, ids=str)
def test_rows_anywhere_are_trained_as_by_the_cpu_wheel(
    trained: Rows, case: tuple[Any, ...]
) -> None:
    optimizer, *form = case
    expected = train_kernel(optimizer, "HOST", *form)
    for place in PLACES:
        torch.testing.assert_close(
            trained[(optimizer, place, *form)], expected, atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize("optimizer", OF_TORCH)
def test_rows_anywhere_are_trained_as_by_torch(trained: Rows, optimizer: str) -> None:
    for place in PLACES:
        case = (optimizer, place) if optimizer == "ADAM" else (optimizer, place, "SUM", False)
        torch.testing.assert_close(
            trained[case][-2:], train_plainly(OF_TORCH[optimizer]), atol=1e-5, rtol=1e-5
        )


def test_lamb_trains_the_same_wherever_rows_are(trained: Rows) -> None:
    for place in PLACES[1:]:
        torch.testing.assert_close(
            trained["LAMB", place], trained["LAMB", "DEVICE"], atol=1e-6, rtol=1e-6
        )
