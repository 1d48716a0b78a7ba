"""The columns of Criteo's click logs, and the tables that MLPerf's benchmark makes of them.

Sizes: MLPerf Training v3 DLRM-DCNv2 (mlcommons/training, recommendation_v2/torchrec_dlrm): the
counts of Criteo 1TB, capped at 40 million, and how many ids each feature has in its multi-hot
variant.
"""

NUM_INTEGERS = 13
NUM_CATEGORIES = 26

INTEGERS = tuple(f"I{number}" for number in range(1, NUM_INTEGERS + 1))
CATEGORIES = tuple(f"C{number}" for number in range(1, NUM_CATEGORIES + 1))
LABEL = "label"
COLUMNS = (LABEL, *INTEGERS, *CATEGORIES)
"""Of Criteo's text files, which have no header."""

MLPERF_ROWS = (
    *(
        40_000_000,
        39_060,
        17_295,
        7_424,
        20_265,
        3,
        7_122,
        1_543,
        63,
        40_000_000,
        3_067_956,
        405_282,
        10,
    ),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
"""Rows of each category's table."""

MLPERF_BAG_SIZES = (
    3,
    2,
    1,
    2,
    6,
    1,
    1,
    1,
    1,
    7,
    3,
    8,
    1,
    6,
    9,
    5,
    1,
    1,
    1,
    12,
    100,
    27,
    10,
    3,
    1,
    1,
)
"""Ids of each category in the multi-hot variant."""


def table_rows(max_rows: int) -> tuple[int, ...]:
    """Return the rows of each table, none above `max_rows`. Each has one more row for missing
    values, row 0."""
    return tuple(1 + min(rows, max_rows) for rows in MLPERF_ROWS)
