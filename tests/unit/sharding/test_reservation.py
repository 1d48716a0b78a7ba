"""What of a rank's memory is kept for what is not tables."""

import pytest

from lightning_distrec.errors import ConfigError, PlanError
from lightning_distrec.sharding.planning.table_options import PlanningOptions
from lightning_distrec.sharding.planning.topology import (
    RankMemory,
    reservation_of,
)


@pytest.mark.parametrize(
    ("inputs", "percent", "kept_of_1000", "words", "origin"),
    [
        ("20%", "30", 200, "20%", "argument"),
        ("400B", " ", 400, "400 B", "argument"),
        (None, "30", 300, "30%", "environment STORAGE_RESERVE_PERCENT"),
        (None, "0.5", 500, "50%", "environment STORAGE_RESERVE_PERCENT=0.5, a share"),
        (None, "0", 0, "0%", "environment STORAGE_RESERVE_PERCENT=0, a share"),
        (None, " ", 150, "15%", "default"),
    ],
)
def test_the_argument_counts_then_the_environment(
    inputs: str | None, percent: str, kept_of_1000: int, words: str, origin: str
) -> None:
    retained = reservation_of(inputs, {"STORAGE_RESERVE_PERCENT": percent})
    assert (retained.bytes_of(1000), retained.in_words, retained.origin) == (
        kept_of_1000,
        words,
        origin,
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("0%", "planning.reserve='0%': a percentage above 0 and below 100 is needed"),
        ("0GB", "planning.reserve='0GB': A size above 0 is needed"),
        ("15", "planning.reserve='15' has no unit. Write a percentage such as '15%'"),
        ("mesure", "planning.reserve='mesure' is no size. Write a percentage"),
    ],
)
def test_what_cannot_be_is_refused(inputs: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanningOptions(reserve=inputs)  # type: ignore[arg-type]


def test_where_nothing_is_left_the_rank_is_named() -> None:
    memory = RankMemory(device_bytes=(5000, 3000), host_bytes=(0, 0))
    with pytest.raises(
        PlanError, match="3.9 KiB .argument. are reserved .* rank 1 has 2.9 KiB: nothing is left"
    ):
        memory.less(reservation_of("4KB", {}))
