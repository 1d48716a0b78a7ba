"""Parameters of a test of which `make test` takes some, and `make test-all` all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def usually(usual: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return `values` as parameters; those not `usual` are marked as thorough. A tuple is several arguments."""
    values = list(values)
    assert all(value in values for value in usual), [value for value in usual if value not in values]
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in usual else pytest.mark.thorough
        )
        for value in values
    ]
