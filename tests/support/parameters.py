"""Parameters of a test of which `make test` runs some, and `make test-all` all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return `values` as parameters; those not in `quick` are marked as slow. A tuple is several
    arguments."""
    values = list(values)
    assert all(value in values for value in quick), [
        value for value in quick if value not in values
    ]
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in quick else pytest.mark.slow,
        )
        for value in values
    ]
