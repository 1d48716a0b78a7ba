"""Jobs of many forms, on CUDA devices in host memory: they have the numbers of CPUs, and no
hazard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host_cuda.matrix import CASES, assert_fits_as_on_cpus, fit
from tests.support.host_cuda.products import PRODUCTS, REFUSED
from tests.support.host_cuda.runs import DeviceRanks, device_ranks
from tests.support.parameters import slow_except

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
OF_TWO_RANKS = [name for name in CASES if name.startswith("pipeline_parallel")]


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceRanks]:
    """One rank."""
    with device_ranks(1) as ranks:
        yield ranks


@pytest.mark.parametrize("name", slow_except(QUICK, CASES))
def test_a_fit_on_devices_has_the_numbers_of_cpus_and_no_hazard(
    devices: DeviceRanks, name: str, tmp_path: Path
) -> None:
    assert_fits_as_on_cpus(devices, 2, CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_TWO_RANKS])
def test_a_fit_on_one_device_has_the_numbers_of_a_cpu(
    device: DeviceRanks, name: str, tmp_path: Path
) -> None:
    assert_fits_as_on_cpus(device, 1, CASES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_tables_of_all_kinds_have_the_numbers_of_cpus(
    devices: DeviceRanks, name: str, tmp_path: Path
) -> None:
    assert_fits_as_on_cpus(devices, 2, PRODUCTS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused_on_every_rank(
    devices: DeviceRanks, name: str, tmp_path: Path
) -> None:
    case, words = REFUSED[name]
    for seen in devices.call(fit, case, "gpu", tmp_path):
        assert words in seen.error
