"""Plain arguments of the strategy: what each does to the process, and what they cannot be."""

from collections.abc import Iterator

import pytest
import torch

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy
from lightning_distrec.errors import ConfigError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


def test_the_precision_of_products_is_set_for_the_process_and_otherwise_left() -> None:
    torch.set_float32_matmul_precision("medium")
    TorchRecShardedStrategy()
    assert torch.get_float32_matmul_precision() == "medium"
    TorchRecShardedStrategy(float32_matmul_precision="high")
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"float32_matmul_precision": "tf32"}, "float32_matmul_precision='tf32' is not known. Use one of 'highest'"),
        ({"watchdog_seconds": -1}, "watchdog_seconds=-1: must be at least 0, which disables the watchdog"),
        ({"timeout_seconds": 0}, "timeout_seconds=0: must be a number of seconds above 0"),
    ],
)
def test_what_an_argument_cannot_be(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchRecShardedStrategy(**arguments)


def test_the_variable_of_torcheasyrec_sets_the_timeout_where_the_argument_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(**arguments: float) -> float:
        return TunedDDPStrategy(**arguments)._timeout.total_seconds()

    monkeypatch.delenv("PROCESS_GROUP_TIMEOUT_SECONDS", raising=False)
    assert seconds() == 1800
    monkeypatch.setenv("PROCESS_GROUP_TIMEOUT_SECONDS", "90")
    assert seconds() == 90
    assert seconds(timeout_seconds=45.5) == 45.5
    for value in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv("PROCESS_GROUP_TIMEOUT_SECONDS", value)
        with pytest.raises(ConfigError, match=f"PROCESS_GROUP_TIMEOUT_SECONDS={value}: must be a number of seconds"):
            seconds()
