"""Sizes and bandwidths as people write them."""

import pytest

from lightning_distrec.errors import ConfigError
from lightning_distrec.units import format_bandwidth, parse_bandwidth, parse_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [("80GB", 80 * 10**9), ("24GiB", 24 * 2**30), ("1.5 tb", 15 * 10**11), ("1000", 1000)],
)
def test_sizes_are_understood(text: str, number: int) -> None:
    assert parse_bytes(text, "size") == number


@pytest.mark.parametrize("text", ["", "GB", "0GB", "-1GB", "80 G B", "nan", "80 Gbit", "80Gibs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match="^size: .*A size above 0 is needed, such as 80GB, 24GiB or 8000000000."
    ):
        parse_bytes(text, "size")


@pytest.mark.parametrize(
    ("inputs", "number"),
    [
        ("25GB/s", 25e9),
        ("200Gbit/s", 25e9),
        ("1.5 TiB/s", 1.5 * 2**40),
        ("1e3 MB/s", 1e9),
        ("10 gbit/s", 1.25e9),
        ("12500", 12500.0),
        (12500, 12500.0),
        (2.5e10, 2.5e10),
    ],
)
def test_bandwidths_are_understood(inputs: str | float, number: float) -> None:
    assert parse_bandwidth(inputs, "b") == number


@pytest.mark.parametrize(
    "inputs",
    [
        "",
        "fast",
        "0GB/s",
        0,
        -1.0,
        "-5GB/s",
        "nan",
        float("nan"),
        float("inf"),
        "1e999",
        True,
        [],
        "5 GB / s",
        "25GB",
        "25Gb/s",
        "25gib/s",
    ],
)
def test_what_is_no_bandwidth_is_refused(inputs: object) -> None:
    with pytest.raises(ConfigError, match="^b: A bandwidth above 0 is needed, such as 25GB/s"):
        parse_bandwidth(inputs, "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [950.0, 25e6, 1.2e12, 644.2e9, 999_949.0])
def test_a_bandwidth_in_words_can_be_given_again(number: float) -> None:
    assert parse_bandwidth(format_bandwidth(number), "b") == pytest.approx(number, rel=0.01)
