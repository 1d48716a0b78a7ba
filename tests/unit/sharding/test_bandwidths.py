"""Where the planner's bandwidths come from: the argument, the environment, a measurement,
torchrec."""

import pytest
from torchrec.distributed.planner import constants

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.planning.bandwidths import (
    DEFAULTS,
    NAMES,
    AssumedBandwidths,
    Bandwidth,
    bandwidth_request,
)
from lightning_distrec.sharding.planning.table_options import PlanningOptions

ENVIRONMENT = {"INTRA_NODE_BANDWIDTH": "100GB/s", "CROSS_NODE_BANDWIDTH": "12500000000"}


def assumed(inputs: object, environment: dict[str, str] | None = None) -> AssumedBandwidths:
    """Return what is believed where every measurement says 1 byte per second."""
    request = bandwidth_request(inputs, environment or {})  # type: ignore[arg-type]
    measured = {
        name: Bandwidth(bytes_per_second=1.0, origin="measured") for name in request.to_measure
    }
    return request.with_measured(measured)


def said(bandwidths: AssumedBandwidths) -> dict[str, tuple[float, str]]:
    return {
        name: (first.bytes_per_second, first.origin)
        for name in NAMES
        for first in [getattr(bandwidths, name)]
    }


def test_without_a_word_torchrecs_defaults_are_believed_in_bytes_per_second() -> None:
    actual = said(assumed(None))
    assert actual["intra_node"] == (600 * 2**30, "torchrec's default")
    assert actual["cross_node"] == (12.5 * 2**30, "torchrec's default")
    assert assumed(None).host_memory.bytes_per_millisecond == constants.DDR_MEM_BW
    assert {name: number for name, (number, _) in actual.items()} == DEFAULTS


def test_an_argument_stands_above_the_environment_and_that_above_torchrec() -> None:
    actual = said(assumed({"intra_node": "25GB/s"}, ENVIRONMENT))
    assert actual["intra_node"] == (25e9, "argument")
    assert actual["cross_node"] == (12.5e9, "environment CROSS_NODE_BANDWIDTH")
    assert actual["host_memory"][1] == "torchrec's default"


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


def test_measure_asks_for_what_neither_argument_nor_environment_gives() -> None:
    request = bandwidth_request("measure", ENVIRONMENT)
    assert request.to_measure == ("device_memory", "host_memory", "host_to_device")
    assert said(assumed("measure", ENVIRONMENT))["host_memory"] == (1.0, "measured")


def test_a_variable_that_is_no_bandwidth_is_reported_by_name() -> None:
    with pytest.raises(
        ConfigError, match="the environment's CROSS_NODE_BANDWIDTH='25 GBs': A bandwidth above 0"
    ):
        bandwidth_request(None, {"CROSS_NODE_BANDWIDTH": "25 GBs"})


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
