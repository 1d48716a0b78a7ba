"""Sizes and bandwidths as people write them."""

import pytest

from lightning_distrec.errors import ConfigError
from lightning_distrec.units import format_bandwidth, parse_bandwidth, parse_bytes


def test_sizes_are_understood_or_refused() -> None:
    sizes = {"80GB": 80 * 10**9, "24GiB": 24 * 2**30, "1.5 tb": 15 * 10**11, "1000": 1000}
    assert {text: parse_bytes(text, "size") for text in sizes} == sizes
    message = "^size: .*A size above 0 is needed, such as 80GB, 24GiB or 8000000000."
    for text in ("", "GB", "0GB", "-1GB", "80 G B", "nan", "80 Gbit", "80Gibs"):
        with pytest.raises(ConfigError, match=message):
            parse_bytes(text, "size")


def test_bandwidths_are_understood_or_refused() -> None:
    texts = {"25GB/s": 25e9, "200Gbit/s": 25e9, "1.5 TiB/s": 1.5 * 2**40, "10 gbit/s": 1.25e9}
    bandwidths = texts | {"1e3 MB/s": 1e9, "12500": 12500.0, 12500: 12500.0, 2.5e10: 2.5e10}
    assert {value: parse_bandwidth(value, "b") for value in bandwidths} == bandwidths
    texts_refused = ("", "fast", "0GB/s", "-5GB/s", "nan", "1e999", "5 GB / s", "25GB", "25Gb/s")
    numbers_refused = (0, -1.0, float("nan"), float("inf"), True, [])
    for value in (*texts_refused, "25gib/s", *numbers_refused):
        with pytest.raises(ConfigError, match="^b: A bandwidth above 0 is needed, such as 25GB/s"):
            parse_bandwidth(value, "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [950.0, 25e6, 1.2e12, 644.2e9, 999_949.0])
def test_a_bandwidth_in_words_can_be_given_again(number: float) -> None:
    assert parse_bandwidth(format_bandwidth(number), "b") == pytest.approx(number, rel=0.01)
