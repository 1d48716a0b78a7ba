"""Jobs of many forms, on CUDA devices in host memory: they have the numbers of CPUs, and no
hazard."""

from pathlib import Path

import pytest

from tests.support.host_cuda.matrix import CASES, assert_fits_as_on_cpus
from tests.support.host_cuda.runs import DeviceRanks
from tests.support.parameters import slow_except

QUICK = [
    "bags, Adagrad",
    "16-mixed",
    "sparse updates, clipped",
    "cached rows, resumed",
    "HashZch",
    "fsdp_tuned",
    "pipeline_parallel, 1f1b",
]


@pytest.mark.parametrize("name", slow_except(QUICK, CASES))
def test_a_fit_on_devices_has_the_numbers_of_cpus_and_no_hazard(
    devices: DeviceRanks, name: str, tmp_path: Path
) -> None:
    assert_fits_as_on_cpus(devices, CASES[name], tmp_path)
