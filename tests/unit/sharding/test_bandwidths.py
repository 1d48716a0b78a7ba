"""Where the planner's bandwidths come from: the argument, the environment, a measurement,
torchrec."""

import pytest

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.planning.bandwidths import (
    NAMES,
    AssumedBandwidths,
    Bandwidth,
    bandwidth_request,
)
from lightning_distrec.sharding.planning.table_options import PlanningOptions

ENVIRONMENT = {"INTRA_NODE_BANDWIDTH": "100GB/s", "CROSS_NODE_BANDWIDTH": "12500000000"}


def assumed(
    inputs: object, environment: dict[str, str] | None = None, device: str = "cuda"
) -> AssumedBandwidths:
    """Return what is believed where every measurement says 1 byte per second."""
    request = bandwidth_request(inputs, environment or {})  # type: ignore[arg-type]
    measured = {
        name: Bandwidth(bytes_per_second=1.0, origin="measured") for name in request.to_measure
    }
    return request.with_measured(measured, device)


def said(bandwidths: AssumedBandwidths) -> dict[str, tuple[float, str]]:
    return {
        name: (first.bytes_per_second, first.origin)
        for name in NAMES
        for first in [getattr(bandwidths, name)]
    }


def test_an_argument_stands_above_the_environment_and_that_above_torchrec() -> None:
    actual = said(assumed({"intra_node": "25GB/s"}, ENVIRONMENT))
    assert actual["intra_node"] == (25e9, "argument")
    assert actual["cross_node"] == (12.5e9, "environment CROSS_NODE_BANDWIDTH")
    assert actual["host_memory"][1] == "torchrec's default"


def test_ranks_on_cpus_are_not_assumed_to_have_links_of_gpus() -> None:
    on_cpus, on_gpus = said(assumed(None, device="cpu")), said(assumed(None))
    for name in ("intra_node", "cross_node"):
        assert on_cpus[name] == (1e9, "assumed of gloo")
        assert on_gpus[name][0] > 10 * on_cpus[name][0]
    assert on_cpus["host_memory"] == on_gpus["host_memory"]
    assert said(assumed({"cross_node": "5GB/s"}, device="cpu"))["cross_node"] == (5e9, "argument")


@pytest.mark.parametrize(
    ("variable", "text", "bytes_per_second"),
    [
        ("INTRA_NODE_BANDWIDTH", "644245094.4", 600 * 2**30),
        ("CROSS_NODE_BANDWIDTH", "125000000", 125e6),
        ("CROSS_NODE_BANDWIDTH", "200 mbit/s", 25e6),
    ],
)
def test_a_number_that_no_network_has_is_torcheasyrecs(
    variable: str, text: str, bytes_per_second: float
) -> None:
    name = variable.lower().removesuffix("_bandwidth")
    number, origin = said(assumed(None, {variable: text}))[name]
    assert number == pytest.approx(bytes_per_second)
    assert ("read as bytes per millisecond" in origin) == (number > 1e9)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"intra_node": "0GB/s"},
            "planning.bandwidths.intra_node='0GB/s': A bandwidth above 0 is needed",
        ),
        ("mesure", "bandwidths='mesure': must be options, or a dict, or 'measure'"),
    ],
)
def test_what_cannot_be_is_refused_when_the_strategy_is_made(inputs: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchRecShardedStrategy(planning={"bandwidths": inputs})
    with pytest.raises(ConfigError, match=message):
        PlanningOptions(bandwidths=inputs)  # type: ignore[arg-type]
