"""Jobs of many forms, on CUDA devices in host memory: they have the numbers of CPUs, and no hazard."""

from typing import Any

import pytest
import torch

from tests.support.host_cuda.matrix import CASES, fit
from tests.support.host_cuda.runs import Seen, run_each_on_devices
from tests.support.parameters import slow_except
from tests.support.ranks import run_each_on_ranks

QUICK = [
    "bags, Adagrad",
    "bags, Adam",
    "bags, table-row-wise",
    "sequences, Adagrad",
    "16-mixed",
    "sparse updates, clipped",
    "sharded dense layers",
    "cached rows, resumed",
    "saved in the background",
    "HashZch",
    "fsdp_tuned",
    "pipeline_parallel, 1f1b",
]


@pytest.fixture(scope="module", params=[2])
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Case -> what it gave on each rank: on CPUs, then on devices. Those alone that are tested."""
    here = [item for item in request.session.items if item.path == request.path]
    names = {name for item in here if (name := getattr(item, "callspec", item).params.get("name"))}  # type: ignore[attr-defined]

    def calls(accelerator: str) -> dict[str, tuple[Any, ...]]:
        folder = tmp_path_factory.mktemp(accelerator)
        return {name: (fit, name, accelerator, folder / str(number)) for number, name in enumerate(sorted(names))}

    on_cpus = run_each_on_ranks(calls("cpu"), request.param)
    on_devices = run_each_on_devices(calls("gpu"), request.param)
    return {name: [(on_cpus[rank][name], on_devices[rank][name]) for rank in range(request.param)] for name in names}


@pytest.mark.parametrize("name", slow_except(QUICK, CASES))
def test_a_fit_on_devices_has_the_numbers_of_cpus_and_no_hazard(fits: dict[str, list[Any]], name: str) -> None:
    tolerance = CASES[name].tolerance
    for expected, seen in fits[name]:
        assert isinstance(seen, Seen)
        assert not seen.error, seen.error
        assert seen.hazards == []
        assert len(seen.result["losses"]) >= 6
        for part in ("losses", "logged", "weights"):
            actual = seen.result[part]
            torch.testing.assert_close(actual, expected[part], atol=tolerance, rtol=tolerance, msg=part_named(part))


def part_named(part: str) -> Any:
    return lambda message: f"{part}: {message}"
