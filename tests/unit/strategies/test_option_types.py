"""Every option of every strategy, and of options inside of options, refuses a value of a wrong type
by name."""

import dataclasses
import inspect
from typing import Any, get_type_hints

import pytest

import lightning_distrec
from lightning_distrec.checkpoint.checkpoint_options import IncrementalOptions
from lightning_distrec.errors import ConfigError
from lightning_distrec.registration import STRATEGIES
from lightning_distrec.strategies.run import strategy_arguments
from lightning_distrec.strategies.run.strategy import DistRecStrategy

KINDS: dict[str, Any] = {
    name: getattr(lightning_distrec, name) for name in lightning_distrec.__all__
}
OPTIONS = [kind for kind in KINDS.values() if dataclasses.is_dataclass(kind)] + [IncrementalOptions]
PUBLIC_STRATEGIES = [KINDS[class_name] for class_name, _ in STRATEGIES.values()]
RUN_OPTIONS = list(inspect.signature(DistRecStrategy.__init__).parameters)[1:]


def _names(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    own = list(inspect.signature(kind.__init__).parameters)[1:-1]
    return [*own, *RUN_OPTIONS]


CASES = [(kind, name) for kind in [*PUBLIC_STRATEGIES, *OPTIONS] for name in _names(kind)]


@pytest.mark.parametrize(
    ("kind", "name"), CASES, ids=[f"{kind.__name__}.{name}" for kind, name in CASES]
)
def test_a_value_of_a_wrong_type_is_refused_by_name(kind: Any, name: str) -> None:
    needed = {"every": 2, "full_every": 4} if kind is IncrementalOptions else {}
    for value in (b"bytes", 1j, [{1}], {b"": b""}):
        with pytest.raises(ConfigError, match=name):
            kind(**needed | {name: value})


@pytest.mark.parametrize("kind", PUBLIC_STRATEGIES)
def test_lightnings_names_lead_to_ours(kind: Any) -> None:
    for name in (
        "cpu_offload",
        "mixed_precision",
        "sharding_strategy",
        "timeout",
        "state_dict_type",
        "start_method",
    ):
        with pytest.raises(
            ConfigError, match=f"{name}= is no option of {kind.strategy_name}. Use "
        ):
            kind(**{name: None})


def test_type_checkers_see_the_options_of_the_class_above() -> None:
    hints = get_type_hints(DistRecStrategy.__init__)
    del hints["return"]
    assert get_type_hints(strategy_arguments.RunOptions) == hints
